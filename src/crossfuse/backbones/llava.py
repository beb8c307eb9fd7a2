"""LLaVA: `LlavaForConditionalGeneration` with any rotary text decoder and any ViT that transformers pairs with it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from crossfuse.backbones.base import Backbone, EncodedImages, feature_dtype


class LlavaBackbone(Backbone):
    """CLIP, SigLIP and other fixed-grid towers; Llama, Mistral, Qwen2, Helium decoders."""

    family = "llava"
    architectures = ("LlavaForConditionalGeneration",)
    image_arguments = (
        "pixel_values",
        "vision_feature_layer",
        "vision_feature_select_strategy",
        "image_sizes",
    )

    def encode(self, body: Any, mm_encoder_outputs: Any, arguments: dict[str, Any]) -> EncodedImages | None:
        outputs = (mm_encoder_outputs or {}).get("image")
        if outputs is None:
            if arguments.get("pixel_values") is None:
                return None
            outputs = self._encode_pixels(body, arguments)
        dtype = feature_dtype(body)
        features = [tokens.to(dtype) for tokens in outputs.pooler_output]
        return EncodedImages(features, [self._grid(body, len(tokens)) for tokens in features], outputs)

    def dummy_features(self, body: Any) -> Tensor:
        config = body.config.vision_config
        size = getattr(config, "image_size", 32)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        weight = next(body.vision_tower.parameters())
        pixels = weight.new_zeros(1, getattr(config, "num_channels", 3), height, width)
        return self._encode_pixels(body, {"pixel_values": pixels}).pooler_output[0].to(feature_dtype(body))  # type: ignore[no-any-return]

    def model_output(self, body: nn.Module, decoder_output: Any, hidden: Tensor, images: Any) -> Any:
        from transformers.models.llava.modeling_llava import LlavaModelOutputWithPast

        return LlavaModelOutputWithPast(
            last_hidden_state=hidden,  # type: ignore[arg-type]
            cache=decoder_output.cache,
            hidden_states=decoder_output.hidden_states,
            attentions=decoder_output.attentions,
            image_outputs=None if images is None else images.outputs,
        )

    def _encode_pixels(self, body: Any, arguments: dict[str, Any]) -> Any:
        """Tower and projector, as `LlavaModel.get_image_features` runs them, with two differences: a tower whose
        parameters are all frozen records no gradients (re-checked at each call), and features are cast to the
        projector's dtype, so parts of different precision meet without autocast."""
        tower, config = body.vision_tower, body.config
        pixels = arguments["pixel_values"].to(next(tower.parameters()).dtype)
        layers = _first(arguments.get("vision_feature_layer"), config.vision_feature_layer)
        strategy = _first(arguments.get("vision_feature_select_strategy"), config.vision_feature_select_strategy)
        sizes = arguments.get("image_sizes")
        extra = {} if sizes is None else {"image_sizes": sizes}
        trains = torch.is_grad_enabled() and (pixels.requires_grad or any(p.requires_grad for p in tower.parameters()))
        with torch.set_grad_enabled(trains):
            outputs = tower(pixels, output_hidden_states=True, return_dict=True, **extra)
        chosen = [outputs.hidden_states[i] for i in ([layers] if isinstance(layers, int) else layers)]
        if strategy == "default":
            chosen = [states[:, 1:] for states in chosen]
        projector = body.multi_modal_projector
        states = torch.cat(chosen, dim=-1)
        if not torch.is_autocast_enabled(states.device.type):
            states = states.to(next(projector.parameters()).dtype)
        tokens = projector(states)
        if sizes is None:
            outputs.pooler_output = list(tokens)
        else:
            lengths = (torch.as_tensor(sizes) // tower.patch_size).prod(dim=-1).tolist()
            outputs.pooler_output = list(tokens.squeeze(0).split(lengths))
        return outputs

    def _grid(self, body: Any, tokens: int) -> tuple[int, int] | None:
        """The patch grid of an image, where its token count is one full square grid."""
        config = body.config.vision_config
        size, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
        if isinstance(size, int) and isinstance(patch, int) and (size // patch) ** 2 == tokens:
            return size // patch, size // patch
        side = math.isqrt(tokens)
        return (side, side) if side * side == tokens else None


def _first(value: Any, default: Any) -> Any:
    return default if value is None else value
