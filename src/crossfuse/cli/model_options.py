"""What every command that loads a model shares: where it computes, and `--fusion` on what was loaded."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

DeviceOption = Annotated[
    str,
    typer.Option(help="auto (a GPU where there is one), cpu, cuda:1, ..., or spread: over all GPUs, then the CPU."),
]
OneDeviceOption = Annotated[str, typer.Option(help="auto (a GPU where there is one), cpu, cuda:1, ...")]


def fuse_as_asked(model: Any, fusion: Any) -> None:
    """Fuse a loaded model with what `--fusion` says, if anything; say so where that adds untrained weights.

    Raises ValueError where the model was saved with another fusion.
    """
    import crossfuse as xf
    from crossfuse.devices import undispatched

    known = xf.fusion_of(model)
    if fusion is None or known == fusion:
        return
    if known is not None:
        raise ValueError(f"this model was saved with {known}; leave --fusion out to use it")
    with undispatched(model):
        xf.fuse(model, fusion)
    if xf.fusion_parameters(model):
        print(f"crossfuse: note: {fusion.name} adds weights that this model was never trained with", file=sys.stderr)
