"""Windowed attention by FlexAttention: a mask function over per-query key ranges, no T x N mask.

Lengths are padded to powers of two, so that shapes (and with them compiled kernels and block masks) are few. The block
mask is computed from the ranges directly; `create_block_mask` without compilation would evaluate every pair. Compiled
on CUDA. On a CPU FlexAttention runs uncompiled, as a slow but correct path; torch has no backward for it there, so with
gradients the same mask function is evaluated on every pair and handed to SDPA.

Shape legend: T queries, N image tokens, K text keys (padded: T', N', K'), Hq and Hkv heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from .windows import Windows

BLOCK = 128

# (batch, head, query, key) indices -> whether the query sees the key
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class FlexPlan:
    """Padded lengths and the block mask of a layout."""

    queries: int
    images: int
    texts: int
    visible: MaskFunction
    block_mask: Any


def flex_windowed_attention(
    q: Tensor,
    k_image: Tensor,
    v_image: Tensor,
    windows: Windows,
    k_text: Tensor | None = None,
    v_text: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Same arguments and result as `windowed_attention`."""
    texts = 0 if k_text is None else k_text.shape[0]
    name = ("flex", q.device, k_image.shape[0], texts)
    plan = windows.plans.get(name)
    if plan is None:
        plan = windows.plans[name] = make_plan(windows, k_image.shape[0], texts, q.device)
    keys, values = _padded(k_image, plan.images), _padded(v_image, plan.images)
    if k_text is not None and v_text is not None:
        keys = torch.cat((keys, _padded(k_text, plan.texts)))
        values = torch.cat((values, _padded(v_text, plan.texts)))
    grouped = q.shape[1] != k_image.shape[1]
    query, key, value = (x.transpose(0, 1)[None] for x in (_padded(q, plan.queries), keys, values))
    out: Tensor
    if not q.is_cuda and torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        out = _dense(query, key, value, plan.visible, scale, grouped)
    else:
        out = _flex(q.is_cuda)(query, key, value, block_mask=plan.block_mask, scale=scale, enable_gqa=grouped)
    return out[0].transpose(0, 1)[: q.shape[0]]


def padded_length(length: int) -> int:
    """The smallest power of two that is at least `length` and one block."""
    return max(BLOCK, 1 << max(0, length - 1).bit_length())


def make_plan(windows: Windows, images: int, texts: int, device: torch.device) -> FlexPlan:
    """Works out padded lengths, the key ranges of every query, and the block mask."""
    queries, image_columns = padded_length(windows.query_count), padded_length(images)
    text_columns = padded_length(texts) if windows.joint_text else 0
    ranges = _key_ranges(windows, queries, image_columns).to(device)
    visible = _mask_function(ranges)
    mask = _block_mask(ranges, image_columns + text_columns, visible)
    return FlexPlan(queries, image_columns, text_columns, visible, mask)


def _key_ranges(windows: Windows, queries: int, first_text: int) -> Tensor:
    """(4, T') int64: image start and end, text start and end of every query; padding sees nothing."""
    columns = torch.tensor(
        [
            (w.image_start, w.image_start + w.image_length, w.text_start, w.text_start + w.text_length - w.query_length)
            for w in windows.ranges
        ],
        dtype=torch.int64,
    ).view(-1, 4)
    lengths = torch.tensor([w.query_length for w in windows.ranges], dtype=torch.int64)
    first_query = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    rows = columns.repeat_interleave(lengths, dim=0).T.contiguous()
    if windows.joint_text:
        rows[2:] += first_text
        rows[3] += torch.arange(rows.shape[1]) - first_query + 1
    else:
        rows[2:] = 0
    return pad(rows, (0, queries - rows.shape[1]))


def _mask_function(ranges: Tensor) -> MaskFunction:
    image_start, image_end, text_start, text_end = ranges.unbind(0)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        in_image = (key >= image_start[query]) & (key < image_end[query])
        return in_image | ((key >= text_start[query]) & (key < text_end[query]))

    return visible


def _block_mask(ranges: Tensor, keys: int, visible: MaskFunction) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    image_start, image_end, text_start, text_end = ranges.unbind(0)
    first = torch.arange(0, keys, BLOCK, device=ranges.device)
    touched = full = torch.zeros((), dtype=torch.bool, device=ranges.device)
    for start, end in ((image_start, image_end), (text_start, text_end)):
        start, end = start[:, None], end[:, None]
        touched = touched | ((start < first + BLOCK) & (end > first) & (end > start))
        full = full | ((start <= first) & (end >= first + BLOCK))
    touched = touched.view(-1, BLOCK, len(first)).any(dim=1)
    full = full.view(-1, BLOCK, len(first)).all(dim=1)
    return BlockMask.from_kv_blocks(
        *_block_list(touched & ~full),
        *_block_list(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(ranges.shape[1], keys),
    )


def _block_list(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Counts (1, 1, rows) and indices (1, 1, rows, columns), int32, of the set blocks of every row, set ones first."""
    counts = blocks.sum(dim=1, dtype=torch.int32)
    indices = blocks.int().argsort(dim=1, descending=True, stable=True).int()
    return counts[None, None], indices[None, None].contiguous()


def _padded(tensor: Tensor, length: int) -> Tensor:
    return pad(tensor, (0, 0, 0, 0, 0, length - tensor.shape[0]))


def _dense(
    query: Tensor, key: Tensor, value: Tensor, visible: MaskFunction, scale: float | None, grouped: bool
) -> Tensor:
    rows, columns = (torch.arange(x.shape[2], device=x.device) for x in (query, key))
    zero = rows.new_zeros(())
    mask = visible(zero, zero, rows[:, None], columns)
    keyless = ~mask.any(dim=1, keepdim=True)
    # Rows without a key are opened, so that their softmax is finite, and zeroed after it.
    out = scaled_dot_product_attention(query, key, value, mask | keyless, scale=scale, enable_gqa=grouped)
    return out.masked_fill(keyless, 0.0)


@cache
def _flex(compiled: bool) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    attention: Callable[..., Any] = flex_attention
    return torch.compile(attention) if compiled else attention
