"""Compression of the images of one call: their tokens, and the places and positions of what is left.

Shapes: B rows, L tokens as the user wrote them, N image tokens of the call before compression.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from crossfuse.compress.base import Compression, Grid


@dataclasses.dataclass(eq=False)
class CompressedImages:
    """What is left of the images of one call."""

    features: list[Tensor]  # one (M, d) tensor an image
    grids: list[Grid | None]
    frames: list[int]  # of each image: 1, or those of a video
    kept: Tensor  # (N,) bool: the last placeholders of every image, so that what follows it follows its tokens
    position_ids: Tensor | None  # (3, B, L), or as given where they are no triples


def compress_images(
    compress: Compression,
    weights: Any,
    features: Sequence[Tensor],
    grids: Sequence[Grid | None],
    is_image: Tensor,
    position_ids: Tensor | None,
    segments: Tensor | None,
) -> CompressedImages:
    """Compress every image, and every frame of a video by itself.

    features: one (n, d) tensor an image, in reading order of ``is_image`` (B, L) bool. ``position_ids`` (3, B, L) of
    m-RoPE tell the grids and are moved: an image of h × w tokens that becomes h' × w' stands as an image of that size
    would, tokens without a grid stand one after the other on all three axes, and what follows moves up.
    """
    triples = position_ids is not None and position_ids.ndim == 3
    shapes = [None if grid is None else (1, *grid) for grid in grids]
    if triples:
        assert position_ids is not None
        shapes = list(_shapes(position_ids[:, is_image], [len(tokens) for tokens in features]))
    frames = [1 if shape is None else shape[0] for shape in shapes]
    pictures, sizes = [], []
    for tokens, count, shape in zip(features, frames, shapes, strict=True):
        pictures += list(tokens.chunk(count)) if count > 1 else [tokens]
        sizes += [None if shape is None else shape[1:]] * count
    pooled = iter(compress.pool(pictures, sizes, weights))
    left = [torch.cat([next(pooled) for _ in range(count)]) if count > 1 else next(pooled) for count in frames]
    smaller = [None if shape is None else compress.grid(shape[1:]) for shape in shapes]
    lengths = [(len(old), len(new)) for old, new in zip(features, left, strict=True)]
    kept = torch.cat([torch.arange(old, device=is_image.device) >= old - new for old, new in lengths])
    if triples:
        assert position_ids is not None
        position_ids = _moved(position_ids, is_image, segments, lengths, frames, smaller)
    new_grids = [
        None if grid is None else (count * grid[0], grid[1]) for count, grid in zip(frames, smaller, strict=True)
    ]
    return CompressedImages(left, new_grids, frames, kept, position_ids)


def _shapes(positions: Tensor, lengths: list[int]) -> list[tuple[int, int, int]]:
    """(3, N) positions of image tokens -> (frames, rows, columns) of each image."""
    shapes = []
    for own in positions.split(lengths, dim=1):
        rows, columns = (own[1:].amax(1) - own[1:, 0] + 1).tolist()
        shapes.append((own.shape[1] // (rows * columns), rows, columns))
    return shapes


def _moved(
    positions: Tensor,
    is_image: Tensor,
    segments: Tensor | None,
    lengths: list[tuple[int, int]],
    frames: list[int],
    grids: list[Grid | None],
) -> Tensor:
    moved = positions.clone()
    row, column = (index.tolist() for index in is_image.nonzero(as_tuple=True))
    end = 0
    for (old, new), count, grid in zip(lengths, frames, grids, strict=True):
        b, first, last = row[end], column[end], column[end + old - 1]
        end += old
        own = moved[:, b, first : last + 1]
        local = own - own[:, :1]
        if grid is None:
            smaller = torch.arange(new, device=moved.device).expand(3, -1)
        else:
            times = local[0].view(count, -1)[:, 0]
            cells = [torch.arange(size, device=moved.device) for size in grid]
            smaller = torch.stack(torch.meshgrid(times, *cells, indexing="ij")).flatten(1)
        change = int(smaller.max()) - int(local.max())
        moved[:, b, last + 1 - new : last + 1] = own[:, :1] + smaller
        following = torch.arange(moved.shape[-1], device=moved.device) > last
        if segments is not None:
            following &= segments[b] == segments[b, last]
        moved[:, b, following] += change
    return moved
