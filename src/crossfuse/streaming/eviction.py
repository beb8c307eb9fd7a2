"""Bounded text: the oldest tokens leave the cache, what stays is rotated back, the first tokens (sinks) never move.

A stream of text tokens 0 1 2 3 4 5 6 7 8 with 2 sinks, from which a block of 3 leaves::

    before   0 1 [2 3 4] 5 6 7 8      positions 0 1 2 3 4 5 6 7 8
    after    0 1  5 6 7 8             positions 0 1 2 3 4 5

Everything behind the block moves by the same number of positions: text keys, the image and text keys of CA_t+v, and the
next position. So every distance among these is what it was, and the distance to a sink is that in the cache
(StreamingLLM, section 3.2). Rotations are computed in float32; a key is rotated at most once per evicted block.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from crossfuse.backbones.base import Backbone
from crossfuse.streaming.cache import FusedLayer, FusionCache
from crossfuse.streaming.stream import Run, Stream

_CHANGING_ROPE = ("dynamic", "longrope")


@dataclasses.dataclass(frozen=True)
class TextBudget:
    """How much a self-attention cache may hold.

    max_text_tokens: tokens in the cache (with insertion, image tokens count too); None does not evict.
    sink_tokens: first tokens that stay for ever.
    block_tokens: how many leave at a time; None takes an eighth of what may leave.
    """

    max_text_tokens: int | None = None
    sink_tokens: int = 4
    block_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.sink_tokens < 0:
            raise ValueError(f"sink_tokens must be at least 0; got {self.sink_tokens}")
        if self.block_tokens is not None and self.block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1; got {self.block_tokens}")
        if self.max_text_tokens is not None and self.max_text_tokens < self.sink_tokens + 2:
            raise ValueError(
                f"max_text_tokens must be at least {self.sink_tokens + 2} (sink_tokens + 2); got {self.max_text_tokens}"
            )

    @property
    def capacity(self) -> int | None:
        """Tokens beside the sinks."""
        return None if self.max_text_tokens is None else self.max_text_tokens - self.sink_tokens

    @property
    def block(self) -> int:
        if self.block_tokens is not None or self.capacity is None:
            return self.block_tokens or 1
        return max(1, self.capacity // 8)

    def check_model(self, model: Any, limit: int) -> None:
        """ValueError where this budget does not fit the model's positions."""
        if self.max_text_tokens is None:
            return
        if self.max_text_tokens > limit:
            raise ValueError(
                f"max_text_tokens must be at most {limit} (the model's max_position_embeddings); got "
                f"{self.max_text_tokens}"
            )
        rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
        if rope.get("rope_type") in _CHANGING_ROPE:
            raise ValueError(
                f"rope_type {rope['rope_type']!r} changes its frequencies with the length, so kept keys cannot be "
                "rotated back; use max_text_tokens=None"
            )


def make_room(stream: Stream, incoming: int, budget: TextBudget, backbone: Backbone, body: Any) -> None:
    """Evict as many blocks as it takes for ``incoming`` tokens to fit. Nothing happens while they fit."""
    if budget.max_text_tokens is None:
        return
    excess = stream.cached_tokens + incoming - budget.max_text_tokens
    if excess <= 0:
        return
    wanted = -(-excess // budget.block) * budget.block
    start, end, positions = _leaving(stream.runs, budget.sink_tokens, wanted)
    evict(stream.cache, start, end, positions, backbone, body)


def _leaving(runs: list[Run], sinks: int, wanted: int) -> tuple[int, int, int]:
    """Take at least ``wanted`` tokens after the sinks out of ``runs``: (start, end, positions that they spanned).

    Images leave whole; sinks end where the first image begins.
    """
    kept: list[Run] = []
    start = 0
    while runs and not runs[0].is_image and start < sinks:
        run = runs.pop(0)
        taken = min(run.tokens, sinks - start)
        kept.append(Run(taken, taken, False))
        start += taken
        if taken < run.tokens:
            runs.insert(0, Run(run.tokens - taken, run.tokens - taken, False))
    end, positions = start, 0
    while runs and end - start < wanted:
        run = runs.pop(0)
        taken = run.tokens if run.is_image else min(run.tokens, wanted - (end - start))
        end += taken
        positions += run.positions if run.is_image else taken
        if taken < run.tokens:
            runs.insert(0, Run(run.tokens - taken, run.tokens - taken, False))
    if kept and runs and not runs[0].is_image:
        first = runs.pop(0)
        kept[-1] = Run(kept[-1].tokens + first.tokens, kept[-1].positions + first.positions, False)
    runs[:0] = kept
    return start, end, positions


def evict(cache: FusionCache, start: int, end: int, positions: int, backbone: Backbone, body: Any) -> None:
    """Drop columns ``start : end`` of a cache of one row and rotate what follows by ``-positions``."""
    if len(cache.layers) == 0 or cache.mask is None or cache.next_position is None or end <= start:
        return
    decoder = backbone.decoder(body)
    before = cache.fused_length
    shift = _Rotation(backbone, decoder, -positions, cache.mask.device)
    window = cache.window
    joint = any(layer.text_keys is not None for layer in cache.layers if isinstance(layer, FusedLayer))
    layers: Any = cache.layers
    for layer, block in zip(layers, decoder.layers, strict=True):
        attention = block.self_attn
        if layer.is_initialized and layer.keys is not None and layer.keys.numel():
            kept = shift(attention, layer.keys[:, :, end:].transpose(1, 2)).transpose(1, 2)
            layer.keys = torch.cat([layer.keys[:, :, :start], kept], 2)
            layer.values = torch.cat([layer.values[:, :, :start], layer.values[:, :, end:]], 2)
        if joint and layer.image_keys is not None:
            layer.image_keys = shift(attention, layer.image_keys)
        if layer.text_keys is not None and layer.text_values is not None:
            low, high = (max(0, column - before + layer.text_keys.shape[1]) for column in (start, end))
            moved = shift(attention, layer.text_keys[:, high:])
            layer.text_keys = torch.cat([layer.text_keys[:, :low], moved], 1)
            layer.text_values = torch.cat([layer.text_values[:, :low], layer.text_values[:, high:]], 1)
    if window is not None:
        low, high = ((column - before + window.text_counts).clamp(min=0) for column in (start, end))
        cache.window = dataclasses.replace(window, text_counts=window.text_counts - (high - low))
    cache.mask = torch.cat([cache.mask[:, :start], cache.mask[:, end:]], 1)
    cache.next_position = cache.next_position - positions
    cache.croppable = min(cache.croppable, before - end)
    cache.fused_length = before - (end - start)


class _Rotation:
    """Turn cached keys by the same number of positions, whatever their position is."""

    def __init__(self, backbone: Backbone, decoder: Any, positions: int, device: torch.device):
        self.backbone = backbone
        rotary = decoder.rotary_emb
        where = torch.full((3, 1, 1) if backbone.mrope else (1, 1), positions, device=device)
        cos, sin = rotary(torch.zeros(1, dtype=torch.float32, device=device), where)
        scale = getattr(rotary, "attention_scaling", 1.0)
        self.cos, self.sin = cos / scale, sin / scale

    def __call__(self, attention: Any, keys: Tensor) -> Tensor:
        """(1, T, H, D), any T."""
        if not keys.shape[1]:
            return keys
        cos, sin = self.cos.to(keys.device), self.sin.to(keys.device)  # layers may stand on several devices
        return self.backbone.rotate(attention, keys.float(), cos, sin).to(keys.dtype)
