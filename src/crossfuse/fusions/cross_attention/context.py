"""State of one call: who sees what, where image keys stand, and what goes into the cache.

Shape legend as in `attention`; S cached image slots a row, P pooled text keys a row.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from crossfuse.attention.windows import Windows
from crossfuse.devices import LayerState
from crossfuse.fusions.cross_attention.anchored import anchored_images
from crossfuse.fusions.cross_attention.layout import image_lengths
from crossfuse.fusions.cross_attention.visibility import Visibility
from crossfuse.sequence import FusedInputs, MultimodalSequence
from crossfuse.streaming.cache import FusedLayer, FusionCache, WindowState

if TYPE_CHECKING:
    from crossfuse.backbones.base import Backbone
    from crossfuse.fusions.cross_attention.fusion import CrossAttention

Rope = tuple[Tensor, Tensor]


@dataclasses.dataclass(eq=False)
class CrossContext(LayerState):
    """State of one call, the same for all blocks."""

    backbone: Backbone
    windows: Windows
    active: Tensor | None  # (A,) flat indices of queries that see something; None: all, in order
    gist_windows: Windows | None  # joint text: gists see images alone; their queries follow those of `windows`
    features: Tensor | None  # (N, d) image tokens of this call
    image_rope: Rope | None  # (1, N, D) each, joint text only
    image_order: Tensor | None  # (all,) into cached slots then new tokens, where both exist
    image_store: Tensor | None  # (B, S') into the pool: what the cache keeps; None: unchanged
    image_shift: Rope | None  # (B, S, D): cached keys of an image run that goes on in this call
    text_order: Tensor | None  # (B, P) into cached then new columns, where padding lies between them
    text_stored: int  # columns that the cache keeps
    window: WindowState | None  # the cache's state after this call
    touch: bool = False  # training without any image: only touch the parameters
    unseen: bool = False  # training without any image, where text attends to text: touch the image side
    updated: list[Tensor | None] | None = None  # image states before every block, each written once (CA+FFN)

    def image_states(self, block: int) -> Tensor | None:
        """(N, d) image tokens as this block sees them."""
        if self.updated is None or self.features is None:
            return self.features
        states = self.updated[block]
        return None if states is None else states.to(self.features.device)

    def update_images(self, attention: Any) -> None:
        """y_{l+1} = y_l + FFN_l(norm_l(y_l)), with the block's own norm and FFN, unless no later block reads it.

        Slots are written once and never changed: recomputation under checkpointing reads the states of its own block.
        """
        block = attention.layer_idx
        if self.updated is None or block + 1 >= len(self.updated):
            return
        states = self.image_states(block)
        assert states is not None
        layer = attention._cross_block
        following = states + layer.mlp(layer.post_attention_layernorm(states))
        if self.updated[block + 1] is None:
            self.updated[block + 1] = following

    def rotate(self, attention: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (B, T, H, D)."""
        return self.backbone.rotate(attention, x, cos, sin)

    def query_rope(self, cos: Tensor, sin: Tensor) -> Rope:
        """The decoder's (..., B, F, D) tables for the active queries, (..., 1, A, D)."""
        flat = (cos.flatten(-3, -2), sin.flatten(-3, -2))
        if self.active is not None:
            flat = (flat[0].index_select(-2, self.active), flat[1].index_select(-2, self.active))
        return flat[0].unsqueeze(-3), flat[1].unsqueeze(-3)

    def image_pool(
        self,
        cached: FusedLayer | None,
        keys: Tensor | None,
        values: Tensor | None,
        attention: Any,
        device: torch.device,
    ) -> tuple[Tensor, Tensor]:
        """Flat image keys and values (all, G, D) in the order of `windows`; stores what later calls see."""
        old_keys, old_values = (None, None) if cached is None else (cached.image_keys, cached.image_values)
        if old_keys is not None and old_values is not None:
            if self.image_shift is not None:
                old_keys = self.rotate(attention, old_keys, *self.image_shift)
            flat_keys, flat_values = old_keys.flatten(0, 1), old_values.flatten(0, 1)
            if keys is not None and values is not None:
                flat_keys, flat_values = torch.cat([flat_keys, keys]), torch.cat([flat_values, values])
        elif keys is None or values is None:
            dtype = attention._cross_block.input_layernorm.weight.dtype  # never quantised
            empty = torch.zeros(0, attention.config.num_key_value_heads, attention.head_dim, dtype=dtype, device=device)
            return empty, empty
        else:
            flat_keys, flat_values = keys, values
        if cached is not None and self.image_store is not None:
            cached.image_keys, cached.image_values = (
                flat_keys[self.image_store],
                flat_values[self.image_store],
            )
        if self.image_order is not None:
            flat_keys, flat_values = flat_keys[self.image_order], flat_values[self.image_order]
        return flat_keys, flat_values

    def text_pool(self, cached: FusedLayer | None, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Flat text keys and values (B * P, G, D): the open window's cached text, then this call's."""
        if cached is not None and cached.text_keys is not None and cached.text_values is not None:
            keys = torch.cat([cached.text_keys, keys], 1)
            values = torch.cat([cached.text_values, values], 1)
        if self.text_order is not None:
            index = self.text_order.clamp(min=0)[..., None, None].expand(-1, -1, *keys.shape[2:])
            keys, values = keys.gather(1, index), values.gather(1, index)
        if cached is not None:
            stored = keys.shape[1] - self.text_stored
            cached.text_keys, cached.text_values = keys[:, stored:], values[:, stored:]
        return keys.flatten(0, 1), values.flatten(0, 1)


def cross_context(
    fusion: CrossAttention, backbone: Backbone, body: Any, fused: FusedInputs, cache: FusionCache | None
) -> CrossContext | None:
    """Windows of this call and the state that the cache holds after it; None where nobody sees an image."""
    sequence = fused.sequence
    state = None if cache is None else cache.window
    if sequence.image_features is None and state is None and not (fusion.replace and fusion.joint_text):
        return _without_images(fusion, backbone, backbone.decoder(body), sequence)
    lengths, steps = image_lengths(fusion, sequence), None
    if fusion.active_anchors is not None:
        with_copies = anchored_images(fusion.active_anchors, body, fused, lengths, state, cache)
        if with_copies is not None:
            fused, lengths, steps = with_copies.fused, with_copies.lengths, with_copies.steps
            sequence = fused.sequence
    seen = Visibility(fusion, fused, state, lengths, steps)
    rope = shift = None
    decoder = backbone.decoder(body)
    if fusion.joint_text and sequence.image_features is not None:
        rope = decoder.rotary_emb(sequence.image_features, seen.image_positions(backbone.mrope).unsqueeze(-2))
        if state is not None and not fusion.gist_tokens and (moved := seen.continued_run(state)) is not None:
            if backbone.mrope:
                raise ValueError(
                    "an image run was split between two calls, which joint_text cannot lay out on a grid; "
                    "use prefill_chunk_size=None"
                )
            cos, sin = decoder.rotary_emb(sequence.image_features, moved)
            scale = getattr(decoder.rotary_emb, "attention_scaling", 1.0)
            shift = (cos / scale, sin / scale)
    windows, active, gist_windows = seen.windows()
    features = sequence.dummy_features if sequence.image_features is None else sequence.image_features
    window, store = (None, None) if cache is None else seen.next_state(state)
    return CrossContext(
        backbone=backbone,
        windows=windows,
        active=active,
        gist_windows=gist_windows,
        features=features,
        image_rope=rope,
        image_order=seen.image_order,
        image_store=store,
        image_shift=shift,
        text_order=seen.text_order,
        text_stored=0 if window is None else int(window.text_counts.max()),
        window=window,
        unseen=sequence.image_features is None and features is not None,
        updated=_slots(fusion, decoder, features),
    )


def _without_images(
    fusion: CrossAttention, backbone: Backbone, decoder: Any, sequence: MultimodalSequence
) -> CrossContext | None:
    dummy = sequence.dummy_features
    if dummy is None and not fusion.replace:
        return None
    nothing = torch.zeros(0, dtype=torch.long, device=sequence.input_ids.device)
    return CrossContext(
        backbone=backbone,
        windows=Windows(nothing, nothing, nothing),
        active=nothing,
        gist_windows=None,
        features=dummy,
        image_rope=None,
        image_order=None,
        image_store=None,
        image_shift=None,
        text_order=None,
        text_stored=0,
        window=None,
        touch=dummy is not None,
        updated=_slots(fusion, decoder, dummy),
    )


def _slots(fusion: CrossAttention, decoder: Any, features: Tensor | None) -> list[Tensor | None] | None:
    """One slot of image states a block, up to the last block with cross-attention."""
    if not fusion.update_images or features is None:
        return None
    last = fusion.layer_indices(len(decoder.layers))[-1]
    return [features, *[None] * last]
