"""Conversations whose texts mark images by ``<image>`` and videos by ``<video>``: tags become slots."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from crossfuse.data.formats.base import Notes, Reading, RoleError, TagError

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}
IMAGE_TAG, VIDEO_TAG = "<image>", "<video>"
Kind = Literal["image", "video"]
Turn = tuple[str, str]


def turns_of(messages: Iterable[Mapping[str, Any]]) -> list[Turn]:
    """(role, text) of messages written as ``from``/``value`` or as ``role``/``content``, the other pair null or absent.

    Raises ``ValueError`` for an unknown role and for a message without text.
    """
    turns = []
    for number, message in enumerate(messages, 1):
        role, text = message.get("role"), message.get("content")
        if role is None or text is None:
            role, text = message.get("from"), message.get("value")
        if role not in ROLES:
            raise RoleError(f"message {number} has the role {role!r}; known roles: {', '.join(ROLES)}")
        if not isinstance(text, str):
            raise ValueError(f"message {number} has no text ({type(text).__name__})")
        turns.append((ROLES[role], text))
    if not turns:
        raise ValueError("the conversation is empty")
    return turns


def with_slots(
    turns: Sequence[Turn],
    images: int,
    videos: int,
    reading: Reading,
    notes: Notes,
    image_tag_is: Kind = "image",
    tags_expected: bool = True,
) -> list[dict[str, Any]]:
    """Messages with a slot in place of every tag of the user; an answer before the first question is left out.

    An image or video without any tag goes first (or is an error, by ``reading.missing_tag``); any other difference
    between the number of tags and of images is an error, since it cannot be told which tag means which image.
    ``<video>`` is a tag only where the record has a video. A line break between a tag and the text that it opens or
    closes goes with the tag. ``tags_expected=False``: the format writes no tags, so that nothing is counted.
    """
    start = 1 if turns and turns[0][0] == "system" else 0
    if len(turns) > start + 1 and turns[start][0] == "assistant":
        # ShareGPT's conversations are cut from longer ones; LLaVA's own reader leaves such an answer out, too.
        notes.append("answer before any question, left out")
        turns = [*turns[:start], *turns[start + 1 :]]
    kinds: dict[str, Kind] = {IMAGE_TAG: image_tag_is}
    if videos:
        kinds[VIDEO_TAG] = "video"
    held = {"image": images, "video": videos}
    messages: list[dict[str, Any]] = []
    found = {"image": 0, "video": 0}
    for role, text in turns:
        parts = _split(text, kinds) if role == "user" else [{"type": "text", "text": text}]
        for part in parts:
            if part["type"] != "text":
                found[part["type"]] += 1
        messages.append({"role": role, "content": parts})
    missing: list[dict[str, Any]] = []
    for kind, tag in (("image", IMAGE_TAG), ("video", VIDEO_TAG if image_tag_is == "image" else IMAGE_TAG)):
        if found[kind] == held[kind]:
            continue
        if found[kind] == 0 and reading.missing_tag == "first":
            missing += [{"type": kind}] * held[kind]
            if tags_expected:
                notes.append(f"{kind} without a {tag} tag, placed first")
            continue
        raise TagError(f"{found[kind]} {tag} tag(s) but {held[kind]} {kind}(s)")
    if missing:
        first = next((message for message in messages if message["role"] == "user"), None)
        if first is None:
            raise ValueError("no message of the user could take the image")
        first["content"] = missing + first["content"]
    return messages


def _split(text: str, kinds: Mapping[str, Kind]) -> list[dict[str, Any]]:
    if not any(tag in text for tag in kinds):
        return [{"type": "text", "text": text}]
    pieces = re.split("(" + "|".join(map(re.escape, kinds)) + ")", text)
    words = [i for i, piece in enumerate(pieces) if piece not in kinds and piece.strip()]
    first, last = (words[0], words[-1]) if words else (len(pieces), -1)
    # Blanks that only tags precede or follow say nothing.
    parts: list[dict[str, Any]] = []
    for i, piece in enumerate(pieces):
        if piece in kinds:
            parts.append({"type": kinds[piece]})
        elif first <= i <= last and piece:
            piece = piece.lstrip("\n") if i == first > 0 else piece
            piece = piece.rstrip("\n") if i == last < len(pieces) - 1 else piece
            parts.append({"type": "text", "text": piece})
    return parts
