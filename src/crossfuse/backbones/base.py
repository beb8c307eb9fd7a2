"""What crossfuse must know about a model family. Stateless: every method takes the module that it reads."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


@dataclasses.dataclass(eq=False)
class EncodedImages:
    """Projected image tokens of one call."""

    features: list[Tensor]  # one (n, d) tensor an image, in reading order
    grids: list[tuple[int, int] | None]  # (rows, columns) of each
    outputs: Any  # what the family's `get_image_features` returned
    videos: Any = None  # the same for `get_video_features`
    kinds: tuple[int, ...] = ()  # placeholder id of each item, where a family has several

    def as_encoder_outputs(self) -> dict[str, Any]:
        """As ``generate`` passes them: ``mm_encoder_outputs``."""
        outputs = {"image": self.outputs, "video": self.videos}
        return {name: value for name, value in outputs.items() if value is not None}


class Backbone:
    """One model family. A subclass lives in one file of this folder and is listed in `crossfuse.backbones`."""

    family: ClassVar[str]
    architectures: ClassVar[tuple[str, ...]]
    image_arguments: ClassVar[tuple[str, ...]]  # keyword arguments that feed the vision side
    raw_arguments: ClassVar[tuple[str, ...]] = ("pixel_values", "pixel_values_videos")  # what is not encoded yet
    mrope: ClassVar[bool] = False  # positions have three rows: time, height, width

    def body(self, model: nn.Module) -> Any:
        """The model without its head."""
        return model.model

    def decoder(self, body: nn.Module) -> Any:
        """The text decoder: has ``layers`` and ``rotary_emb``."""
        return body.language_model

    def encode(self, body: nn.Module, mm_encoder_outputs: Any, arguments: dict[str, Any]) -> EncodedImages | None:
        """Projected image tokens of this call, or None without images."""
        raise NotImplementedError

    def dummy_features(self, body: nn.Module) -> Tensor:
        """(n, d) features of a blank image: touches every parameter of tower and projector."""
        raise NotImplementedError

    def placeholder_id(self, body: Any) -> int:
        """The token that stands for one image token."""
        return int(body.config.image_token_id)

    def placeholder_ids(self, body: Any) -> tuple[int, ...]:
        """Every token that stands for an image or video token."""
        return (self.placeholder_id(body),)

    def is_placeholder(self, body: Any, input_ids: Tensor) -> Tensor:
        """(B, L) bool."""
        return torch.isin(input_ids, torch.tensor(self.placeholder_ids(body), device=input_ids.device))

    def in_reading_order(self, body: Any, input_ids: Tensor, images: EncodedImages) -> EncodedImages:
        """Items in the order of their placeholders over the batch."""
        return images

    def positions(self, body: Any, input_ids: Tensor, valid: Tensor, arguments: dict[str, Any]) -> Tensor | None:
        """(3, B, L) positions of the unfused model, or None where they are simply counted."""
        return None

    def mended_positions(self, body: Any, input_ids: Tensor, positions: Tensor, valid: Tensor) -> Tensor:
        """(3, B, L) positions as transformers makes them -> as the family's checkpoints were trained."""
        return positions

    def special_ids(self, body: Any) -> tuple[int, ...]:
        """Tokens that are never copied: bos, eos, pad, placeholders."""
        config, text = body.config, body.config.get_text_config()
        ids: set[int] = set(self.placeholder_ids(body))
        for owner in (config, text):
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                value = getattr(owner, name, None)
                ids.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
        return tuple(sorted(ids))

    def rotate(self, attention: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary embedding of this family. x (B, T, H, D), cos and sin (B, T, D) as the decoder makes them."""
        apply = sys.modules[_stock_class(attention).__module__].apply_rotary_pos_emb
        _, rotated = apply(x[:, :, :0], x, cos, sin, unsqueeze_dim=2)
        return rotated  # type: ignore[no-any-return]

    def model_output(self, body: nn.Module, decoder_output: Any, hidden: Tensor, images: Any) -> Any:
        """The family's own output class around ``hidden`` (B, L, d); ``images`` as `encode` returned them, or None."""
        raise NotImplementedError

    def check(self, model: nn.Module) -> None:
        """Raise ValueError where the decoder is not built from blocks that crossfuse can change."""
        decoder = self.decoder(self.body(model))
        if not hasattr(decoder, "layers") or not hasattr(decoder, "rotary_emb"):
            raise ValueError(
                f"the text decoder {type(decoder).__name__} has no rotary layers; supported are decoders built like "
                "Llama (Llama, Mistral, Qwen2, Qwen3, Helium, ...)"
            )


def _stock_class(module: nn.Module) -> type:
    return getattr(type(module), "_fused_base", type(module))


def feature_dtype(body: Any) -> torch.dtype:
    """The dtype of the LLM's input embeddings: everything that meets at the fusion point is cast to it."""
    dtype: torch.dtype = body.get_input_embeddings().weight.dtype
    return dtype
