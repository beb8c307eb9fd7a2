"""The public calls: fuse a Hugging Face model, take the fusion off again, save it, load it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from crossfuse.fusion import Fusion, make_fusion

Model = TypeVar("Model", bound=nn.Module)


def fuse(model: Model, fusion: Fusion) -> Model:
    """Choose how image tokens reach the text of ``model``. In place; returns the same object.

    The fused model takes what the unfused one takes and returns the same shapes. Raises ValueError where the model is
    fused already, its family is not supported, or the fusion does not fit it. Order: fuse, then PEFT, then FSDP / DDP.
    """
    from crossfuse.backbones import backbone_for
    from crossfuse.fused_body import FusedBody
    from crossfuse.fused_top import FusedTop
    from crossfuse.swap import refuse_untouchable, swap

    if not isinstance(fusion, Fusion):
        raise TypeError(
            f"fusion must be a crossfuse fusion such as crossfuse.TextAnchors(); got {type(fusion).__name__}"
        )
    current = fusion_of(model)
    if current is not None:
        raise ValueError(f"the model is already fused with {current.name}; call crossfuse.unfuse(model) first")
    refuse_untouchable(model)
    backbone = backbone_for(model)
    body: Any = backbone.body(model)
    refuse_untouchable(body)
    fusion.check_model(backbone, model)
    fusion.attach(backbone, model)
    if fusion.compress is not None:
        fusion.compress.attach(backbone, model)
    body._fusion, body._backbone = fusion, backbone
    swap(body, FusedBody)
    swap(model, FusedTop)
    return model


def unfuse(model: Model) -> Model:
    """Take the fusion off. Weights, keys and outputs are those from before `fuse`, to the bit."""
    from crossfuse.swap import refuse_untouchable, restore

    if fusion_of(model) is None:
        raise ValueError("the model is not fused; there is nothing to take off")
    body: Any = model.model
    refuse_untouchable(model)
    refuse_untouchable(body)
    fusion, backbone = body._fusion, body._backbone
    fusion.detach(backbone, model)
    if fusion.compress is not None:
        fusion.compress.detach(backbone, model)
    restore(model)
    restore(body)
    del body._fusion, body._backbone
    return model


@contextlib.contextmanager
def fused(model: Model, fusion: Fusion) -> Iterator[Model]:
    """Fuse inside a ``with`` block, unfuse at its end, whatever happens in between."""
    fuse(model, fusion)
    try:
        yield model
    finally:
        unfuse(model)


def fusion_of(model: Any) -> Fusion | None:
    """The fusion of a model (PEFT-wrapped too), or None."""
    from crossfuse.fused_body import FusedBody

    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, FusedBody):
            return module._fusion
    return None


def fusion_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """New parameters that the fusion added, by state-dict name. Empty for insertion and anchors."""
    return {name: parameter for name, parameter in model.named_parameters() if ".cross." in name}


def new_cache(model: Any) -> Any:
    """An empty cache for ``generate(cache=...)`` or step-by-step decoding of a fused model."""
    from crossfuse.streaming.cache import FusionCache

    if fusion_of(model) is None:
        raise ValueError("the model is not fused; use transformers' DynamicCache")
    body = model.model
    return FusionCache(len(body._backbone.decoder(body).layers))


def save_fusion(model: Any, directory: str | os.PathLike[str]) -> None:
    """Write ``fusion.safetensors`` (new weights only) and ``fusion.json`` to ``directory``."""
    from crossfuse.storage import fusion_keys, write_fusion

    if fusion_of(model) is None:
        raise ValueError("the model is not fused; there is no fusion to save")
    state = model.state_dict()
    write_fusion(model, directory, {name: state[name] for name in fusion_keys(model)})


def load_fusion(model: Model, directory: str | os.PathLike[str]) -> Model:
    """Fuse ``model`` as `save_fusion` recorded it and load the new weights.

    Raises ValueError naming missing, unexpected or mis-shaped keys; the model is then left unfused.
    """
    from crossfuse.storage import load_weights, read_description

    fuse(model, make_fusion(**read_description(directory)["fusion"]))
    try:
        load_weights(model, directory)
    except BaseException:
        unfuse(model)
        raise
    return model


def from_pretrained(name_or_path: str | os.PathLike[str], **kwargs: Any) -> Any:
    """Load an image-text model from a directory or hub id; fused where ``fusion.json`` lies beside it.

    ``kwargs`` go to `AutoModelForImageTextToText.from_pretrained`. New weights are loaded after the base model, because
    transformers leaves parameters that are missing from a checkpoint uninitialised.
    """
    from transformers import AutoModelForImageTextToText

    from crossfuse.backbones.layouts import refuse_foreign_layout  # (its package registers composed models)
    from crossfuse.devices import undispatched

    refuse_foreign_layout(name_or_path, **kwargs)
    model = AutoModelForImageTextToText.from_pretrained(name_or_path, **kwargs)
    folder = Path(name_or_path) if Path(name_or_path).is_dir() else _hub_fusion(name_or_path, kwargs)
    if folder is not None and (folder / "fusion.json").is_file():
        with undispatched(model):  # device_map="auto" spreads it over several devices
            load_fusion(model, folder)
    return model


def load_embedded(variant: str = "model") -> tuple[Any, Any]:
    """(model, processor) of the tiny VLM inside the package, without network, in float32 and eval mode.

    ``"model"`` is trained as an insertion model; ``"start"`` is what it started from (language model trained on text
    alone, vision tower on attributes alone): the fair common start for comparing fusions.
    """
    from transformers import AutoModelForImageTextToText, AutoProcessor

    if variant not in ("model", "start"):
        raise ValueError(f"variant must be 'model' or 'start'; got {variant!r}")
    folder = str(files("crossfuse").joinpath("assets", variant))
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model.eval(), AutoProcessor.from_pretrained(folder, local_files_only=True)


def _hub_fusion(name: str | os.PathLike[str], kwargs: dict[str, Any]) -> Path | None:
    """The hub snapshot's folder if it holds a fusion."""
    from transformers.utils import cached_file

    options = {k: kwargs[k] for k in ("revision", "cache_dir", "token", "local_files_only") if k in kwargs}
    paths = [
        cached_file(str(name), file, _raise_exceptions_for_missing_entries=False, **options)
        for file in ("fusion.json", "fusion.safetensors")
    ]
    return Path(paths[0]).parent if paths[0] and paths[1] else None
