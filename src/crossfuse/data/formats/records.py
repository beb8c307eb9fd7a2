"""crossfuse's own JSON lines, as `write_records` writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crossfuse.data.formats.base import Format, Notes, Reading
from crossfuse.data.records import Record, rooted


def _matches(row: Any) -> bool:
    return isinstance(row, Mapping) and "id" in row and "messages" in row


def _convert(row: Any, index: int, reading: Reading, notes: Notes) -> Record:
    return rooted(reading.record(**row), reading.root)


FORMAT = Format(
    name="records",
    title="crossfuse's records (JSON lines)",
    source="crossfuse.data.records",
    matches=_matches,
    convert=_convert,
)
