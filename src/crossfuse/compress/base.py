"""What a compression is: a frozen dataclass that turns one image's tokens into fewer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

if TYPE_CHECKING:
    from torch import nn

    from crossfuse.backbones.base import Backbone

Grid = tuple[int, int]  # (rows, columns)


@dataclasses.dataclass(frozen=True)
class Compression:
    """One image's tokens in, fewer out. The frames of a video are compressed one by one."""

    name: ClassVar[str]
    keeps_grid: ClassVar[bool]  # are the new tokens the cells of a smaller grid?

    @property
    def is_identity(self) -> bool:
        return False

    def attach(self, backbone: Backbone, model: nn.Module) -> None:
        """Add new weights, where there are any."""

    def detach(self, backbone: Backbone, model: nn.Module) -> None:
        """Undo `attach`, exactly."""

    def weights(self, body: Any) -> Any:
        """The module that `attach` has added, or None."""
        return None

    def grid(self, grid: Grid | None) -> Grid | None:
        """The grid after compression; None where the new tokens lie on none. ValueError where ``grid`` does not fit."""
        raise NotImplementedError

    def tokens(self, count: int, grid: Grid | None) -> int:
        """How many tokens are left of ``count`` on a ``grid``. ValueError where they do not fit."""
        raise NotImplementedError

    def pool(self, images: Sequence[Tensor], grids: Sequence[Grid | None], weights: Any) -> list[Tensor]:
        """One (N, d) tensor an image (a frame) -> one (M, d) each. ``weights`` as `weights` gives them."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, **dataclasses.asdict(self)}
