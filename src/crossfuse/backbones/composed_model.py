"""`VisionLanguageModel`: a text-only LLM and any vision encoder, joined into an ordinary transformers model.

Built like LLaVA (``model.vision_tower``, ``model.multi_modal_projector``, ``model.language_model``, ``lm_head``), so
that generation, training, PEFT and every fusion treat it like one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    MultimodalBaseModelOutputWithPast,
    MultimodalCausalLMOutputWithPast,
)
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils.generic import can_return_tuple

from crossfuse.backbones import composed_parts as parts
from crossfuse.backbones.composed_checks import check_projector, check_text, needs_module, text_logits
from crossfuse.backbones.composed_config import ComposedConfig
from crossfuse.backbones.composed_processor import IMAGE_TOKEN, ComposedProcessor


@dataclass
class EncodedVision(BaseModelOutputWithPooling):
    """``pooler_output``: one (n, d) tensor of projected tokens an image; ``grids``: (rows, columns) of each."""

    grids: list[tuple[int, int] | None] | None = None


class ComposedPreTrainedModel(PreTrainedModel):
    """What transformers must know about both classes below."""

    config_class = ComposedConfig
    base_model_prefix = "model"
    input_modalities = ["image", "text"]  # noqa: RUF012
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True


class VisionLanguageBody(ComposedPreTrainedModel):
    """Vision encoder, projector and decoder, without the head."""

    def __init__(
        self,
        config: ComposedConfig,
        language_model: nn.Module | None = None,
        vision: nn.Module | None = None,
        projector: nn.Module | None = None,
    ):
        super().__init__(config)
        if vision is None and config.vision_config is None:
            raise needs_module("vision", config.vision_class)
        if projector is None and config.projector_type == "custom":
            raise needs_module("projector", config.projector_class)
        self.vision_tower: Any = AutoModel.from_config(config.vision_config) if vision is None else vision
        self.multi_modal_projector: Any = parts.build_projector(config) if projector is None else projector
        self.language_model: Any = (
            AutoModel.from_config(config.text_config) if language_model is None else language_model
        )
        self.post_init()

    def train(self, mode: bool = True) -> VisionLanguageBody:
        """A frozen vision encoder stays in eval mode: its BatchNorm statistics must not move."""
        super().train(mode)
        self._settle_frozen_tower()
        return self

    def _settle_frozen_tower(self) -> bool:
        """Whether the encoder is trained; one that is frozen is put into eval mode."""
        trains = any(parameter.requires_grad for parameter in self.vision_tower.parameters())
        if not trains and self.vision_tower.training:
            self.vision_tower.eval()
        return trains

    @can_return_tuple
    def get_image_features(
        self, pixel_values: Tensor, image_grid_thw: Tensor | None = None, **kwargs: Any
    ) -> EncodedVision:
        """Encoder and projector.

        pixel_values: (images, 3, H, W), or flat patches (P, C) with image_grid_thw (images, 3) long. A frozen encoder
        records no gradients; its tokens are cast to the projector's dtype, so that parts of different precision meet.
        """
        tower, config = self.vision_tower, self.config
        pixels = pixel_values.to(next(tower.parameters()).dtype)
        trains = self._settle_frozen_tower() or pixels.requires_grad
        with torch.set_grad_enabled(torch.is_grad_enabled() and trains):
            tokens, grids = parts.image_tokens(
                tower, pixels, image_grid_thw, config.vision_feature_layer, config.drop_class_token
            )
        projected: Any = self.project(tokens)
        return EncodedVision(pooler_output=projected, grids=grids)

    def project(self, tokens: list[Tensor]) -> list[Tensor]:
        """One (n, C) tensor of encoder tokens an image -> one (n, d) tensor an image."""
        states = torch.cat(tokens)
        weight = next(self.multi_modal_projector.parameters(), None)
        if weight is not None and not torch.is_autocast_enabled(states.device.type):
            states = states.to(weight.dtype)
        projected: Tensor = self.multi_modal_projector(states)
        return list(projected.split([len(t) for t in tokens]))

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        mm_encoder_outputs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> MultimodalBaseModelOutputWithPast:
        """Image tokens into their placeholders, then the decoder. Hidden states are (B, L, d)."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        images = (mm_encoder_outputs or {}).get("image")
        if images is None and pixel_values is not None:
            images = self.get_image_features(pixel_values, image_grid_thw, return_dict=True)
        if images is not None:
            inputs_embeds = self._scatter_images(input_ids, inputs_embeds, images.pooler_output)
        outputs = self.language_model(
            attention_mask=attention_mask, position_ids=position_ids, cache=cache, inputs_embeds=inputs_embeds, **kwargs
        )
        return MultimodalBaseModelOutputWithPast(**outputs, image_outputs=images)

    def _scatter_images(self, input_ids: Tensor | None, embeds: Tensor, images: list[Tensor]) -> Tensor:
        if input_ids is None:
            raise ValueError("images need input_ids: inputs_embeds alone do not show where they belong")
        places = input_ids == self.config.image_token_id
        features = torch.cat(list(images)).to(embeds.device, embeds.dtype)
        if int(places.sum()) != len(features):
            raise ValueError(
                f"{int(places.sum())} image placeholders for {len(images)} images of {len(features)} tokens: give one "
                "image per placeholder, and raise max_length where truncation cut an image"
            )
        return embeds.masked_scatter(places[..., None], features)


class VisionLanguageModel(ComposedPreTrainedModel, GenerationMixin):
    """A text-only LLM with a vision encoder; made by `compose`, saved and loaded like any model of transformers."""

    _tied_weights_keys = {"lm_head.weight": "model.language_model.embed_tokens.weight"}  # noqa: RUF012
    processor: ComposedProcessor | None = None
    """Set by `compose` where a tokenizer and an image processor are known. Save it beside the model."""

    def __init__(
        self,
        config: ComposedConfig,
        language_model: nn.Module | None = None,
        lm_head: nn.Module | None = None,
        vision: nn.Module | None = None,
        projector: nn.Module | None = None,
    ):
        super().__init__(config)
        text_config: Any = config.text_config
        self.model = VisionLanguageBody(config, language_model, vision, projector)
        self.lm_head = (
            nn.Linear(text_config.hidden_size, text_config.vocab_size, bias=False) if lm_head is None else lm_head
        )
        self.post_init()

    @classmethod
    def compose(
        cls,
        llm: Any,
        vision: Any,
        projector: str | nn.Module = "mlp",
        *,
        tokenizer: Any = None,
        image_processor: Any = None,
        image_size: int | None = None,
        vision_feature_layer: int | None = None,
        image_token: str = IMAGE_TOKEN,
        dtype: torch.dtype | None = None,
    ) -> VisionLanguageModel:
        """Join a causal LM and a vision encoder. The parts are taken over, not copied.

        llm: a causal LM built like Llama: an instance, a directory, a hub id, or the path of a text GGUF.
        vision: CLIP, SigLIP or another ViT, Qwen2.5-VL's tower, a timm model through transformers' TimmWrapper (an
            instance, a directory or a hub id), or any module whose output is (B, C, H, W) or (B, N, C).
        projector: "mlp", "linear", or a module from (..., C) to (..., d).
        tokenizer, image_processor: needed for `processor` where ``llm`` or ``vision`` is an instance. ``image_token``
            is added to the tokenizer, and to the embeddings where they lack a row for it.
        image_size: side of the input in pixels where neither config nor image processor tells it.
        vision_feature_layer: which hidden state (a ViT's layer, a CNN's stage) to take; None: the output.
        dtype: of parts that are loaded; None: as stored (float32 for a GGUF).

        Returns the model with the new projector in the LLM's dtype, in the mode (train or eval) of ``llm``. Its logits
        for text are those of ``llm``. Raises ValueError where the parts do not fit.
        """
        llm, tokenizer = parts.load_llm(llm, tokenizer, dtype)
        vision, image_processor = parts.load_vision(vision, image_processor, dtype)
        parts.take_llm_apart(llm)  # refuse what does not fit before anything is changed
        token_id = parts.add_placeholder(llm, tokenizer, image_token)
        body, head = parts.take_llm_apart(llm)
        expected = text_logits(llm, body)
        side = None if parts.takes_grid(vision) else parts.input_size(vision, image_processor, image_size)
        shape = parts.probe(vision, side, vision_feature_layer)
        kind, given = ("custom", projector) if isinstance(projector, nn.Module) else (projector, None)
        described = isinstance(vision, PreTrainedModel)
        own = [c for c in (llm.config, getattr(vision, "config", None)) if c is not None]
        attention = [c._attn_implementation for c in own]
        config = ComposedConfig(
            text_config=llm.config,
            vision_config=vision.config if described else None,
            image_token_id=token_id,
            vision_hidden_size=shape.width,
            vision_feature_layer=vision_feature_layer,
            drop_class_token=shape.class_token,
            image_size=side,
            image_stride=side // shape.grid[0] if side and shape.grid else None,
            projector_type=kind,  # type: ignore[arg-type]
            vision_class=None if described else type(vision).__name__,
            projector_class=None if given is None else type(given).__name__,
            tie_word_embeddings=head.weight is body.embed_tokens.weight,  # type: ignore[union-attr]
        )
        for part_config, implementation in zip(own, attention, strict=True):
            # A new composite config writes its own choice (none yet) into the parts, which are built already.
            part_config._attn_implementation_internal = implementation
        for part in (body, head, vision, given):
            for module in part.modules() if isinstance(part, nn.Module) else ():
                module._is_hf_initialized = True  # type: ignore[assignment]
        model = cls(config, body, head, vision, given)
        check_projector(model)
        if given is None:
            model.model.multi_modal_projector.to(device=head.weight.device, dtype=head.weight.dtype)
        check_text(model, type(llm).__name__, expected)
        generation = llm.generation_config.to_dict()
        suppressed = {*(generation.get("suppress_tokens") or ()), token_id}
        model.generation_config.update(**{**generation, "suppress_tokens": sorted(suppressed)})
        if tokenizer is not None and image_processor is not None:
            model.processor = ComposedProcessor.for_model(model, tokenizer, image_processor)
        return model.train(llm.training)

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
