"""LiveCC and Live-WhisperX: JSON lines of conversations about a span of a video, with the time of every word.

A line is a list of two messages. The user's content is ``{"type": "video", "video", "video_start", "video_end"}`` and
``{"type": "text", "text", "title", "previous", "category"}``; the assistant's is ``{"type": "text_stream",
"text_stream": [[start, end, word], ...]}``. All times are seconds of the source video. The files named
``*_with_seeks.jsonl`` end in a line that lists where each line starts; it is passed over. Other files of the collection
hold typed text, images and videos in the same form.

The annotation names the whole video (``video/youtube/ID.mp4``), but the released files are cut clips
(``ID_59.53-191.14_2.0fps.mp4``). Either is found below the root. Whichever it is, the words of a record count from the
start of its span.
"""

from __future__ import annotations

import functools
import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from crossfuse.data.formats.base import Format, Notes, Reading, RoleError
from crossfuse.data.formats.tagged import ROLES
from crossfuse.data.records import Record
from crossfuse.data.videos import video_header

_CUT = re.compile(r"(?P<id>.+)_(?P<start>\d+(?:\.\d+)?)-(?P<end>\d+(?:\.\d+)?)_[\d.]+fps\.\w+")
_TOLERANCE = 0.02  # file names give two decimals


class TimedWord(NamedTuple):
    """A word and when it is spoken, in seconds from the start of the record's span; start <= end."""

    start: float
    end: float
    word: str


def timed_words(record: Record) -> list[TimedWord]:
    """The words of a record that `read_livecc` made, in order; none for a record without them."""
    words: Any = record.meta.get("words", [])
    return [TimedWord(float(start), float(end), str(word)) for start, end, word in words]


def read_livecc(
    path: str | os.PathLike[str],
    root: str | os.PathLike[str] | None = None,
    *,
    missing: Literal["raise", "skip"] = "raise",
) -> Iterator[Record]:
    """Records of a LiveCC file, one after the other.

    Of each record ``videos[0]`` is the file on disk with the span to show, `timed_words` its words; ``meta`` holds
    ``title``, ``previous``, ``category``, and ``video_start``, ``video_end`` as annotated.

    Args:
        root: folder of the videos; default: the file's own.
        missing: what a video that is not there does: ``FileNotFoundError`` naming both places, or nothing. All missing
            ones are listed by ``crossfuse data check``.
    """
    from crossfuse.data.formats.json_rows import JsonRows

    if missing not in ("raise", "skip"):
        raise ValueError(f"missing must be 'raise' or 'skip'; got {missing!r}")
    reading = Reading(root=Path(path).parent if root is None else Path(root))
    for index, row in enumerate(JsonRows(path)):
        try:
            record = _convert(row, index, reading, [])
        except FileNotFoundError:
            if missing == "raise":
                raise
            continue
        yield record


def _matches(row: Any) -> bool:
    return isinstance(row, list) and bool(row) and isinstance(row[0], Mapping) and "content" in row[0]


def _convert(row: Any, index: int, reading: Reading, notes: Notes) -> Record:
    images: list[Any] = []
    videos: list[dict[str, Any]] = []
    meta: dict[str, Any] = {}
    messages = []
    for number, message in enumerate(row, 1):
        if message["role"] not in ROLES:
            raise RoleError(f"message {number} has the role {message['role']!r}; known roles: {', '.join(ROLES)}")
        content = message["content"]
        parts: list[dict[str, Any]] = []
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if "video" in part:
                videos.append(_span(part, reading, meta, notes))
                parts.append({"type": "video"})
            elif "image" in part:
                images.append(reading.image(part["image"]))
                parts.append({"type": "image"})
            elif "text_stream" in part:
                meta["words"] = _ordered(part["text_stream"], meta, notes)
                parts.append({"type": "text", "text": " ".join(word for _, _, word in meta["words"])})
            else:
                meta |= {key: part[key] for key in ("title", "previous", "category") if part.get(key)}
                parts.append({"type": "text", "text": part["text"]})
        messages.append({"role": ROLES[message["role"]], "content": parts})
    meta.pop("_clip", None)
    name = Path(videos[0]["path"]).stem if videos else "row"
    return reading.record(id=f"{name}-{index}", images=images, videos=videos, messages=messages, meta=meta)


def _span(part: Mapping[str, Any], reading: Reading, meta: dict[str, Any], notes: Notes) -> dict[str, Any]:
    """The file on disk and the span of it that is meant, clipped to the file's length."""
    start, end = part.get("video_start"), part.get("video_end")
    start = float(start) if start else 0.0
    end = float(end) if end is not None else None
    whole = reading.path(part["video"])
    if os.path.exists(whole):
        file, first, last = whole, start, end
    else:
        cut = _cut_file(reading.root, part["video"], start, end)
        if cut is None:
            form = f"{Path(part['video']).stem}_{start:.2f}-{math.nan if end is None else end:.2f}_*fps.mp4"
            raise FileNotFoundError(f"video file not found: neither {whole} nor {form} below {reading.root}")
        file, first, last = cut, 0.0, None if end is None else end - start
    meta |= {"video_start": start, "video_end": end}
    length = video_header(file)[0]
    if length is not None and last is not None and last > length + 0.05:
        notes.append("span ends after the video, clipped")
        warnings.warn(
            f"{file} is {length:.2f} s long but its span ends at {last:.2f} s; clipped to the file", stacklevel=2
        )
        last = length
    if length is not None and first >= length:
        raise ValueError(f"{file} is {length:.2f} s long but its span starts at {first:.2f} s")
    meta["_clip"] = None if last is None else last - first
    return {"path": file, "start": first or None, "end": last}


def _ordered(stream: Any, meta: dict[str, Any], notes: Notes) -> list[list[Any]]:
    """``[start, end, word]`` from the start of the span, never decreasing, within it; gaps in the times filled.

    A word without a time takes the time of the word before it; the order is the order of speech and is kept.
    """
    offset, length = meta.get("video_start", 0.0), meta.get("_clip")
    words: list[list[Any]] = []
    latest, late = 0.0, 0
    for entry in stream:
        start, end, word = (entry["start"], entry["end"], entry["word"]) if isinstance(entry, Mapping) else entry
        word = str(word).strip()
        if not word:
            continue
        begin = latest if start is None else max(float(start) - offset, latest)
        finish = begin if end is None else max(float(end) - offset, begin)
        if length is not None and begin > length:
            late += 1
            begin = finish = length
        if length is not None:
            finish = min(finish, length)
        words.append([round(begin, 3), round(finish, 3), word])
        latest = begin
    if late:
        notes.append("words after the end of the span, moved to it")
    return words


def _cut_file(root: Path, video: str, start: float, end: float | None) -> str | None:
    spans = _cut_files(str(root)).get(Path(video).stem, ())
    for begin, finish, path in spans:
        if abs(begin - start) <= _TOLERANCE and (end is None or abs(finish - end) <= _TOLERANCE):
            return path
    return None


@functools.lru_cache(maxsize=8)
def _cut_files(root: str) -> dict[str, list[tuple[float, float, str]]]:
    """Cut clips below ``root`` by the id of their video; the folder is walked once."""
    found: dict[str, list[tuple[float, float, str]]] = {}
    for folder, _, names in os.walk(root):
        for name in names:
            if match := _CUT.fullmatch(name):
                span = (float(match["start"]), float(match["end"]), os.path.join(folder, name))
                found.setdefault(match["id"], []).append(span)
    return found


FORMAT = Format(
    name="livecc",
    title="LiveCC, Live-WhisperX-526K (JSON lines)",
    source="https://github.com/showlab/livecc/blob/main/data/lmm_dataset.py",
    matches=_matches,
    convert=_convert,
)
