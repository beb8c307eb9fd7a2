"""The cross-attention branch of a block, and the self-attention that it is added to.

Shape legend: B rows, F fused text tokens a row, A of them with something to see, N image tokens of this call,
H query heads, G key/value heads, D head width, d model width.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from crossfuse.attention import windowed_attention
from crossfuse.swap import Swapped

if TYPE_CHECKING:
    from crossfuse.fusions.cross_attention.context import CrossContext
    from crossfuse.fusions.cross_attention.fusion import CrossAttention
    from crossfuse.streaming.cache import FusedLayer

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class CrossLayer(nn.Module):
    """New weights of one block, copied from its self-attention (CASA §3); none with shared projections.

    They live at ``...self_attn.cross.*``: projections, the block's input norm for image tokens, the gate.
    """

    def __init__(self, fusion: CrossAttention, attention: Any, input_norm: nn.Module):
        super().__init__()
        self.shared = fusion.share_projections
        self.joint_text = fusion.joint_text
        if not self.shared:
            for name in (*_PROJECTIONS, "q_norm", "k_norm"):
                if hasattr(attention, name):
                    setattr(self, name, _trainable_copy(getattr(attention, name)))
            self.norm = _trainable_copy(input_norm)
        self.gate: nn.Parameter | None = None
        if fusion.gate == "tanh":
            self.gate = nn.Parameter(attention.o_proj.weight.new_zeros(1, dtype=_float_dtype(attention)))

    def forward(
        self,
        hidden_states: Tensor,
        context: CrossContext,
        rope: tuple[Tensor, Tensor] | None,
        cached: FusedLayer | None,
        attention: Any,
    ) -> Tensor:
        """hidden_states (B, F, d), already normalised -> what the branch adds, (B, F, d); exactly 0 without an image."""
        weights = attention if self.shared else self
        flat = hidden_states.flatten(0, 1)
        x = flat if context.active is None else flat[context.active]
        query = _heads(weights, "q", x, attention.head_dim)
        keys = values = None
        if context.features is not None:
            norm = attention._cross_norm if self.shared else self.norm
            image = norm(context.features.to(hidden_states.device))
            keys, values = (_heads(weights, n, image, attention.head_dim) for n in "kv")
            if context.image_rope is not None:
                keys = context.rotate(attention, keys[None], *context.image_rope)[0]
        if context.touch:
            return _touch(weights, hidden_states, keys, values, self.gate)
        image_keys, image_values = context.image_pool(cached, keys, values, attention)
        text_keys = text_values = None
        if self.joint_text:
            assert rope is not None
            cos, sin = rope
            query = context.rotate(attention, query[None], *context.query_rope(cos, sin))[0]
            text = (_heads(weights, n, hidden_states, attention.head_dim) for n in "kv")
            new_keys, new_values = text
            new_keys = context.rotate(attention, new_keys, cos, sin)
            text_keys, text_values = context.text_pool(cached, new_keys, new_values)
        if context.active is not None and not len(context.active) and not self.training:
            return torch.zeros_like(hidden_states)
        out = windowed_attention(
            query, image_keys, image_values, context.windows, text_keys, text_values, scale=attention.scaling
        )
        out = weights.o_proj(out.flatten(1))
        if self.gate is not None:
            out = torch.tanh(self.gate) * out
        if context.active is not None:
            out = torch.zeros_like(flat).index_copy(0, context.active, out.to(flat.dtype))
        return out.view_as(hidden_states)


class FusedAttention(Swapped):
    """Self-attention over text, plus the cross-attention branch of its block where it has one."""

    def forward(self, hidden_states: Tensor, *args: Any, vision: CrossContext | None = None, **kwargs: Any) -> Any:
        cross = self._modules.get("cross")  # type: ignore[attr-defined]
        if vision is None or cross is None:
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        if self._cross_replaces:  # type: ignore[attr-defined]
            out, scores = None, None
        else:
            out, scores = super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        cache = kwargs.get("cache")
        cached = None if cache is None else cache.layers[self.layer_idx]  # type: ignore[attr-defined]
        added = cross(hidden_states, vision, kwargs.get("position_embeddings"), cached, self)
        return (added if out is None else out + added), scores


def _heads(weights: Any, kind: str, x: Tensor, head_dim: int) -> Tensor:
    """Project (..., d) to (..., H or G, D), with the block's q/k norm where it has one."""
    projected: Tensor = getattr(weights, f"{kind}_proj")(x).unflatten(-1, (-1, head_dim))
    norm = getattr(weights, f"{kind}_norm", None)
    return projected if norm is None else norm(projected)


def _touch(weights: Any, hidden: Tensor, keys: Tensor | None, values: Tensor | None, gate: Tensor | None) -> Tensor:
    """Exact zeros that depend on every parameter, so that no rank of a distributed step lacks a gradient."""
    out = weights.o_proj(weights.q_proj(hidden[:1, :1]))
    total = out.sum() if keys is None or values is None else out.sum() + keys.sum() + values.sum()
    if gate is not None:
        total = total * torch.tanh(gate).sum() + gate.sum()
    return torch.zeros_like(hidden) + 0.0 * total.to(hidden.dtype)


def _trainable_copy(module: nn.Module) -> nn.Module:
    fresh = copy.deepcopy(module)
    for parameter in fresh.parameters():
        parameter.requires_grad_(True)
    return fresh


def _float_dtype(attention: Any) -> torch.dtype:
    dtype: torch.dtype = attention.o_proj.weight.dtype
    return dtype if dtype.is_floating_point else torch.get_default_dtype()
