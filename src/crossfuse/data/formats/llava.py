"""LLaVA-Instruct-150K, LLaVA-v1.5-mix665k and whatever is written like them.

A JSON array (or JSON lines) of ``{"id", "image", "conversations": [{"from": "human" | "gpt", "value"}]}``. ``image`` is
a path below an image folder, a list of paths, or absent (40,688 of the 665k records are text alone); ``<image>`` marks
its place anywhere in what the human says. Ids are COCO's and not unique. ``video`` stands for ``image`` in video sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crossfuse.data.formats.base import Format, Notes, Reading, row_id
from crossfuse.data.formats.tagged import turns_of, with_slots
from crossfuse.data.records import Record


def _matches(row: Any) -> bool:
    if not isinstance(row, Mapping) or "conversations" not in row:
        return False
    return isinstance(row.get("image"), str | list | None)


def _convert(row: Any, index: int, reading: Reading, notes: Notes) -> Record:
    images = [reading.image(value) for value in as_list(row.get("image"))]
    videos = [{"path": reading.path(value)} for value in as_list(row.get("video"))]
    messages = with_slots(turns_of(row["conversations"]), len(images), len(videos), reading, notes)
    meta = {"source": row["data_source"]} if row.get("data_source") else {}
    return reading.record(id=row_id(row, index), images=images, videos=videos, messages=messages, meta=meta)


def as_list(value: Any) -> list[Any]:
    """A value, several or none, as a list; an empty string is none."""
    if value is None or value == "":
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


FORMAT = Format(
    name="llava",
    title="LLaVA-Instruct-150K, LLaVA-v1.5-mix665k (JSON)",
    source="https://github.com/haotian-liu/LLaVA/blob/main/docs/Finetune_Custom_Data.md",
    matches=_matches,
    convert=_convert,
)
