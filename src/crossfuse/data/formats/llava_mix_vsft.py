"""llava-instruct-mix-vsft and its mini form: parquet with typed message parts.

Columns ``messages``: ``[{"role", "content": [{"index", "text", "type": "text" | "image"}]}]`` and ``images``. ``index``
tells which of ``images`` a part of type "image" is; it is null for text, and other sets of this shape leave it out, in
which case the parts take the images in order.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from crossfuse.data.formats.base import Format, Notes, Reading, RoleError, TagError, row_id
from crossfuse.data.formats.tagged import ROLES
from crossfuse.data.records import Record


def _matches(row: Any) -> bool:
    return isinstance(row, Mapping) and "messages" in row and "images" in row and "id" not in row


def _convert(row: Any, index: int, reading: Reading, notes: Notes) -> Record:
    pictures = [reading.image(value) for value in row["images"] or ()]
    images: list[Any] = []
    used: list[int] = []
    messages: list[dict[str, Any]] = []
    for number, message in enumerate(row["messages"], 1):
        if message["role"] not in ROLES:
            raise RoleError(f"message {number} has the role {message['role']!r}; known roles: {', '.join(ROLES)}")
        content = message["content"]
        parts: list[dict[str, Any]] = []
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if part["type"] == "image":
                place = part.get("index")
                place = len(used) if place is None else int(place)
                if place >= len(pictures):
                    raise TagError(f"message {number} asks for image {place} but there are {len(pictures)} image(s)")
                used.append(place)
                images.append(pictures[place])
                parts.append({"type": "image"})
            else:
                parts.append({"type": "text", "text": part["text"]})
        messages.append({"role": ROLES[message["role"]], "content": _trimmed(parts)})
    unused = [picture for place, picture in enumerate(pictures) if place not in used]
    if unused:
        first = next((message for message in messages if message["role"] == "user"), None)
        if reading.missing_tag == "raise" or used or first is None:
            raise TagError(f"{len(used)} image part(s) but {len(pictures)} image(s)")
        images = unused
        first["content"] = [{"type": "image"}] * len(unused) + first["content"]
        notes.append("image without an image part, placed first")
    return reading.record(id=row_id(row, index), images=images, messages=messages)


def _trimmed(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The line break that the original wrote between text and image tag goes with the tag."""
    for one, other in itertools.pairwise(parts):
        if one["type"] == "text" and other["type"] == "image":
            one["text"] = one["text"].rstrip("\n")
        elif one["type"] == "image" and other["type"] == "text":
            other["text"] = other["text"].lstrip("\n")
    return [part for part in parts if part["type"] == "image" or part["text"]]


FORMAT = Format(
    name="llava-mix-vsft",
    title="llava-instruct-mix-vsft and -mini (parquet)",
    source="https://huggingface.co/datasets/HuggingFaceH4/llava-instruct-mix-vsft",
    matches=_matches,
    convert=_convert,
)
