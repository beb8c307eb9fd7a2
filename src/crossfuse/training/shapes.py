"""A recipe's model without weights: on the device "meta", from a folder's configuration or a published shape.

The published shapes are those of the checkpoints' own ``config.json``, so that a plan needs neither network nor files.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from crossfuse.fusion import nearest
from crossfuse.loading import EMBEDDED, check_source
from crossfuse.training.recipe import Compose, Recipe

_CLIP_L_336: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "image_size": 336, "patch_size": 14, "projection_dim": 768,
}  # fmt: skip
_QWEN_VISION: dict[str, Any] = {
    "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048,
    "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2,
}  # fmt: skip


def _tiny_llava() -> Any:
    return _llava(
        vocab_size=32064, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
        num_key_value_heads=4,
    )  # fmt: skip


def _llava_1_5_7b() -> Any:
    return _llava(vocab_size=32064, hidden_size=4096, intermediate_size=11008)


def _llava_1_5_13b() -> Any:
    return _llava(
        vocab_size=32064, hidden_size=5120, intermediate_size=13824, num_hidden_layers=40, num_attention_heads=40
    )


def _llava(**text: Any) -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

    return LlavaConfig(vision_config=CLIPVisionConfig(**_CLIP_L_336), text_config=LlamaConfig(**text))


def _qwen_3b() -> Any:
    return _qwen(
        _QWEN_VISION, vocab_size=151936, hidden_size=2048, intermediate_size=11008, num_hidden_layers=36,
        num_attention_heads=16, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip


def _qwen_7b() -> Any:
    return _qwen(
        {**_QWEN_VISION, "out_hidden_size": 3584}, vocab_size=152064, hidden_size=3584, intermediate_size=18944,
        num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
    )  # fmt: skip


def _qwen(vision: dict[str, Any], **text: Any) -> Any:
    from transformers import Qwen2_5_VLConfig

    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    tied = text.get("tie_word_embeddings", False)
    return Qwen2_5_VLConfig(vision_config=vision, text_config=text, tie_word_embeddings=tied)


def _helium_2b() -> Any:
    from transformers import HeliumConfig

    return HeliumConfig(
        vocab_size=64000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128,
    )  # fmt: skip


def _smollm2_135m() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip


KNOWN_SHAPES: dict[str, Callable[[], Any]] = {
    "bczhou/tiny-llava-v1-hf": _tiny_llava,
    "llava-hf/llava-1.5-7b-hf": _llava_1_5_7b,
    "llava-hf/llava-1.5-13b-hf": _llava_1_5_13b,
    "Qwen/Qwen2.5-VL-3B-Instruct": _qwen_3b,
    "Qwen/Qwen2.5-VL-7B-Instruct": _qwen_7b,
    "kyutai/helium-1-2b": _helium_2b,
    "HuggingFaceTB/SmolLM2-135M-Instruct": _smollm2_135m,
}
SHORT_NAMES = {  # as the papers write them
    "TinyLLaVA-1B": "bczhou/tiny-llava-v1-hf",
    "LLaVA-1.5-7B": "llava-hf/llava-1.5-7b-hf",
    "LLaVA-1.5-13B": "llava-hf/llava-1.5-13b-hf",
    "Qwen2.5-VL-3B": "Qwen/Qwen2.5-VL-3B-Instruct",
    "Qwen2.5-VL-7B": "Qwen/Qwen2.5-VL-7B-Instruct",
    "Helium1-2B": "kyutai/helium-1-2b",
    "SmolLM2-135M": "HuggingFaceTB/SmolLM2-135M-Instruct",
}


def shape_of(name: str) -> Any:
    """The configuration of a model by folder, hub id, "embedded" or "embedded:start"; no weights are read.

    Raises:
        ValueError: neither a known shape nor a folder, and the hub gave nothing under that id.
    """
    if name in EMBEDDED:
        from importlib.resources import files

        name = str(files("crossfuse").joinpath("assets", EMBEDDED[name]))
    if name in KNOWN_SHAPES:
        return KNOWN_SHAPES[name]()
    from transformers import AutoConfig

    from crossfuse.backbones.layouts import refuse_foreign_layout

    check_source(name)
    refuse_foreign_layout(name)
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        known = ", ".join(KNOWN_SHAPES)
        raise ValueError(
            f"the shape of {name!r} is not known and could not be fetched{nearest(name, KNOWN_SHAPES)}; give a folder "
            f"with config.json, or one of: {known}"
        ) from error


def empty_model(recipe: Recipe) -> Any:
    """The recipe's model on the device "meta", unfused. ValueError where it has none or its family is not supported."""
    from transformers import AutoModelForImageTextToText

    from crossfuse.backbones import supported_architectures
    from crossfuse.backbones.composed import VisionLanguageModel

    if recipe.compose is None and recipe.model is None:
        raise ValueError("the recipe names no model; set model, or compose with llm and vision")
    # Where parameters lie is asked of the device alone, so nothing is ever filled in.
    with torch.device("meta"):
        if recipe.compose is not None:
            return VisionLanguageModel(composed_shape(recipe.compose))
        assert recipe.model is not None
        config = shape_of(recipe.model)
        try:
            model = AutoModelForImageTextToText.from_config(config)
        except ValueError as error:
            supported = ", ".join(supported_architectures())
            raise ValueError(
                f"{recipe.model} is a model of type {config.model_type!r}, which is not supported; crossfuse fuses "
                f"{supported}"
            ) from error
    return model


def composed_shape(parts: Compose) -> Any:
    """The configuration that `VisionLanguageModel.compose` would write."""
    from crossfuse.backbones.composed import ComposedConfig

    if parts.llm.endswith(".gguf") and not Path(parts.llm).is_file():
        raise ValueError(f"no such file: {parts.llm}")
    text = shape_of(parts.llm).get_text_config()
    whole = shape_of(parts.vision)
    vision = getattr(whole, "vision_config", None) or whole
    width = getattr(vision, "out_hidden_size", None) or vision.hidden_size
    size, patch = parts.image_size or getattr(vision, "image_size", None), vision.patch_size
    text.vocab_size += 1  # the image placeholder
    return ComposedConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=text.vocab_size - 1,
        vision_hidden_size=width,
        vision_feature_layer=parts.vision_feature_layer,
        image_size=size,
        image_stride=patch if size else None,
        projector_type=parts.projector,
        tie_word_embeddings=bool(getattr(text, "tie_word_embeddings", False)),
    )
