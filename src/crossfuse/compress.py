"""Token compression: fewer image tokens per image, before any fusion sees them (``compress=`` of every fusion)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.functional import avg_pool2d


@dataclasses.dataclass(frozen=True)
class Compression:
    """One image's tokens in, fewer out."""

    name: ClassVar[str]

    @property
    def is_identity(self) -> bool:
        return False

    def __call__(self, features: Tensor, grid: tuple[int, int] | None) -> Tensor:
        """(N, d) tokens of one image on a ``grid`` of (rows, columns) -> (M, d) with M <= N."""
        raise NotImplementedError

    def grid(self, grid: tuple[int, int]) -> tuple[int, int]:
        """The grid after compression."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True)
class MeanPool(Compression):
    """Mean of every square of ``k`` neighbouring patches: k = 4 pools 2 × 2, k = 16 pools 4 × 4.

    ``k`` is a square number and its root divides both sides of the patch grid; ValueError otherwise.
    """

    name: ClassVar[str] = "mean-pool"
    k: int = 4

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1 or math.isqrt(self.k) ** 2 != self.k:
            raise ValueError(f"MeanPool k must be a square number (1, 4, 9, 16, ...); got {self.k!r}")

    @property
    def is_identity(self) -> bool:
        return self.k == 1

    def grid(self, grid: tuple[int, int]) -> tuple[int, int]:
        side = math.isqrt(self.k)
        rows, columns = grid
        if rows % side or columns % side:
            raise ValueError(
                f"MeanPool({self.k}) needs a patch grid divisible by {side}; got {rows} x {columns}: "
                "choose another k or another image size"
            )
        return rows // side, columns // side

    def __call__(self, features: Tensor, grid: tuple[int, int] | None) -> Tensor:
        if self.is_identity:
            return features
        if grid is None or grid[0] * grid[1] != len(features):
            raise ValueError(
                f"MeanPool({self.k}) needs a full patch grid; got {len(features)} image tokens "
                f"for a grid of {grid}: prefill an image in one piece, without its class token"
            )
        self.grid(grid)
        planes = features.unflatten(0, grid).permute(2, 0, 1)
        return avg_pool2d(planes, math.isqrt(self.k)).flatten(1).T


def make_compression(name: str, **fields: Any) -> Compression:
    """Build a compression by its name, as stored in ``fusion.json``."""
    if name != MeanPool.name:
        raise ValueError(f"unknown compression {name!r}; known: {MeanPool.name}")
    return MeanPool(**fields)
