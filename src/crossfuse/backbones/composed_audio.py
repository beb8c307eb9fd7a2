"""An audio encoder in place of the vision encoder: ``VisionLanguageModel.compose(llm=..., audio=...)``.

A clip is what an image is elsewhere: one run of placeholders, as many as the encoder has tokens for it. Fusions see a
run of tokens and no grid, so anchors and windows work on it unchanged. Encoders are those of transformers that take
``input_features`` (clips, mel bands, frames), as Whisper's does; clips have the length that the encoder asks for.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.configuration_utils import SubConfigSpec
from transformers.modeling_outputs import MultimodalBaseModelOutputWithPast, MultimodalCausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from crossfuse.backbones import composed_parts as parts
from crossfuse.backbones.composed_audio_processor import AUDIO_TOKEN, ComposedAudioProcessor
from crossfuse.backbones.composed_body import EncodedVision, VisionLanguageBody
from crossfuse.backbones.composed_checks import text_logits
from crossfuse.backbones.composed_model import VisionLanguageModel


@strict
class ComposedAudioConfig(PreTrainedConfig):
    """Written by `compose_audio`.

    audio_token_id: the token that stands for one audio token in ``input_ids``.
    audio_hidden_size, audio_tokens: channels and number of a clip's tokens before the projector, probed from an output.
    audio_frames: mel frames of a clip. projector_type, projector_class: as in `ComposedConfig`.
    """

    model_type = "crossfuse_composed_audio"
    sub_configs_defaults: ClassVar[dict[str, SubConfigSpec]] = {
        "audio_config": SubConfigSpec(config_class=AutoConfig, model_type="whisper", optional=True),
        "text_config": SubConfigSpec(config_class=AutoConfig, model_type="llama"),
    }

    audio_config: dict[str, Any] | PreTrainedConfig | None = None
    text_config: dict[str, Any] | PreTrainedConfig | None = None
    audio_token_id: int = 0
    audio_hidden_size: int = 768
    audio_tokens: int = 1500
    audio_frames: int = 3000
    projector_type: Literal["mlp", "linear", "custom"] = "mlp"
    projector_hidden_act: str = "gelu"
    projector_class: str | None = None
    tie_word_embeddings: bool = False

    @property
    def placeholder_id(self) -> int:
        """The token that stands for one encoder token."""
        return self.audio_token_id

    @property
    def encoder_width(self) -> int:
        """Channels of one encoder token before the projector."""
        return self.audio_hidden_size


class AudioLanguageBody(VisionLanguageBody):
    """Audio encoder (``audio_tower``), projector and decoder, without the head."""

    config_class = ComposedAudioConfig  # type: ignore[assignment]
    encoder_name: ClassVar[str] = "audio_tower"
    input_modalities = ["audio", "text"]  # noqa: RUF012

    @staticmethod
    def _build_encoder(config: Any) -> Any:
        return _encoder_of(AutoModel.from_config(config.audio_config))

    @can_return_tuple
    def get_audio_features(self, input_features: Tensor, **kwargs: Any) -> EncodedVision:
        """Encoder and projector. input_features: (clips, mel bands, frames) -> one (n, d) tensor a clip.

        A frozen encoder records no gradients.
        """
        features = input_features.to(next(self.encoder.parameters()).dtype)
        trains = self._settle_frozen_tower() or features.requires_grad
        with torch.set_grad_enabled(torch.is_grad_enabled() and trains):
            states = self.encoder(features).last_hidden_state
        projected: Any = self.project(list(states))
        return EncodedVision(pooler_output=projected)

    @can_return_tuple
    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        input_features: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        mm_encoder_outputs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> MultimodalBaseModelOutputWithPast:
        """Audio tokens into their placeholders, then the decoder. Hidden states are (B, L, d)."""
        clips = (mm_encoder_outputs or {}).get("audio")
        if clips is None and input_features is not None:
            clips = self.get_audio_features(input_features, return_dict=True)
        return self._run_decoder(input_ids, attention_mask, position_ids, cache, inputs_embeds, clips, **kwargs)


class AudioLanguageModel(VisionLanguageModel):
    """A text-only LLM with an audio encoder."""

    config_class = ComposedAudioConfig  # type: ignore[assignment]
    body_class: ClassVar[type[VisionLanguageBody]] = AudioLanguageBody
    input_modalities = ["audio", "text"]  # noqa: RUF012

    def get_audio_features(self, input_features: Tensor, **kwargs: Any) -> Any:
        """See `AudioLanguageBody.get_audio_features`."""
        return self.model.get_audio_features(input_features, **kwargs)

    @can_return_tuple
    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        input_features: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        mm_encoder_outputs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> MultimodalCausalLMOutputWithPast:
        """input_ids, attention_mask, labels (B, L); logits (B, L, V). Clips: see `get_audio_features`."""
        outputs = self.model(
            input_ids=input_ids,
            input_features=input_features,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            mm_encoder_outputs=mm_encoder_outputs,
            **kwargs,
        )
        return self._answer(outputs, labels, logits_to_keep, **kwargs)

    def _maybe_prepare_encoder_kwargs_for_generation(
        self, inputs_tensor: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """``generate`` of transformers encodes images first; here clips, so that beams repeat tokens and not sound."""
        model_kwargs = super()._maybe_prepare_encoder_kwargs_for_generation(  # type: ignore[misc]
            inputs_tensor, model_kwargs, *args, **kwargs
        )
        features = model_kwargs.pop("input_features", None)
        if features is not None:
            encoded = self.get_audio_features(features, return_dict=True)
            model_kwargs["mm_encoder_outputs"] = {**(model_kwargs.get("mm_encoder_outputs") or {}), "audio": encoded}
        return model_kwargs

    def _expand_multimodal_outputs(
        self, input_ids: Any, mm_encoder_output: dict[str, Any], expand_size: int = 1, *args: Any, **kwargs: Any
    ) -> Any:
        """All clips of a row are repeated together."""
        audio: Any = mm_encoder_output.get("audio")
        if audio is not None:
            clips, repeated = list(audio.pooler_output), []
            for wanted in (input_ids == self.config.audio_token_id).sum(-1).tolist():
                own: list[Tensor] = []
                while clips and wanted >= len(clips[0]):
                    wanted -= len(clips[0])
                    own.append(clips.pop(0))
                repeated += own * expand_size
            audio.pooler_output = repeated + clips
        return mm_encoder_output


def compose_audio(
    llm: Any, tokenizer: Any, audio: Any, feature_extractor: Any, projector: str | nn.Module, dtype: Any
) -> AudioLanguageModel:
    """Join a loaded causal LM and an audio encoder: Whisper's, or a whole Whisper model, directory or hub id.

    ``feature_extractor``: needed for `processor` where ``audio`` is an instance. The placeholder is ``<audio>``.
    ValueError where the encoder takes no ``input_features`` or the parts do not fit.
    """
    if not isinstance(audio, nn.Module):
        from transformers import AutoFeatureExtractor

        source, audio = audio, AutoModel.from_pretrained(audio, dtype="auto" if dtype is None else dtype)
        feature_extractor = feature_extractor or AutoFeatureExtractor.from_pretrained(source)
    encoder = _encoder_of(audio)
    frames, tokens = _probe(encoder)
    parts.take_llm_apart(llm)  # refuse what does not fit before anything is changed
    token_id = parts.add_placeholder(llm, tokenizer, AUDIO_TOKEN)
    expected = text_logits(llm, parts.take_llm_apart(llm)[0])
    kind, given = ("custom", projector) if isinstance(projector, nn.Module) else (projector, None)
    fields = {
        "audio_config": encoder.config,
        "audio_token_id": token_id,
        "audio_hidden_size": tokens.shape[1],
        "audio_tokens": len(tokens),
        "audio_frames": frames,
        "projector_type": kind,
        "projector_class": None if given is None else type(given).__name__,
    }
    model: Any = AudioLanguageModel.assemble(ComposedAudioConfig, fields, llm, encoder, given, expected)
    if tokenizer is not None and feature_extractor is not None:
        model.processor = ComposedAudioProcessor(
            feature_extractor, tokenizer, audio_tokens=len(tokens), audio_token=AUDIO_TOKEN
        )
    model.train(llm.training)
    return model  # type: ignore[no-any-return]


def _encoder_of(model: Any) -> Any:
    """The encoder of an encoder-decoder model, or the model itself."""
    inner = getattr(model, "encoder", None) or getattr(getattr(model, "model", None), "encoder", None)
    return inner if isinstance(inner, PreTrainedModel) else model


def blank_clip(encoder: Any, frames: int) -> Tensor:
    """(1, mel bands, frames) of silence."""
    return next(encoder.parameters()).new_zeros(1, encoder.config.num_mel_bins, frames)


@torch.no_grad()
def _probe(encoder: Any) -> tuple[int, Tensor]:
    """(mel frames of a clip, (n, C) tokens of a silent one)."""
    config: Any = getattr(encoder, "config", None)
    if not hasattr(config, "num_mel_bins") or not hasattr(config, "max_source_positions"):
        raise ValueError(
            f"{type(encoder).__name__} is no audio encoder that takes mel frames of a fixed length; pass Whisper's "
            "(WhisperModel, or its encoder)"
        )
    strides = [m.stride[0] for m in encoder.children() if isinstance(m, nn.Conv1d)]
    frames = int(config.max_source_positions)
    for stride in strides:
        frames *= stride
    was_training = encoder.training
    encoder.eval()
    tokens: Tensor = encoder(blank_clip(encoder, frames)).last_hidden_state[0]
    encoder.train(was_training)
    return frames, tokens
