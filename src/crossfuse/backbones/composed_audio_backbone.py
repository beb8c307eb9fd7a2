"""Models with an audio encoder as a family. Importing this module makes the Auto classes know them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from crossfuse.backbones.base import EncodedImages, feature_dtype
from crossfuse.backbones.composed import ComposedBackbone
from crossfuse.backbones.composed_audio import AudioLanguageModel, ComposedAudioConfig, blank_clip
from crossfuse.backbones.composed_audio_processor import ComposedAudioProcessor

AutoConfig.register(ComposedAudioConfig.model_type, ComposedAudioConfig, exist_ok=True)
AutoModelForImageTextToText.register(ComposedAudioConfig, AudioLanguageModel, exist_ok=True)
AutoProcessor.register(ComposedAudioConfig, ComposedAudioProcessor, exist_ok=True)


class EncodedClips(EncodedImages):
    """Projected audio tokens of one call; clips have no grid."""

    def as_encoder_outputs(self) -> dict[str, Any]:
        return {"audio": self.outputs}


class AudioBackbone(ComposedBackbone):
    """`AudioLanguageModel`: Whisper's encoder; decoders built like Llama."""

    family = "composed-audio"
    architectures = ("AudioLanguageModel",)
    image_arguments = ("input_features",)
    raw_arguments = ("input_features",)

    def placeholder_id(self, body: Any) -> int:
        return int(body.config.audio_token_id)

    def encode(self, body: Any, mm_encoder_outputs: Any, arguments: dict[str, Any]) -> EncodedImages | None:
        outputs = (mm_encoder_outputs or {}).get("audio")
        if outputs is None:
            if arguments.get("input_features") is None:
                return None
            outputs = body.get_audio_features(arguments["input_features"], return_dict=True)
        features = [tokens.to(feature_dtype(body)) for tokens in outputs.pooler_output]
        return EncodedClips(features, [None] * len(features), outputs)

    def dummy_features(self, body: Any) -> Tensor:
        blank = blank_clip(body.encoder, body.config.audio_frames)
        outputs = body.get_audio_features(blank, return_dict=True)
        return outputs.pooler_output[0].to(feature_dtype(body))  # type: ignore[no-any-return]
