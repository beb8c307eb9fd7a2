"""Positions of Circle-RoPE: image tokens on a circle around the line on which text positions lie.

A text position is a triple (p, p, p): a point on the line through the origin along n = (1, 1, 1) / √3. In the plane
orthogonal to n, with the basis u, v below, the tokens of an image stand at

    c · (1, 1, 1) + R · (cos θ · u + sin θ · v)

so the distance to (p, p, p) is √(3 (p - c)² + R²) for each of them: the circular image token index projection of
Circle-RoPE (arXiv 2505.16416).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_U = (0.0, 1 / math.sqrt(2), -1 / math.sqrt(2))  # components on (time, height, width)
_V = (2 / math.sqrt(6), -1 / math.sqrt(6), -1 / math.sqrt(6))


def circle_positions(grid: Tensor, item: Tensor, alpha: float, radius: float | None) -> Tensor:
    """Grid positions of image tokens -> positions on circles.

    Args:
        grid: (3, N) time, height and width of N tokens, as the unfused model places them.
        item: (N,) long: the image or video of each token, 0 to K - 1.
        alpha: weight of the spatial angle; the rest is that of the grid-index angle.
        radius: R, in positions; None takes half the longer side of each image.

    Returns:
        (3, N) float64. Each frame of a video has a circle of its own. The centre c is where the frame's own middle
        projects onto the line, so order and distance in the stream stay what they were.
    """
    grid = grid.double()
    time, height, width = grid
    top, bottom, left, right = (
        _per_item(item, axis, reduce)[item] for axis, reduce in zip((height, height, width, width), _ENDS, strict=True)
    )
    middle_row, middle_column = (top + bottom) / 2, (left + right) / 2
    angle = torch.atan2(height - middle_row, width - middle_column)
    low, high = _per_item(item, angle, "amin")[item], _per_item(item, angle, "amax")[item]
    spatial = torch.where(high > low, (angle - low) / (high - low).clamp(min=1e-12) * 2 * math.pi, angle)
    columns = right - left + 1
    index = (height - top) * columns + (width - left)
    counted = index / ((bottom - top + 1) * columns) * 2 * math.pi
    theta = alpha * spatial + (1 - alpha) * counted
    reach = torch.full_like(theta, radius) if radius is not None else torch.maximum(bottom - top, right - left) / 2
    centre = (time + middle_row + middle_column) / 3
    u, v = (torch.tensor(axis, dtype=grid.dtype, device=grid.device)[:, None] for axis in (_U, _V))
    return centre + reach * (theta.cos() * u + theta.sin() * v)


_ENDS = ("amin", "amax", "amin", "amax")


def _per_item(item: Tensor, values: Tensor, reduce: str) -> Tensor:
    """(K,) smallest or largest value of each item."""
    count = int(item.max()) + 1 if item.numel() else 0
    empty = values.new_zeros(count)
    return empty.scatter_reduce(0, item, values, reduce=reduce, include_self=False)
