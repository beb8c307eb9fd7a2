"""`MeanPool`: neighbouring patches become one token."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.functional import avg_pool2d

from crossfuse.compress.base import Compression, Grid


@dataclasses.dataclass(frozen=True)
class MeanPool(Compression):
    """Mean of every square of ``k`` neighbouring patches: k = 4 pools 2 × 2, k = 16 pools 4 × 4; 1 changes nothing.

    ``k`` is a square number and its root divides both sides of the patch grid; ValueError otherwise. Under m-RoPE the
    grid is that of the merged tokens, and an image stands where one of the smaller grid would stand.
    """

    name: ClassVar[str] = "mean-pool"
    keeps_grid: ClassVar[bool] = True
    k: int = 4

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1 or math.isqrt(self.k) ** 2 != self.k:
            raise ValueError(f"MeanPool k must be a square number (1, 4, 9, 16, ...); got {self.k!r}")

    @property
    def is_identity(self) -> bool:
        return self.k == 1

    def grid(self, grid: Grid | None) -> Grid | None:
        if grid is None:
            return None
        side = math.isqrt(self.k)
        rows, columns = grid
        if rows % side or columns % side:
            raise ValueError(
                f"MeanPool({self.k}) needs a patch grid divisible by {side}; got {rows} x {columns}: "
                "choose another k or another image size"
            )
        return rows // side, columns // side

    def tokens(self, count: int, grid: Grid | None) -> int:
        if self.is_identity:
            return count
        if grid is None or grid[0] * grid[1] != count:
            raise ValueError(
                f"MeanPool({self.k}) needs a full patch grid; got {count} image tokens for a grid of {grid}: "
                "prefill an image in one piece, without its class token, or use QFormer"
            )
        self.grid(grid)
        return count // self.k

    def pool(self, images: Sequence[Tensor], grids: Sequence[Grid | None], weights: Any) -> list[Tensor]:
        return [self(tokens, grid) for tokens, grid in zip(images, grids, strict=True)]

    def __call__(self, features: Tensor, grid: Grid | None) -> Tensor:
        """(N, d) tokens of one image on a ``grid`` of (rows, columns) -> (N / k, d)."""
        if self.is_identity:
            return features
        self.tokens(len(features), grid)
        assert grid is not None
        planes = features.unflatten(0, grid).permute(2, 0, 1)
        return avg_pool2d(planes, math.isqrt(self.k)).flatten(1).T
