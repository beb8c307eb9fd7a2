"""What both position fusions share: a set of layers whose attention is exchanged, and the user's own positions."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from crossfuse.fusion import Fusion
from crossfuse.sequence import gather_by
from crossfuse.swap import Swapped, refuse_untouchable, restore, swap

if TYPE_CHECKING:
    from torch import nn

    from crossfuse.backbones.base import Backbone
    from crossfuse.sequence import Layout, MultimodalSequence

# Their frequencies depend on the longest position of a call, and these fusions make positions of their own.
_CHANGING_ROPE = ("dynamic", "longrope")


@dataclasses.dataclass(frozen=True)
class PositionFusion(Fusion):
    """Other rotary positions in some layers. ``layers=None`` stands for all, ``()`` for none: the unfused model."""

    attention_mixin: ClassVar[type[Swapped]]

    layers: tuple[int, ...] | None

    def __post_init__(self) -> None:
        if self.layers is None:
            return
        try:
            layers = tuple(self.layers)
        except TypeError:
            raise ValueError(f"layers must be numbers such as (0,), or None for all; got {self.layers!r}") from None
        if any(isinstance(index, bool) or not isinstance(index, int) or index < 0 for index in layers):
            raise ValueError(f"layers must be block numbers of at least 0; got {layers}")
        if len(set(layers)) < len(layers):
            raise ValueError(f"layers must name each block once; got {layers}")
        object.__setattr__(self, "layers", layers)

    @property
    def is_identity(self) -> bool:
        return self.layers == () and self.active_compression is None

    def layer_indices(self, count: int) -> list[int]:
        """The blocks, of ``count``, that use the other positions."""
        return list(range(count)) if self.layers is None else sorted(self.layers)

    def needs_whole_images(self, backbone: Backbone) -> bool:
        # With three position rows an image is laid out as a grid, which a part of it does not show.
        return super().needs_whole_images(backbone) or (backbone.mrope and not self.is_identity)

    def check_model(self, backbone: Backbone, model: nn.Module) -> None:
        decoder = backbone.decoder(backbone.body(model))
        count = len(decoder.layers)
        chosen = self.layer_indices(count)
        if chosen and chosen[-1] >= count:
            raise ValueError(f"layers must be below {count}, the number of blocks; got {chosen[-1]}")
        rope = getattr(decoder.config, "rope_parameters", None) or {}
        if chosen and rope.get("rope_type") in _CHANGING_ROPE:
            raise ValueError(
                f"rope_type {rope['rope_type']!r} changes its frequencies with the length of a call, which "
                f"positions of {self.name} would disturb; use layers=() or a model with fixed frequencies"
            )
        for index in chosen:
            attention = getattr(decoder.layers[index], "self_attn", None)
            if attention is None:
                raise ValueError(f"block {index}, {type(decoder.layers[index]).__name__}, has no self_attn to change")
            refuse_untouchable(attention)
            self.check_attention(attention)

    def check_attention(self, attention: Any) -> None:
        """Raise ValueError where this attention module cannot take other positions."""

    def attach(self, backbone: Backbone, model: nn.Module) -> None:
        layers = backbone.decoder(backbone.body(model)).layers
        for index in self.layer_indices(len(layers)):
            swap(layers[index].self_attn, self.attention_mixin)

    def detach(self, backbone: Backbone, model: nn.Module) -> None:
        layers = backbone.decoder(backbone.body(model)).layers
        for index in self.layer_indices(len(layers)):
            restore(layers[index].self_attn)


def layout_in_place(sequence: MultimodalSequence) -> Layout:
    """Every real token in the order of the input, at the position that the unfused model gives it."""
    layout = sequence.plain_layout()
    layout.position_ids = gather_by(sequence.user_positions(), layout.host).clamp(min=0)
    layout.next_position = sequence.following_position()
    return layout
