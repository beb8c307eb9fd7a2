"""Records of a source: by number, or as a stream."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from crossfuse.data.formats.base import Format, Reading
from crossfuse.data.records import Record

if TYPE_CHECKING:
    from crossfuse.data.formats.streamed import StreamedRecords


@dataclass(frozen=True)
class Rejected:
    """A row that became no record, and why, in one line."""

    index: int
    reason: str


class RecordDataset(Sequence[Record]):
    """Records made from rows when they are asked for; a map-style data set for torch's loaders.

    Nothing of an image is read here: records hold paths, or the encoded bytes of the row. Raises ``ValueError`` naming
    source and row where a row is no record.

    rejected: rows that opening with ``on_error="skip"`` left out.
    """

    def __init__(self, rows: Sequence[Any], format: Format, reading: Reading, source: str) -> None:
        self.rows, self.format, self.reading, self.source = rows, format, reading, source
        self.rejected: tuple[Rejected, ...] = ()
        self._chosen: np.ndarray | None = None
        self._noted: dict[str, set[int]] = {}

    def __len__(self) -> int:
        return len(self.rows) if self._chosen is None else len(self._chosen)

    def __getitem__(self, index):  # type: ignore[no-untyped-def, override]
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        return self.read(self.row_number(index))

    def row_number(self, index: int) -> int:
        """The number in the source of record ``index`` of this data set."""
        return int(index) % len(self) if self._chosen is None else int(self._chosen[index])

    def read(self, number: int) -> Record:
        """The record of row ``number`` of the source, whether it is chosen or not."""
        notes: list[str] = []
        try:
            record = self.format.read(self.rows[number], number, self.reading, notes)
        except ValueError as error:
            raise ValueError(f"{self.source}: {error}") from error
        for note in notes:
            self._noted.setdefault(note, set()).add(number)
        return record

    @property
    def notes(self) -> Counter[str]:
        """What was worth counting in the records read so far in this process, and in how many of them."""
        return Counter({note: len(rows) for note, rows in self._noted.items()})

    def select(self, indices: Iterable[int]) -> RecordDataset:
        """A part of this data set, in the order of ``indices``."""
        part = RecordDataset(self.rows, self.format, self.reading, self.source)
        part.rejected, part._noted = self.rejected, self._noted
        wanted = np.fromiter(indices, np.int64)
        if len(wanted) and not (-len(self) <= wanted.min() and wanted.max() < len(self)):
            raise IndexError(f"indices {wanted.min()} to {wanted.max()} of {len(self)} records")
        part._chosen = wanted % max(len(self), 1) if self._chosen is None else self._chosen[wanted]
        return part

    def usable(self) -> RecordDataset:
        """The part whose rows are records and whose files exist; what is left out is listed in `rejected`.

        Every row is read once; no image is decoded.
        """
        kept, rejected = [], []
        for index in range(len(self)):
            try:
                absent = missing_file(self[index])
            except ValueError as error:
                rejected.append(Rejected(self.row_number(index), str(error)))
                continue
            if absent is None:
                kept.append(index)
            else:
                rejected.append(Rejected(self.row_number(index), f"file not found: {absent}"))
        part = self.select(kept)
        part.rejected = tuple(rejected)
        return part

    def stream(self) -> StreamedRecords:
        """The same records as a stream."""
        from crossfuse.data.formats.streamed import StreamedRecords

        return StreamedRecords.of(self)

    def __repr__(self) -> str:
        return f"RecordDataset({len(self)} records of {self.source}, {self.format.name})"


def missing_file(record: Record) -> str | None:
    """The first path of a record that does not exist."""
    paths: Iterator[str] = (image for image in record.images if isinstance(image, str))
    for path in (*paths, *(video.path for video in record.videos)):
        if "://" not in path and not os.path.exists(path):
            return path
    return None
