"""`VisionLanguageModel`: a text-only LLM and any vision encoder, joined into an ordinary transformers model.

Built like LLaVA (``model.vision_tower``, ``model.multi_modal_projector``, ``model.language_model``, ``lm_head``), so
that generation, training, PEFT and every fusion treat it like one.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import MultimodalCausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils.generic import can_return_tuple

from crossfuse.backbones import composed_parts as parts
from crossfuse.backbones.composed_body import ComposedPreTrainedModel, VisionLanguageBody
from crossfuse.backbones.composed_checks import check_projector, check_text, text_logits
from crossfuse.backbones.composed_config import ComposedConfig
from crossfuse.backbones.composed_processor import IMAGE_TOKEN, ComposedProcessor


class VisionLanguageModel(ComposedPreTrainedModel, GenerationMixin):
    """A text-only LLM with an encoder; made by `compose`, saved and loaded like any model of transformers."""

    body_class: ClassVar[type[VisionLanguageBody]] = VisionLanguageBody
    _tied_weights_keys = {"lm_head.weight": "model.language_model.embed_tokens.weight"}  # noqa: RUF012
    processor: Any = None
    """Set by `compose` where a tokenizer and an image processor are known. Save it beside the model."""

    def __init__(
        self,
        config: Any,
        language_model: nn.Module | None = None,
        lm_head: nn.Module | None = None,
        vision: nn.Module | None = None,
        projector: nn.Module | None = None,
    ):
        super().__init__(config)
        text_config: Any = config.text_config
        self.model = self.body_class(config, language_model, vision, projector)
        self.lm_head = (
            nn.Linear(text_config.hidden_size, text_config.vocab_size, bias=False) if lm_head is None else lm_head
        )
        self.post_init()

    @classmethod
    def compose(
        cls,
        llm: Any,
        vision: Any = None,
        projector: str | nn.Module = "mlp",
        *,
        audio: Any = None,
        tokenizer: Any = None,
        image_processor: Any = None,
        feature_extractor: Any = None,
        image_size: int | None = None,
        vision_feature_layer: int | None = None,
        image_token: str = IMAGE_TOKEN,
        dtype: torch.dtype | None = None,
    ) -> VisionLanguageModel:
        """Join a causal LM and a vision (or audio) encoder. The parts are taken over, not copied.

        llm: a causal LM built like Llama: an instance, a directory, a hub id, or the path of a text GGUF.
        vision: CLIP, SigLIP or another ViT, Qwen2.5-VL's tower, a timm model through transformers' TimmWrapper (an
            instance, a directory or a hub id), or any module whose output is (B, C, H, W) or (B, N, C).
        projector: "mlp", "linear", or a module from (..., C) to (..., d).
        audio, feature_extractor: Whisper's encoder in place of ``vision``; see `crossfuse.backbones.composed_audio`.
        tokenizer, image_processor: needed for `processor` where ``llm`` or ``vision`` is an instance. ``image_token``
            is added to the tokenizer, and to the embeddings where they lack a row for it.
        image_size: side of the input in pixels where neither config nor image processor tells it.
        vision_feature_layer: which hidden state (a ViT's layer, a CNN's stage) to take; None: the output.
        dtype: of parts that are loaded; None: as stored (float32 for a GGUF).

        Returns the model with the new projector in the LLM's dtype, in the mode (train or eval) of ``llm``. Its logits
        for text are those of ``llm``. Raises ValueError where the parts do not fit.
        """
        if (vision is None) == (audio is None):
            raise ValueError("give exactly one of vision and audio: a composed model has one encoder")
        llm, tokenizer = parts.load_llm(llm, tokenizer, dtype)
        if audio is not None:
            from crossfuse.backbones.composed_audio import compose_audio

            return compose_audio(llm, tokenizer, audio, feature_extractor, projector, dtype)
        vision, image_processor = parts.load_vision(vision, image_processor, dtype)
        parts.take_llm_apart(llm)  # refuse what does not fit before anything is changed
        token_id = parts.add_placeholder(llm, tokenizer, image_token)
        expected = text_logits(llm, parts.take_llm_apart(llm)[0])
        side = None if parts.takes_grid(vision) else parts.input_size(vision, image_processor, image_size)
        shape = parts.probe(vision, side, vision_feature_layer)
        kind, given = ("custom", projector) if isinstance(projector, nn.Module) else (projector, None)
        described = isinstance(vision, PreTrainedModel)
        fields: dict[str, Any] = {
            "vision_config": vision.config if described else None,
            "image_token_id": token_id,
            "vision_hidden_size": shape.width,
            "vision_feature_layer": vision_feature_layer,
            "drop_class_token": shape.class_token,
            "image_size": side,
            "image_stride": side // shape.grid[0] if side and shape.grid else None,
            "projector_type": kind,
            "vision_class": None if described else type(vision).__name__,
            "projector_class": None if given is None else type(given).__name__,
        }
        model = cls.assemble(ComposedConfig, fields, llm, vision, given, expected)
        if tokenizer is not None and image_processor is not None:
            model.processor = ComposedProcessor.for_model(model, tokenizer, image_processor)
        return model.train(llm.training)

    @classmethod
    def assemble(
        cls, config_class: Any, fields: dict[str, Any], llm: Any, encoder: nn.Module, projector: Any, expected: Tensor
    ) -> VisionLanguageModel:
        """The model of these parts, checked. ``expected``: `text_logits` of ``llm``; ``projector`` None: a new one."""
        body, head = parts.take_llm_apart(llm)
        own = [c for c in (llm.config, getattr(encoder, "config", None)) if c is not None]
        attention = [c._attn_implementation for c in own]
        tied = head.weight is body.embed_tokens.weight  # type: ignore[union-attr]
        config = config_class(text_config=llm.config, tie_word_embeddings=tied, **fields)
        for part_config, implementation in zip(own, attention, strict=True):
            # A new composite config writes its own choice (none yet) into the parts, which are built already.
            part_config._attn_implementation_internal = implementation
        for part in (body, head, encoder, projector):
            for module in part.modules() if isinstance(part, nn.Module) else ():
                module._is_hf_initialized = True  # type: ignore[assignment]
        model = cls(config, body, head, encoder, projector)
        check_projector(model)
        if projector is None:
            model.model.multi_modal_projector.to(device=head.weight.device, dtype=head.weight.dtype)
        check_text(model, type(llm).__name__, expected)
        generation = llm.generation_config.to_dict()
        suppressed = {*(generation.get("suppress_tokens") or ()), config.placeholder_id}
        model.generation_config.update(**{**generation, "suppress_tokens": sorted(suppressed)})
        return model

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def get_image_features(self, pixel_values: Tensor, image_grid_thw: Tensor | None = None, **kwargs: Any) -> Any:
        """See `VisionLanguageBody.get_image_features`."""
        return self.model.get_image_features(pixel_values, image_grid_thw, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        image_grid_thw: Tensor | None = None,
        mm_encoder_outputs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> MultimodalCausalLMOutputWithPast:
        """input_ids, attention_mask, labels (B, L); logits (B, L, V). Images: see `get_image_features`."""
        outputs = self.model(
            input_ids=input_ids,
            pixel_values=pixel_values,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            image_grid_thw=image_grid_thw,
            mm_encoder_outputs=mm_encoder_outputs,
            **kwargs,
        )
        return self._answer(outputs, labels, logits_to_keep, **kwargs)

    def _answer(
        self, outputs: Any, labels: Tensor | None, logits_to_keep: int | Tensor, **kwargs: Any
    ) -> MultimodalCausalLMOutputWithPast:
        logits = self.lm_head(slice_logits_to_keep(outputs[0], logits_to_keep))
        loss = None
        if labels is not None:
            text_config: Any = self.config.text_config
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=text_config.vocab_size, **kwargs)
        return MultimodalCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            image_outputs=outputs.image_outputs,
        )

    def _expand_multimodal_outputs(
        self, input_ids: Any, mm_encoder_output: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Beams repeat an image's grid with its tokens."""
        images: Any = mm_encoder_output.get("image")
        grids = getattr(images, "grids", None)
        by_tokens = {} if grids is None else dict(zip(map(id, images.pooler_output), grids, strict=True))
        expanded = super()._expand_multimodal_outputs(input_ids, mm_encoder_output, *args, **kwargs)  # type: ignore[misc]
        if by_tokens:
            images.grids = [by_tokens[id(tokens)] for tokens in images.pooler_output]
        return expanded
