"""What is wrong with the images and videos of one record."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from crossfuse.data.images import open_header, open_image
from crossfuse.data.lengths import image_size
from crossfuse.data.records import Record
from crossfuse.data.videos import video_header

# Suffixes under which people keep a format of Pillow's.
_SUFFIXES = {"JPEG": (".jpg", ".jpeg"), "TIFF": (".tif", ".tiff"), "MPO": (".jpg", ".jpeg")}


class LookedAt(NamedTuple):
    """(width, height) of the images that could be opened, (kind, reason) of faults, and what is worth knowing."""

    sizes: list[tuple[int, int]]
    faults: list[tuple[str, str]]
    notes: list[str]


def look_at(record: Record, min_side: int, max_ratio: float, decode: bool) -> LookedAt:
    """Open every image (``decode=False``: its header) and the header of every video."""
    found = LookedAt([], [], [])
    for source in record.images:
        name = source if isinstance(source, str) else "an embedded image"
        if isinstance(source, str) and "://" in source:
            found.notes.append("image given as a URL, not opened")
            continue
        try:
            width, height = open_image(source).size if decode else image_size(source)
        except FileNotFoundError as error:
            found.faults.append(("missing file", str(error)))
            continue
        except ValueError as error:
            found.faults.append(("broken image", str(error)))
            continue
        found.sizes.append((width, height))
        shape = f"{name} is {width} x {height} pixels"
        if min(width, height) < min_side:
            found.faults.append(("tiny image", f"{shape}; a side is below {min_side}"))
        if max(width, height) > max_ratio * min(width, height):
            found.faults.append(("extreme image", f"{shape}; one side is more than {max_ratio:g} times the other"))
        if (note := _misnamed(source)) is not None:
            found.notes.append(note)
    for video in record.videos:
        try:
            video_header(video.path)
        except FileNotFoundError as error:
            found.faults.append(("missing file", str(error)))
        except ValueError as error:
            found.faults.append(("broken video", str(error)))
    return found


def _misnamed(source: Any) -> str | None:
    """A file whose suffix names another format than its content; it opens all the same."""
    if not isinstance(source, str):
        return None
    suffix = os.path.splitext(source)[1].lower()
    with open_header(source) as image:
        kind = image.format or ""
    if suffix and suffix not in _SUFFIXES.get(kind, (f".{kind.lower()}",)):
        return f"{kind} named {suffix}"
    return None
