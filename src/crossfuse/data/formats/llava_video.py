"""LLaVA-Video-178K: JSON arrays beside folders of unpacked videos.

``{"id", "conversations": [{"from", "value"}], "data_source", "video"}``; the first question opens with ``<image>``,
which stands for the video (re-written copies say ``<video>``). ``video`` is relative to the folder of its
``data_source``, into which the archives unpack, or to a folder where several sources lie together. A video may be a
folder of frames.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from crossfuse.data.formats.base import Format, Notes, Reading, row_id
from crossfuse.data.formats.llava import as_list
from crossfuse.data.formats.tagged import turns_of, with_slots
from crossfuse.data.records import Record


def _matches(row: Any) -> bool:
    return isinstance(row, Mapping) and "conversations" in row and isinstance(row.get("video"), str | list)


def _convert(row: Any, index: int, reading: Reading, notes: Notes) -> Record:
    source = str(row.get("data_source") or "")
    videos = [{"path": _located(str(value), source, reading)} for value in as_list(row["video"])]
    messages = with_slots(turns_of(row["conversations"]), 0, len(videos), reading, notes, image_tag_is="video")
    meta = {"source": source} if source else {}
    return reading.record(id=row_id(row, index), videos=videos, messages=messages, meta=meta)


def _located(video: str, source: str, reading: Reading) -> str:
    """The first place where the video lies; the plain one where it lies nowhere (opening it then names that path)."""
    if "://" in video or (os.path.isabs(video) and os.path.exists(video)):
        return video
    video = video.lstrip("/")
    plain = reading.path(video)
    if os.path.exists(plain):
        return plain
    for folder in (source, os.path.join(source, "data"), "videos", os.path.join("..", source)):
        candidate = reading.path(os.path.join(folder, video))
        if os.path.exists(candidate):
            return candidate
    return plain


FORMAT = Format(
    name="llava-video",
    title="LLaVA-Video-178K (JSON)",
    source="https://huggingface.co/datasets/lmms-lab/LLaVA-Video-178K",
    matches=_matches,
    convert=_convert,
)
