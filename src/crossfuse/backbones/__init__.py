"""Model families. A new one is a file here and a line in `_BACKBONES`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossfuse.backbones.base import Backbone
from crossfuse.backbones.composed import ComposedBackbone
from crossfuse.backbones.composed_audio_backbone import AudioBackbone
from crossfuse.backbones.llava import LlavaBackbone
from crossfuse.backbones.qwen2_5_vl import QwenVLBackbone

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Backbone", "backbone_for", "supported_architectures"]

_BACKBONES: tuple[Backbone, ...] = (
    LlavaBackbone(),
    QwenVLBackbone(),
    ComposedBackbone(),
    AudioBackbone(),
)


def supported_architectures() -> tuple[str, ...]:
    """Class names of models that `crossfuse.fuse` takes."""
    return tuple(name for backbone in _BACKBONES for name in backbone.architectures)


def backbone_for(model: nn.Module) -> Backbone:
    """The family of ``model``; ValueError naming the supported ones."""
    name = type(model).__name__
    for backbone in _BACKBONES:
        if name in backbone.architectures:
            backbone.check(model)
            return backbone
    if any(cls.__name__ == "PeftModel" for cls in type(model).__mro__):
        raise ValueError(f"{name} is already wrapped by PEFT; the order is fuse, then PEFT")
    raise ValueError(f"{name} is not supported; crossfuse fuses {', '.join(supported_architectures())}")
