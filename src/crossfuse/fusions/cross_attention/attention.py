"""The cross-attention branch of a block, and the self-attention that it is added to.

Shape legend: B rows, F fused text tokens a row, A of them with something to see, N image tokens of this call,
H query heads, G key/value heads, D head width, d model width.
"""

from __future__ import annotations

import copy
import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Block:
    """The self-attention module of a block, in a form that accelerate's hooks do not move between devices."""

    attention: Any


class CrossLayer(nn.Module):
    """New weights of one block, copied from its self-attention (CASA §3); none with shared projections.

    They live at ``...self_attn.cross.*``: projections, the block's input norm for image tokens, the gate.
    """

    def __init__(self, fusion: CrossAttention, attention: Any, input_norm: nn.Module, gist_tokens: int = 0):
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
        self.gist: nn.Parameter | None = None  # the whole model's gists live in its first cross-attention block
        if gist_tokens:
            width = getattr(attention.q_proj, "in_features", attention.q_proj.weight.shape[-1])
            start = torch.randn(gist_tokens, width, generator=torch.Generator().manual_seed(0)) * 0.02
            self.gist = nn.Parameter(start.to(attention.o_proj.weight.device, _float_dtype(attention)))

    def forward(
        self,
        hidden_states: Tensor,
        context: CrossContext,
        rope: tuple[Tensor, Tensor] | None,
        cached: FusedLayer | None,
        block: Block,
        projected: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """What the branch adds to the residual, (B, F, d); exactly 0 where no image is visible.

        hidden_states (B, F, d) are already normalised. ``projected`` holds q, k, v of all tokens where the projections
        are shared and self-attention has computed them.
        """
        attention = block.attention
        weights: Any = attention if self.shared else self
        flat = hidden_states.flatten(0, 1)
        query = self._queries(weights, flat, context, attention, projected)
        keys = values = None
        image = context.image_states(attention.layer_idx)
        if image is not None:
            norm: Any = attention._cross_block.input_layernorm if self.shared else self.norm
            image = norm(image)
            keys, values = (_heads(weights, n, image, attention.head_dim) for n in "kv")
            if context.image_rope is not None:
                keys = context.rotate(attention, keys[None], *context.image_rope)[0]
        if context.touch:
            return _touch(weights, hidden_states, keys, values, [p for p in (self.gate, self.gist) if p is not None])
        image_keys, image_values = context.image_pool(cached, keys, values, attention, flat.device)
        text_keys = text_values = None
        if self.joint_text:
            assert rope is not None
            cos, sin = rope
            query = context.rotate(attention, query[None], *context.query_rope(cos, sin))[0]
            new_keys, new_values = (_heads(weights, n, hidden_states, attention.head_dim, projected) for n in "kv")
            new_keys = context.rotate(attention, new_keys, cos, sin)
            text_keys, text_values = context.text_pool(cached, new_keys, new_values)
        if context.active is not None and not len(context.active) and not self.training:
            return torch.zeros_like(hidden_states)
        gists = 0 if context.gist_windows is None else context.gist_windows.query_count
        main = query[: len(query) - gists]
        out = _windowed(
            main, image_keys, image_values, context.windows, text_keys, text_values, scale=attention.scaling
        )
        if context.gist_windows is not None:
            alone = query[len(main) :]
            seen = _windowed(alone, image_keys, image_values, context.gist_windows, scale=attention.scaling)
            out = torch.cat([out, seen])
        out = weights.o_proj(out.flatten(1))
        if self.gate is not None:
            out = torch.tanh(self.gate) * out
        if context.unseen and keys is not None and values is not None:
            out = out + 0.0 * (keys.sum() + values.sum())
        if context.active is not None:
            out = torch.zeros_like(flat).index_copy(0, context.active, out.to(flat.dtype))
        return out.view_as(hidden_states)

    def _queries(
        self, weights: Any, flat: Tensor, context: CrossContext, attention: Any, projected: dict[str, Tensor] | None
    ) -> Tensor:
        """(A, H, D) queries before rotary embedding, of the tokens that see something."""
        if projected is not None:
            given = projected["q"].flatten(0, 1)
            projected = {"q": given if context.active is None else given[context.active]}
            return _heads(weights, "q", flat, attention.head_dim, projected)
        return _heads(weights, "q", flat if context.active is None else flat[context.active], attention.head_dim)


class FusedAttention(Swapped):
    """Self-attention over text, plus the cross-attention branch of its block where it has one."""

    def forward(self, hidden_states: Tensor, *args: Any, vision: CrossContext | None = None, **kwargs: Any) -> Any:
        if vision is None:
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        vision = vision.at(hidden_states.device)
        vision.update_images(self)
        cross = self._modules.get("cross")  # type: ignore[attr-defined]
        if cross is None:
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        projected = None
        if self._cross_shares:  # type: ignore[attr-defined]
            projected = {n: getattr(self, f"{n}_proj")(hidden_states) for n in "qkv"}
        if self._cross_replaces:  # type: ignore[attr-defined]
            out, scores = None, None
        elif projected is not None:
            out, scores = _with_projections(self, projected).forward(hidden_states, *args, **kwargs)
        else:
            out, scores = super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        cache = kwargs.get("cache")
        cached = None if cache is None else cache.layers[self.layer_idx]  # type: ignore[attr-defined]
        rope = kwargs.get("position_embeddings")
        added = cross(hidden_states, vision, rope, cached, Block(self), projected)
        return (added if out is None else out + added), scores


def _with_projections(attention: Any, projected: dict[str, Tensor]) -> Any:
    """The stock attention module for one call, whose q, k, v are computed already (LoRA and quantisation included).

    A shell around the same weights: nothing is set on the module itself, so calls and threads stay apart.
    """
    base = type(attention)._fused_base
    shell = object.__new__(base)
    shell.__dict__.update(attention.__dict__)
    modules = dict(attention._modules)
    for name, value in projected.items():
        modules.pop(f"{name}_proj")
        shell.__dict__[f"{name}_proj"] = lambda _, value=value: value
    shell.__dict__["_modules"] = modules
    return shell


def _windowed(*tensors: Any, scale: float) -> Tensor:
    """`windowed_attention`. SDPA's backward in half precision takes ten times as long on a CPU as in float32."""
    query: Tensor = tensors[0]
    if query.device.type != "cpu" or query.dtype.itemsize != 2 or not torch.is_grad_enabled():
        return windowed_attention(*tensors, scale=scale)
    with torch.autocast("cpu", enabled=False):
        wide = [t.float() if isinstance(t, Tensor) else t for t in tensors]
        return windowed_attention(*wide, scale=scale).to(query.dtype)


def _heads(weights: Any, kind: str, x: Tensor, head_dim: int, projected: dict[str, Tensor] | None = None) -> Tensor:
    """Project (..., d) to (..., H or G, D), with the block's q/k norm where it has one."""
    flat: Tensor = getattr(weights, f"{kind}_proj")(x) if projected is None else projected[kind]
    heads = flat.unflatten(-1, (-1, head_dim))
    norm = getattr(weights, f"{kind}_norm", None)
    return heads if norm is None else norm(heads)


def _touch(
    weights: Any, hidden: Tensor, keys: Tensor | None, values: Tensor | None, others: list[nn.Parameter]
) -> Tensor:
    """Exact zeros that depend on every parameter, so that no rank of a distributed step lacks a gradient."""
    total = weights.o_proj(weights.q_proj(hidden[:1, :1])).sum()
    for tensor in (keys, values, *others):
        total = total if tensor is None else total + tensor.sum()
    return torch.zeros_like(hidden) + 0.0 * total.to(hidden.dtype)


def _trainable_copy(module: nn.Module) -> nn.Module:
    fresh = copy.deepcopy(module)
    for parameter in fresh.parameters():
        parameter.requires_grad_(True)
    return fresh


def _float_dtype(attention: Any) -> torch.dtype:
    dtype: torch.dtype = attention.o_proj.weight.dtype
    return dtype if dtype.is_floating_point else torch.get_default_dtype()
