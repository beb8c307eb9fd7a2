"""FineVision: parquet with ``images``, ``texts`` and ratings.

``texts`` is a list of ``{"user", "assistant"}`` pairs about all ``images`` of the row; the images stand before the
first question. Four columns rate every pair from 1 to 5 (``relevance_ratings``, ``image_correspondence_ratings``,
``visual_dependency_ratings``, ``formatting_ratings``; null where a pair was not rated), each with a ``_min`` column.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crossfuse.data.formats.base import Format, Notes, Reading, row_id
from crossfuse.data.formats.tagged import with_slots
from crossfuse.data.records import Record
from crossfuse.fusion import nearest

RATINGS = ("relevance", "image_correspondence", "visual_dependency", "formatting")


def rated_turns(row: Mapping[str, Any], min_ratings: Mapping[str, int]) -> list[int]:
    """Numbers of the pairs of ``texts`` whose ratings reach ``min_ratings``; a pair without a rating does.

    Raises ``ValueError`` for an unknown rating.
    """
    for name in min_ratings:
        if name not in RATINGS:
            raise ValueError(f"unknown rating {name!r}{nearest(name, RATINGS)}; known: {', '.join(RATINGS)}")
    rated = {name: row.get(f"{name}_ratings") or [] for name in min_ratings}
    count = len(row["texts"]) if "texts" in row else max(map(len, rated.values()), default=0)
    return [i for i in range(count) if all(_reaches(rated[name], i, least) for name, least in min_ratings.items())]


def _reaches(ratings: list[int | None], turn: int, least: int) -> bool:
    rating = ratings[turn] if turn < len(ratings) else None
    return rating is None or rating >= least


def _matches(row: Any) -> bool:
    return isinstance(row, Mapping) and "texts" in row and "images" in row


def _convert(row: Any, index: int, reading: Reading, notes: Notes) -> Record:
    images = [reading.image(value) for value in row["images"] or ()]
    kept = rated_turns(row, reading.min_ratings)
    if not kept:
        raise ValueError("no pair of this row reaches min_ratings")
    turns = [(role, row["texts"][i][role]) for i in kept for role in ("user", "assistant")]
    messages = with_slots(turns, len(images), 0, reading, notes, tags_expected=False)
    meta: dict[str, Any] = {"source": row["source"]} if row.get("source") else {}
    meta |= {
        f"{name}_ratings": [row[f"{name}_ratings"][i] for i in kept if i < len(row[f"{name}_ratings"])]
        for name in RATINGS
        if row.get(f"{name}_ratings")
    }
    return reading.record(id=row_id(row, index), images=images, messages=messages, meta=meta)


FORMAT = Format(
    name="finevision",
    title="FineVision (parquet)",
    source="https://huggingface.co/datasets/HuggingFaceM4/FineVision",
    matches=_matches,
    convert=_convert,
)
