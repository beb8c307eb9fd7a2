"""New weights of a fusion that belong to no block of the decoder: they live at ``model.cross.<name>``.

All new weights lie below a module called ``cross``, here as in the blocks. So saving, `crossfuse.fusion_parameters` and
PEFT's ``modules_to_save=["cross"]`` find every one of them by one rule.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class BodyWeights(nn.Module):
    """Holds modules by name. Read them as attributes: PEFT's wrapper passes attributes on to its trained copy."""


def add_weights(body: Any, name: str, module: nn.Module) -> None:
    """Put ``module`` at ``body.cross.<name>``, in the dtype and on the device of the LLM's input embeddings."""
    table = body.get_input_embeddings().weight
    if "cross" not in body._modules:
        body.add_module("cross", BodyWeights())
    body.cross.add_module(name, module.to(device=table.device, dtype=table.dtype).train(body.training))


def remove_weights(body: Any, name: str) -> None:
    """Undo `add_weights`; the holder goes with its last module."""
    body.cross._modules.pop(name)
    if not body.cross._modules:
        del body._modules["cross"]


class FixedDraws:
    """Random numbers on the CPU that are the same every time; the caller's generator goes on as if untouched."""

    def __enter__(self) -> None:
        self._state = torch.random.get_rng_state()
        torch.random.default_generator.manual_seed(0)

    def __exit__(self, *error: object) -> None:
        torch.random.set_rng_state(self._state)
