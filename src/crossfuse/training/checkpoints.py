"""Checkpoints of a run: what was trained, the optimiser and the random state, in safetensors and JSON.

::

    RUN/checkpoints/step-000040/
        adapter_model.safetensors, adapter_config.json   with LoRA: the adapter as PEFT writes it, with everything that
                                                         is trained in full beside it
        trained.safetensors                              without LoRA: what is trained besides the fusion's own weights
        fusion.json, fusion.safetensors                  the fusion, as `crossfuse.save_fusion` writes it
        optimizer.safetensors, training.json             state by parameter name, schedule, random state of each process
        trainer_state.json                               transformers' own counters
    RUN/last, RUN/best                                   links to one of these

A folder is written under another name, then renamed; the links are exchanged in one step. Tensors are stored whole
whatever they were sharded over, so that a checkpoint of two processes loads on one.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from crossfuse.training.groups import plain_model, plain_name, trainable

FOLDER, TRAINED, OPTIMIZER, TRAINING = "checkpoints", "trained.safetensors", "optimizer.safetensors", "training.json"


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, gathered from all processes where it is sharded (a collective call then)."""
    full = getattr(tensor, "full_tensor", None)
    return full() if full is not None else tensor


def like(tensor: Tensor, target: Tensor) -> Tensor:
    """A whole tensor, sharded as `target` is."""
    if not hasattr(target, "full_tensor"):
        return tensor.to(target.device)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(target.device), target.device_mesh, target.placements)  # type: ignore[attr-defined]


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """Whole copies on the CPU of all parameters that train, by name. Every process must call it."""
    return {name: whole(parameter.detach()).cpu().clone() for name, parameter in trainable(model)}


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors ("parameter/entry") and other values of the optimiser's state. Every process must call it."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for name, parameter in trainable(model):
        for entry, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{name}/{entry}"] = whole(value.detach()).cpu().clone()
            else:
                values[f"{name}/{entry}"] = value
    return tensors, values


def load_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], values: dict[str, Any]
) -> None:
    """Put back what `optimizer_state` has read, sharded as the parameters are now."""
    named = dict(trainable(model))
    entries: dict[str, dict[str, Any]] = {}
    for key, value in (*tensors.items(), *values.items()):
        name, _, entry = key.rpartition("/")
        if name not in named:
            raise ValueError(f"the checkpoint's optimiser holds {name}, which this run does not train")
        parameter = named[name]
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            value = like(value, parameter)
        entries.setdefault(name, {})[entry] = value
    for name, state in entries.items():
        optimizer.state[named[name]] = state


def write_weights(folder: Path, model: Any, state: dict[str, Tensor], fusion: dict[str, Tensor]) -> None:
    """What was trained (`trained_state`) and the fusion (`fusion_state`), in the formats named above."""
    from safetensors.torch import save_file

    from crossfuse.storage import write_fusion

    if hasattr(model, "peft_config"):
        model.save_pretrained(str(folder), state_dict=state, save_embedding_layers=False)
        (folder / "README.md").unlink(missing_ok=True)  # PEFT's model card; a run's own comes with its export
    else:
        rest = {name: tensor.contiguous() for name, tensor in state.items() if ".cross." not in name}
        if rest:
            save_file(rest, folder / TRAINED, metadata={"format": "pt"})
    if getattr(plain_model(model).model, "_fusion", None) is not None:
        write_fusion(plain_model(model), folder, fusion)


def fusion_state(model: Any) -> dict[str, Tensor]:
    """The fusion's own weights by the names of a model without PEFT, trained or not. Every process must call it."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if ".cross." in name and ".original_module." not in name and "lora_" not in name:
            found[plain_name(name)] = whole(parameter.detach()).cpu().clone()
    return found


def read_weights(folder: Path, model: Any) -> None:
    """Load into a prepared model what `write_weights` has stored. ValueError naming what is missing or left over."""
    state = stored_state(folder, model)
    named = dict(model.named_parameters())
    missing = sorted({name for name, _ in trainable(model)} - set(state))
    unexpected = sorted(set(state) - set(named))
    problems = [f"{len(missing)} missing ({missing[0]}, ...)"] if missing else []
    problems += [f"{len(unexpected)} unexpected ({unexpected[0]}, ...)"] if unexpected else []
    problems += [
        f"{name} has shape {tuple(tensor.shape)}, the model needs {tuple(named[name].shape)}"
        for name, tensor in state.items()
        if name in named and named[name].shape != tensor.shape
    ][:3]
    if problems:
        raise ValueError(f"{folder} does not fit this model: {'; '.join(problems)}")
    with torch.no_grad():
        for name, tensor in state.items():
            named[name].copy_(like(tensor.to(named[name].dtype), named[name]))


def stored_state(folder: Path, model: Any) -> dict[str, Tensor]:
    """Tensors of a checkpoint by the parameter names of `model`."""
    from safetensors.torch import load_file

    state: dict[str, Tensor] = {}
    adapter = folder / "adapter_model.safetensors"
    names = [name for name, _ in model.named_parameters()]
    if adapter.is_file():
        if not hasattr(model, "peft_config"):
            raise ValueError(f"{folder} holds a LoRA adapter, but this run trains without one")
        stored = load_file(adapter)
        for name in names:
            # PEFT leaves the adapter's name out of its files.
            key = name.replace(".modules_to_save.default.", ".").replace(".default.", ".")
            if key in stored and ".original_module." not in name:
                state[name] = stored.pop(key)
        state |= stored  # whatever has found no place is reported as unexpected
        return state
    if (folder / TRAINED).is_file():
        state |= load_file(folder / TRAINED)
    if (folder / "fusion.safetensors").is_file():
        state |= load_file(folder / "fusion.safetensors")
    return state


def random_state() -> dict[str, Any]:
    """Random state of this process, JSON-ready."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Undo of `random_state`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray.fromhex(state["cuda"]), dtype=torch.uint8))


class CheckpointFolder:
    """The checkpoints of one run directory."""

    def __init__(self, run: Path) -> None:
        self.run, self.folder = run, run / FOLDER

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def begin(self, step: int) -> Path:
        """An empty folder to write to; `finish` gives it its name."""
        fresh = self.folder / f".step-{step:06d}.tmp"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        return fresh

    def finish(self, fresh: Path, step: int, best: bool) -> Path:
        """Make the folder the last checkpoint, and the best one where `best`; others are removed."""
        for file in fresh.iterdir():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        final = self.path(step)
        if final.exists():  # the same step again, after a resume
            old = self.folder / f".{final.name}.old"
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
            fresh.rename(final)
            shutil.rmtree(old, ignore_errors=True)
        else:
            fresh.rename(final)
        self._link("last", final)
        if best:
            self._link("best", final)
        kept = {found for found in (self.last, self.best) if found is not None}
        for folder in self.folder.iterdir():
            if folder.resolve() not in kept:
                shutil.rmtree(folder, ignore_errors=True)
        return final

    def _link(self, name: str, target: Path) -> None:
        fresh = self.run / f".{name}.tmp"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(target.relative_to(self.run), target_is_directory=True)
        os.replace(fresh, self.run / name)

    @property
    def last(self) -> Path | None:
        """The newest whole checkpoint."""
        return self._linked("last")

    @property
    def best(self) -> Path | None:
        """The checkpoint of the lowest validation loss."""
        return self._linked("best")

    def _linked(self, name: str) -> Path | None:
        link = self.run / name
        return link.resolve() if (link / TRAINING).is_file() else None


def write_json(path: Path, value: Any) -> None:
    """Atomic."""
    from crossfuse.storage import replace_file

    replace_file(path, (json.dumps(value, indent=2) + "\n").encode())
