"""Several streams as the rows of one cache, and apart again: a pool decodes them in one forward.

Streams of different lengths are aligned at their last token; what stands before is masked padding, which never goes
back into a stream. Shape legend as in `cache`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from crossfuse.streaming.cache import NO_WINDOW, FusedLayer, FusionCache, WindowState

_IMAGE, _TEXT = ("image_keys", "image_values"), ("text_keys", "text_values")


def stack(caches: Sequence[FusionCache]) -> FusionCache:
    """Caches of one row each -> one cache with a row for each. The parts are copied."""
    joined = FusionCache(len(caches[0].layers))
    filled = [cache for cache in caches if cache.mask is not None]
    if not filled:
        return joined
    device = filled[0].mask.device  # type: ignore[union-attr]
    longest = max(cache.fused_length for cache in caches)
    masks = [torch.zeros(1, 0, dtype=torch.bool, device=device) if c.mask is None else c.mask for c in caches]
    zero = torch.zeros(1, dtype=torch.long, device=device)
    joined.mask = torch.cat([pad(mask, (longest - mask.shape[1], 0)) for mask in masks])
    joined.next_position = torch.cat([zero if c.next_position is None else c.next_position for c in caches])
    joined.fused_length = longest
    joined.user_length = max(cache.user_length for cache in caches)
    joined.croppable = min(cache.croppable for cache in caches)
    prompts = [cache.prompt_ids for cache in caches]
    if any(ids is not None for ids in prompts):
        nothing = torch.zeros(1, 0, dtype=torch.long, device=device)
        given = [nothing if ids is None else ids for ids in prompts]
        most = max(ids.shape[1] for ids in given)
        joined.prompt_ids = torch.cat([pad(ids, (0, most - ids.shape[1]), value=-1) for ids in given])
    joined.window = _stack_windows([cache.window for cache in caches], device)
    layers: Any = joined.layers
    for index, layer in enumerate(layers):
        parts: list[Any] = [cache.layers[index] for cache in caches]
        _stack_layer(layer, parts, longest)
    return joined


def unstack(joined: FusionCache, row: int, cache: FusionCache) -> None:
    """Put one row back into the stream's own cache, without padding."""
    if joined.mask is None or joined.next_position is None:
        return
    columns = joined.mask[row].nonzero()[:, 0]
    cache.mask = joined.mask.new_ones(1, len(columns))
    cache.next_position = joined.next_position[row : row + 1].clone()
    cache.fused_length = len(columns)
    cache.user_length = joined.user_length
    cache.croppable = min(joined.croppable, len(columns))
    cache.prompt_ids = None if joined.prompt_ids is None else joined.prompt_ids[row : row + 1].clone()
    images, texts = 0, 0
    cache.window = None
    if joined.window is not None:
        state = joined.window
        images, texts = int(state.image_counts[row]), int(state.text_counts[row])
        if images or texts:
            one = slice(row, row + 1)
            cache.window = WindowState(
                state.image_ordinals[one, :images].clone(),
                state.image_counts[one].clone(),
                state.text_counts[one].clone(),
                state.since_image[one].clone(),
            )
    layers: Any = zip(cache.layers, joined.layers, strict=True)
    for layer, source in layers:
        if source.is_initialized and source.keys is not None and source.keys.numel():
            if not layer.is_initialized:
                layer.lazy_initialization(source.keys, source.values)
            own = columns.to(source.keys.device)
            layer.keys, layer.values = (t[row : row + 1].index_select(2, own) for t in (source.keys, source.values))
        for names, count, at_end in ((_IMAGE, images, False), (_TEXT, texts, True)):
            for name in names:
                tensor = getattr(source, name)
                if tensor is None or cache.window is None:
                    setattr(layer, name, None)
                    continue
                first = tensor.shape[1] - count if at_end else 0
                setattr(layer, name, tensor[row : row + 1, first : first + count].clone())


def _stack_windows(states: Sequence[WindowState | None], device: torch.device) -> WindowState | None:
    if all(state is None for state in states):
        return None
    zero = torch.zeros(1, dtype=torch.long, device=device)
    empty = WindowState(torch.zeros(1, 0, dtype=torch.long, device=device), zero, zero, zero)
    given = [empty if state is None else state for state in states]
    slots = max(state.image_ordinals.shape[1] for state in given)
    return WindowState(
        torch.cat([pad(s.image_ordinals, (0, slots - s.image_ordinals.shape[1]), value=NO_WINDOW) for s in given]),
        torch.cat([s.image_counts for s in given]),
        torch.cat([s.text_counts for s in given]),
        torch.cat([s.since_image for s in given]),
    )


def _stack_layer(layer: FusedLayer, parts: Sequence[FusedLayer], longest: int) -> None:
    keys = [p.keys if p.is_initialized and p.keys is not None and p.keys.numel() else None for p in parts]
    values = [None if k is None else p.values for k, p in zip(keys, parts, strict=True)]
    joined = _stack_padded(keys, longest, dim=2, at_end=True)
    if joined is not None:
        layer.lazy_initialization(joined, joined)
        layer.keys, layer.values = joined, _stack_padded(values, longest, dim=2, at_end=True)
    for names, at_end in ((_IMAGE, False), (_TEXT, True)):
        for name in names:
            tensors = [getattr(part, name) for part in parts]
            most = max((t.shape[1] for t in tensors if t is not None), default=0)
            setattr(layer, name, _stack_padded(tensors, most, dim=1, at_end=at_end))


def _stack_padded(tensors: Sequence[Tensor | None], length: int, dim: int, at_end: bool) -> Tensor | None:
    """Rows of equal shape but for ``dim``; None is an empty row; None where all are."""
    example = next((t for t in tensors if t is not None), None)
    if example is None:
        return None
    shape = list(example.shape)
    shape[0], shape[dim] = len(tensors), length
    joined = example.new_zeros(shape)
    for row, tensor in enumerate(tensors):
        if tensor is not None and tensor.shape[dim]:
            size = tensor.shape[dim]
            joined[row : row + 1].narrow(dim, length - size if at_end else 0, size).copy_(tensor)
    return joined
