"""Composed models as a family: a text-only LLM with any vision encoder.

Importing this module makes the Auto classes know them: `AutoConfig`, `AutoModelForImageTextToText`, `AutoProcessor`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor
from transformers.modeling_outputs import MultimodalBaseModelOutputWithPast

from crossfuse.backbones.base import Backbone, EncodedImages, feature_dtype
from crossfuse.backbones.composed_config import ComposedConfig
from crossfuse.backbones.composed_model import VisionLanguageBody, VisionLanguageModel
from crossfuse.backbones.composed_parts import blank_image
from crossfuse.backbones.composed_processor import ComposedProcessor

__all__ = ["ComposedBackbone", "ComposedConfig", "ComposedProcessor", "VisionLanguageBody", "VisionLanguageModel"]

AutoConfig.register(ComposedConfig.model_type, ComposedConfig, exist_ok=True)
AutoModelForImageTextToText.register(ComposedConfig, VisionLanguageModel, exist_ok=True)
AutoProcessor.register(ComposedConfig, ComposedProcessor, exist_ok=True)


class ComposedBackbone(Backbone):
    """`VisionLanguageModel`: CLIP, SigLIP, Qwen2.5-VL's tower, CNNs; decoders built like Llama."""

    family = "composed"
    architectures = ("VisionLanguageModel",)
    image_arguments: ClassVar[tuple[str, ...]] = ("pixel_values", "image_grid_thw")

    def encode(self, body: Any, mm_encoder_outputs: Any, arguments: dict[str, Any]) -> EncodedImages | None:
        outputs = (mm_encoder_outputs or {}).get("image")
        if outputs is None:
            if arguments.get("pixel_values") is None:
                return None
            outputs = body.get_image_features(
                arguments["pixel_values"], arguments.get("image_grid_thw"), return_dict=True
            )
        dtype = feature_dtype(body)
        features = [tokens.to(dtype) for tokens in outputs.pooler_output]
        grids = getattr(outputs, "grids", None) or []
        if len(grids) != len(features):  # a chunk of a prefill holds parts of images
            grids = [None] * len(features)
        return EncodedImages(features, list(grids), outputs)

    def dummy_features(self, body: Any) -> Tensor:
        blank = blank_image(body.vision_tower, body.config.image_size)
        outputs = body.get_image_features(**blank, return_dict=True)
        return outputs.pooler_output[0].to(feature_dtype(body))  # type: ignore[no-any-return]

    def model_output(self, body: nn.Module, decoder_output: Any, hidden: Tensor, images: Any) -> Any:
        return MultimodalBaseModelOutputWithPast(
            last_hidden_state=hidden,  # type: ignore[arg-type]
            cache=decoder_output.cache,
            hidden_states=decoder_output.hidden_states,
            attentions=decoder_output.attentions,
            image_outputs=None if images is None else images.outputs,
        )
