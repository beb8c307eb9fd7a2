"""Layers on several devices (accelerate's `dispatch_model`): what layers share is brought to each layer's own.

accelerate moves tensors, lists and mappings between modules, but neither the state of a call nor what the body computes
between its parts.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

State = TypeVar("State", bound="LayerState")


class LayerState:
    """Base of the dataclasses that travel with one call as ``vision=`` and that every layer reads."""

    def at(self: State, device: torch.device) -> State:
        """The same state on the device of a layer. Copied once a device; on a single device, the object itself."""
        kept = self.__dict__
        if "_copies" not in kept:
            kept["_stands"], kept["_copies"] = self._home(), {}
        if device == kept["_stands"]:
            return self  # (never among the copies: a state that held itself would outlive its call)
        copies: dict[torch.device, State] = kept["_copies"]
        if device not in copies:
            fields = dataclasses.fields(self)  # type: ignore[arg-type]
            copies[device] = type(self)(**{f.name: moved(getattr(self, f.name), device) for f in fields})
        return copies[device]

    def _home(self) -> torch.device | None:
        """Where all of it stands; None where its parts stand apart (the decoder's rotary tables may)."""
        values = (getattr(self, f.name) for f in dataclasses.fields(self))  # type: ignore[arg-type]
        parts = (part for value in values for part in (value if isinstance(value, tuple) else (value,)))
        devices = {part.device for part in parts if isinstance(part, Tensor)}
        return devices.pop() if len(devices) == 1 else None


def moved(value: Any, device: torch.device) -> Any:
    """A tensor, or a tuple with tensors, on ``device``; anything else (a list of shared slots) as it is."""
    if isinstance(value, tuple):
        return tuple(moved(part, device) for part in value)
    return value.to(device) if isinstance(value, Tensor) else value


def input_device(model: Any) -> torch.device:
    """Where the inputs of a call go: accelerate's main device where layers are spread, else where the model stands."""
    main = getattr(getattr(model, "_hf_hook", None), "execution_device", None)
    return torch.device(main) if main is not None else next(model.parameters()).device


def on_device_of(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """A processor's output (other entries too) with its tensors where `model` takes them."""
    device = input_device(model)
    return {name: moved(value, device) for name, value in inputs.items()}


def device_of(part: nn.Module | None, default: torch.device) -> torch.device:
    """Where a part of the model computes; ``default`` where its weights are offloaded, or it has none."""
    weight = None if part is None else next(part.parameters(), None)
    return default if weight is None or weight.is_meta else weight.device


@contextlib.contextmanager
def undispatched(model: Any) -> Iterator[None]:
    """Inside the block the model carries no hooks of accelerate; afterwards it is dispatched as it was.

    What was added meanwhile stands with its block, or on the main device. Raises ValueError for weights on disk.
    """
    if not hasattr(model, "_hf_hook"):
        yield
        return
    from accelerate import dispatch_model
    from accelerate.hooks import remove_hook_from_module

    places = dict(model.hf_device_map)
    if "disk" in places.values():
        raise ValueError("device_map puts layers on 'disk', which cannot take a fusion; give 'cpu' or a GPU instead")
    main = input_device(model)
    hooked = [module for module in model.modules() if hasattr(module, "_hf_hook")]
    remove_hook_from_module(model, recurse=True)
    for module in hooked:
        module.__dict__.pop("forward", None)  # accelerate leaves the old method on the instance
    yield
    for name, part in model.model.named_children():
        known = (place in ("", "model") or f"{place}.".startswith(f"model.{name}.") for place in places)
        if not any(known):
            places[f"model.{name}"] = main
            part.to(main)
    skipped = getattr(model, "_skip_keys_device_placement", None)
    dispatch_model(model, device_map=places, main_device=main, skip_keys=skipped, force_hooks=True)
