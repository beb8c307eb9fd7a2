"""LLaVA-OneVision-1.5-Instruct-Data (and LLaVA-NeXT-Data): parquet with the picture in the row.

Columns ``id``, ``image`` (null in text-only subsets), ``conversations``, ``data_source``. The messages of some subsets
are written as ``from``/``value``, of others as ``role``/``content``, of others again with all four keys, two of them
null. Where a subset writes no ``<image>`` tag, the picture stands before the first question.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from PIL import Image

from crossfuse.data.formats.base import Format, Notes, Reading, row_id
from crossfuse.data.formats.llava import as_list
from crossfuse.data.formats.tagged import turns_of, with_slots
from crossfuse.data.records import Record


def _matches(row: Any) -> bool:
    if not isinstance(row, Mapping) or "conversations" not in row or "image" not in row or "video" in row:
        return False
    image = row["image"]
    return isinstance(image, Mapping | bytes | Image.Image) or (image is None and "data_source" in row)


def _convert(row: Any, index: int, reading: Reading, notes: Notes) -> Record:
    images = [reading.image(value) for value in as_list(row.get("image"))]
    messages = with_slots(turns_of(row["conversations"]), len(images), 0, reading, notes, tags_expected=False)
    meta = {"source": row["data_source"]} if row.get("data_source") else {}
    return reading.record(id=row_id(row, index), images=images, messages=messages, meta=meta)


FORMAT = Format(
    name="llava-onevision",
    title="LLaVA-OneVision-1.5-Instruct-Data, LLaVA-NeXT-Data (parquet)",
    source="https://huggingface.co/datasets/mvp-lab/LLaVA-OneVision-1.5-Instruct-Data",
    matches=_matches,
    convert=_convert,
)
