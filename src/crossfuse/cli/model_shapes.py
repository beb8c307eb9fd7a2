"""`--like`: a model of a published or a user's own shape, without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer


def shape_like(like: str) -> Any:
    """The model on the device "meta"; a text-only configuration gets a vision tower of no account.

    ``like`` is a published model's short name or hub id, or a folder with config.json; nothing is fetched.
    """
    import torch
    from transformers import AutoModelForImageTextToText, CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    from crossfuse.fusion import nearest
    from crossfuse.training.shapes import KNOWN_SHAPES, SHORT_NAMES, shape_of

    name = SHORT_NAMES.get(like, like)
    if name not in KNOWN_SHAPES and not Path(name).is_dir():
        raise typer.BadParameter(
            f"{like!r} is neither a folder nor a known shape{nearest(like, SHORT_NAMES)}: {', '.join(SHORT_NAMES)}"
        )
    config = shape_of(name)
    with torch.device("meta"):
        if getattr(config, "vision_config", None) is not None:
            return AutoModelForImageTextToText.from_config(config)
        vision = CLIPVisionConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1)
        return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=config.get_text_config()))


def embedded_shape() -> tuple[Any, int]:
    """(the embedded model without its weights, image tokens of one image)."""
    import torch
    from transformers import AutoModelForImageTextToText

    from crossfuse.training.shapes import shape_of

    config = shape_of("embedded")
    with torch.device("meta"):
        shape = AutoModelForImageTextToText.from_config(config)
    vision = config.vision_config
    return shape, (vision.image_size // vision.patch_size) ** 2
