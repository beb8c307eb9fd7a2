"""Records as a stream, for sets larger than memory or disk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from torch.utils.data import IterableDataset

from crossfuse.data.formats.base import Format, Reading
from crossfuse.data.formats.dataset import RecordDataset, Rejected, missing_file
from crossfuse.data.records import Record


class StreamedRecords(IterableDataset):  # type: ignore[type-arg]
    """Records of a stream of rows, one after the other; workers of a loader share its shards.

    rows: a ``datasets.IterableDataset`` of ``{"row", "number"}``.
    on_error: a row that is no record, or whose file is missing, raises ``ValueError``, or is passed over and listed in
    `rejected` (in this process).
    """

    def __init__(
        self,
        rows: Any,
        format: Format,
        reading: Reading,
        source: str,
        on_error: Literal["raise", "skip"] = "raise",
    ) -> None:
        self.rows, self.format, self.reading, self.source, self.on_error = rows, format, reading, source, on_error
        self.rejected: list[Rejected] = []

    @classmethod
    def of(cls, records: RecordDataset) -> StreamedRecords:
        """A stream of a map-style data set's rows."""
        from datasets import IterableDataset as Rows

        rows = Rows.from_generator(_numbered, gen_kwargs={"records": records})
        return cls(rows, records.format, records.reading, records.source)

    def __iter__(self) -> Iterator[Record]:
        for item in self.rows:
            number = int(item["number"])
            try:
                record = self.format.read(item["row"], number, self.reading, [])
                absent = missing_file(record) if self.on_error == "skip" else None
                if absent is not None:
                    raise ValueError(f"file not found: {absent}")
            except ValueError as error:
                if self.on_error == "raise":
                    raise ValueError(f"{self.source}: {error}") from error
                self.rejected.append(Rejected(number, str(error)))
                continue
            yield record

    def shuffle(self, seed: int, buffer: int = 1000) -> StreamedRecords:
        """Shuffled by shards, then within a window of ``buffer`` rows; `set_epoch` draws anew."""
        return self._with(self.rows.shuffle(seed=seed, buffer_size=buffer))

    def take(self, count: int) -> StreamedRecords:
        """The first ``count`` rows."""
        return self._with(self.rows.take(count))

    def skip(self, count: int) -> StreamedRecords:
        """All rows but the first ``count``."""
        return self._with(self.rows.skip(count))

    def set_epoch(self, epoch: int) -> None:
        """Called by trainers before each epoch."""
        self.rows.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is, for `load_state_dict` of a fresh one."""
        state: dict[str, Any] = self.rows.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.rows.load_state_dict(state)

    def _with(self, rows: Any) -> StreamedRecords:
        return StreamedRecords(rows, self.format, self.reading, self.source, self.on_error)


def _numbered(records: RecordDataset) -> Iterator[dict[str, Any]]:
    for index in range(len(records)):
        number = records.row_number(index)
        yield {"row": records.rows[number], "number": number}
