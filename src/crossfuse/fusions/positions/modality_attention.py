"""Attention of ModalityRoPE: one softmax over keys that are rotated in one of two ways, depending on the pair.

Shape legend: B rows, F tokens of this call, P keys in all, H query heads, G key/value heads, D head width.

Let q¹, k¹ be rotated by the position inside the modality, q², k² by the modality's ordinal. A query of modality a and
a key of modality b must give q¹·k¹ for a = b and q²·k² otherwise. That is the dot product of wider vectors, with one
block [q¹ q²]·[k¹ k²] for every modality m that asks: the query is zero unless a = m, and of the key k¹ is zero unless
b = m, k² is zero if b = m. So the model's own attention kernels, masks and dropout apply. Where all queries have one
modality (decoding), one block is enough; where all tokens have one, k¹ alone is.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from crossfuse.devices import LayerState
from crossfuse.swap import Swapped

if TYPE_CHECKING:
    from crossfuse.backbones.base import Backbone
    from crossfuse.streaming.cache import FusedLayer

Rope = tuple[Tensor, Tensor]
_IMPLEMENTATIONS = ("sdpa", "eager")


@dataclasses.dataclass(eq=False)
class ModalityContext(LayerState):
    """State of one call, the same for all layers."""

    backbone: Backbone
    within_rope: Rope  # (B, F, D) each: by the position inside the modality
    between_rope: Rope  # (B, F, D) each: by the ordinal of the modality
    query_modality: Tensor  # (B, F) long
    key_modality: Tensor  # (B, P) long, cached keys first
    asking: tuple[int, ...]  # modalities among this call's tokens
    mixed: bool  # more than one modality among the keys
    state: Tensor  # (B, P, 1, n) long: what the cache keeps of every token
    window: None = None  # no cross-attention window

    def rotate(self, attention: Any, x: Tensor, rope: Rope) -> Tensor:
        """x (B, F, heads, D)."""
        cos, sin = (table.to(x.dtype) for table in rope)
        return self.backbone.rotate(attention, x, cos, sin)


class ModalityAttention(Swapped):
    """Self-attention whose distances depend on the modalities of a pair; the stock one where no context is given."""

    def forward(self, hidden_states: Tensor, *args: Any, vision: ModalityContext | None = None, **kwargs: Any) -> Any:
        if vision is None:
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        attention: Any = self
        vision = vision.at(hidden_states.device)
        cache, mask = kwargs.pop("cache", None), kwargs.pop("attention_mask", None)
        kwargs.pop("position_embeddings", None)
        query, key, value = (_heads(attention, name, hidden_states) for name in "qkv")
        query_within, key_within = (
            vision.rotate(attention, x, vision.within_rope).transpose(1, 2) for x in (query, key)
        )
        value, between = value.transpose(1, 2), None
        if vision.mixed or cache is not None:
            between = vision.rotate(attention, key, vision.between_rope)
        if cache is not None:
            key_within, value = cache.update(key_within, value, attention.layer_idx)
            between = _stored(cache.layers[attention.layer_idx], between, vision.state)
        if vision.mixed:
            assert between is not None
            query_between = vision.rotate(attention, query, vision.between_rope).transpose(1, 2)
            query_within, key_within = _widened(
                vision, query_within, query_between, key_within, between.transpose(1, 2)
            )
        out, weights = _interface(attention)(
            self,
            query_within,
            key_within,
            value,
            mask,
            dropout=attention.attention_dropout if attention.training else 0.0,
            scaling=attention.scaling,
            **kwargs,
        )
        return attention.o_proj(out.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights


def _widened(vision: ModalityContext, q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor) -> tuple[Tensor, Tensor]:
    """Queries (B, H, F, D) and keys (B, G, P, D), each in both rotations -> (B, H, F, W) and (B, G, P, W)."""
    asks = vision.query_modality[:, None, :, None]
    holds = vision.key_modality[:, None, :, None]
    queries, keys = [], []
    for modality in vision.asking:
        same = holds == modality
        keys += [k1.masked_fill(~same, 0), k2.masked_fill(same, 0)]
        others = asks != modality
        single = len(vision.asking) == 1
        queries += [q1, q2] if single else [q1.masked_fill(others, 0), q2.masked_fill(others, 0)]
    return torch.cat(queries, -1), torch.cat(keys, -1)


def _stored(layer: FusedLayer, between: Tensor | None, state: Tensor) -> Tensor:
    """All keys rotated by ordinals, (B, P, G, D), put beside those that `cache.update` keeps.

    The slots of the window's text are free here: they move with rows and are cropped with the tokens.
    """
    assert between is not None
    if layer.text_keys is not None:
        between = torch.cat([layer.text_keys, between], 1)
    layer.text_keys, layer.text_values = between, state
    return between


def _heads(attention: Any, kind: str, x: Tensor) -> Tensor:
    """(B, F, d) -> (B, F, H or G, D), with the block's q/k norm where it has one."""
    heads: Tensor = getattr(attention, f"{kind}_proj")(x).unflatten(-1, (-1, attention.head_dim))
    norm = getattr(attention, f"{kind}_norm", None)
    return heads if norm is None else norm(heads)


def _interface(attention: Any) -> Any:
    """The model's attention function; ValueError for kernels that need queries as wide as values."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    implementation = attention.config._attn_implementation
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(f"modality-rope needs attn_implementation 'sdpa' or 'eager'; got {implementation!r}")
    eager = sys.modules[type(attention)._fused_base.__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)
