"""The body of composed models: encoder, projector and decoder, without the head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling, MultimodalBaseModelOutputWithPast
from transformers.utils.generic import can_return_tuple

from crossfuse.backbones import composed_parts as parts
from crossfuse.backbones.composed_checks import needs_module
from crossfuse.backbones.composed_config import ComposedConfig


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

    encoder_name: ClassVar[str] = "vision_tower"

    def __init__(
        self,
        config: ComposedConfig,
        language_model: nn.Module | None = None,
        vision: nn.Module | None = None,
        projector: nn.Module | None = None,
    ):
        super().__init__(config)
        if projector is None and config.projector_type == "custom":
            raise needs_module("projector", config.projector_class)
        self.add_module(self.encoder_name, self._build_encoder(config) if vision is None else vision)
        self.multi_modal_projector: Any = parts.build_projector(config) if projector is None else projector
        self.language_model: Any = (
            AutoModel.from_config(config.text_config) if language_model is None else language_model
        )
        self.post_init()

    @staticmethod
    def _build_encoder(config: Any) -> Any:
        if config.vision_config is None:
            raise needs_module("vision", config.vision_class)
        return AutoModel.from_config(config.vision_config)

    @property
    def encoder(self) -> Any:
        return getattr(self, self.encoder_name)

    def train(self, mode: bool = True) -> VisionLanguageBody:
        """A frozen vision encoder stays in eval mode: its BatchNorm statistics must not move."""
        super().train(mode)
        self._settle_frozen_tower()
        return self

    def _settle_frozen_tower(self) -> bool:
        """Whether the encoder is trained; one that is frozen is put into eval mode."""
        trains = any(parameter.requires_grad for parameter in self.encoder.parameters())
        if not trains and self.encoder.training:
            self.encoder.eval()
        return trains

    @can_return_tuple
    def get_image_features(
        self, pixel_values: Tensor, image_grid_thw: Tensor | None = None, **kwargs: Any
    ) -> EncodedVision:
        """Encoder and projector.

        pixel_values: (images, 3, H, W), or flat patches (P, C) with image_grid_thw (images, 3) long. A frozen encoder
        records no gradients; its tokens are cast to the projector's dtype, so that parts of different precision meet.
        """
        tower, config = self.encoder, self.config
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
        images = (mm_encoder_outputs or {}).get("image")
        if images is None and pixel_values is not None:
            images = self.get_image_features(pixel_values, image_grid_thw, return_dict=True)
        return self._run_decoder(input_ids, attention_mask, position_ids, cache, inputs_embeds, images, **kwargs)

    def _run_decoder(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: Any,
        inputs_embeds: Tensor | None,
        images: Any,
        **kwargs: Any,
    ) -> MultimodalBaseModelOutputWithPast:
        """``images``: the encoder's tokens, whatever was encoded."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        if images is not None:
            inputs_embeds = self._scatter_images(input_ids, inputs_embeds, images.pooler_output)
        outputs = self.language_model(
            attention_mask=attention_mask, position_ids=position_ids, cache=cache, inputs_embeds=inputs_embeds, **kwargs
        )
        return MultimodalBaseModelOutputWithPast(**outputs, image_outputs=images)

    def _scatter_images(self, input_ids: Tensor | None, embeds: Tensor, images: list[Tensor]) -> Tensor:
        if input_ids is None:
            raise ValueError("images need input_ids: inputs_embeds alone do not show where they belong")
        places = input_ids == self.config.placeholder_id
        features = torch.cat(list(images)).to(embeds.device, embeds.dtype)
        if int(places.sum()) != len(features):
            raise ValueError(
                f"{int(places.sum())} image placeholders for {len(images)} images of {len(features)} tokens: give one "
                "image per placeholder, and raise max_length where truncation cut an image"
            )
        return embeds.masked_scatter(places[..., None], features)
