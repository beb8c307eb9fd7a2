"""Records that are made when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from crossfuse.data.records import Record


class LazyRecords(Sequence[Record]):
    """`count` records, each made by `make(index)` when it is asked for."""

    def __init__(self, count: int, make: Callable[[int], Record]) -> None:
        self._count = count
        self._make = make

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index):  # type: ignore[no-untyped-def, override]
        if isinstance(index, slice):
            return [self._make(i) for i in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(f"index must be 0 to {self._count - 1}; got {index}")
        return self._make(index % self._count)
