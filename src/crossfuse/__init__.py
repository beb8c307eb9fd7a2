"""crossfuse: choose how image tokens reach the text tokens of a Hugging Face vision-language model."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crossfuse.analysis.threshold import Calibration, calibrate_threshold
    from crossfuse.api import (
        from_pretrained,
        fuse,
        fused,
        fusion_of,
        fusion_parameters,
        load_embedded,
        load_fusion,
        new_cache,
        save_fusion,
        unfuse,
    )
    from crossfuse.backbones.composed import VisionLanguageModel
    from crossfuse.compress import MeanPool, QFormer
    from crossfuse.fusion import FUSIONS, Fusion, make_fusion
    from crossfuse.fusions.anchors import ImageAnchors, TextAnchors
    from crossfuse.fusions.anchors.explain import Anchor, explain_anchors
    from crossfuse.fusions.anchors.user_text import user_text_mask
    from crossfuse.fusions.cross_attention import CrossAttention
    from crossfuse.fusions.insertion import Insertion
    from crossfuse.fusions.positions import CircleRoPE, ModalityRoPE
    from crossfuse.fusions.reorder import GumbelReorder
    from crossfuse.streaming.pool import StreamPool
    from crossfuse.streaming.sampling import Decoding
    from crossfuse.streaming.session import StreamSession
    from crossfuse.streaming.video import read_video

_EXPORTS = {
    "crossfuse.analysis.threshold": ("Calibration", "calibrate_threshold"),
    "crossfuse.api": (
        "from_pretrained",
        "fuse",
        "fused",
        "fusion_of",
        "fusion_parameters",
        "load_embedded",
        "load_fusion",
        "new_cache",
        "save_fusion",
        "unfuse",
    ),
    "crossfuse.backbones.composed": ("VisionLanguageModel",),
    "crossfuse.compress": ("MeanPool", "QFormer"),
    "crossfuse.fusion": ("FUSIONS", "Fusion", "make_fusion"),
    "crossfuse.fusions.anchors": ("ImageAnchors", "TextAnchors"),
    "crossfuse.fusions.anchors.explain": ("Anchor", "explain_anchors"),
    "crossfuse.fusions.anchors.user_text": ("user_text_mask",),
    "crossfuse.fusions.cross_attention": ("CrossAttention",),
    "crossfuse.fusions.insertion": ("Insertion",),
    "crossfuse.fusions.positions": ("CircleRoPE", "ModalityRoPE"),
    "crossfuse.fusions.reorder": ("GumbelReorder",),
    "crossfuse.streaming.pool": ("StreamPool",),
    "crossfuse.streaming.sampling": ("Decoding",),
    "crossfuse.streaming.session": ("StreamSession",),
    "crossfuse.streaming.video": ("read_video",),
}
_HOME = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = [
    "FUSIONS",
    "Anchor",
    "Calibration",
    "CircleRoPE",
    "CrossAttention",
    "Decoding",
    "Fusion",
    "GumbelReorder",
    "ImageAnchors",
    "Insertion",
    "MeanPool",
    "ModalityRoPE",
    "QFormer",
    "StreamPool",
    "StreamSession",
    "TextAnchors",
    "VisionLanguageModel",
    "calibrate_threshold",
    "explain_anchors",
    "from_pretrained",
    "fuse",
    "fused",
    "fusion_of",
    "fusion_parameters",
    "load_embedded",
    "load_fusion",
    "make_fusion",
    "new_cache",
    "read_video",
    "save_fusion",
    "unfuse",
    "user_text_mask",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'crossfuse' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
