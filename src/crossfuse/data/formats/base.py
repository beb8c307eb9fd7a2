"""What a format adapter is: it knows its rows by their look and turns one row into one `Record`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableSequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from crossfuse.data.records import Record, first_reason


class TagError(ValueError):
    """Tags of a text and images (or videos) of its row do not match."""


class RoleError(ValueError):
    """A message without a role that is known."""


@dataclass(frozen=True)
class Reading:
    """How rows are read.

    root: folder that relative paths of images and videos are taken from.
    allow_urls: accept images and videos given as URLs.
    missing_tag: an image without a tag in the text stands first in the conversation and is counted, or is an error.
    min_ratings: FineVision only: turns whose rating is lower are left out, such as ``{"relevance": 3}``.
    """

    root: Path = Path()
    allow_urls: bool = False
    missing_tag: Literal["first", "raise"] = "first"
    min_ratings: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.missing_tag not in ("first", "raise"):
            raise ValueError(f"missing_tag must be 'first' or 'raise'; got {self.missing_tag!r}")

    def path(self, value: str) -> str:
        """A path as it can be opened: relative ones from the root; URLs and absolute ones as they are."""
        return value if "://" in value else os.path.join(self.root, value)

    def image(self, value: Any) -> str | bytes | Image.Image:
        """An image of a row: a path, ``{"bytes", "path"}`` as Arrow stores it, bytes or a PIL image."""
        if isinstance(value, Mapping):
            value = value["bytes"] if value.get("bytes") is not None else value.get("path")
        if isinstance(value, str):
            return self.path(value)
        if isinstance(value, bytes | Image.Image):
            return value
        raise ValueError(f"an image must be a path, bytes or a picture; got {type(value).__name__}")

    def record(self, **fields: Any) -> Record:
        """A validated record; URLs pass where they are allowed."""
        return Record.model_validate(fields, context={"allow_urls": self.allow_urls})


Notes = MutableSequence[str]
Convert = Callable[[Any, int, Reading, Notes], Record]


@dataclass(frozen=True)
class Format:
    """One file format.

    matches: whether a row looks like this format. convert: the record of a row; it gets the row, its number, the
    `Reading` and a list that takes what is worth counting, and raises ``ValueError`` or ``OSError`` in one line.
    source: where the format is described.
    """

    name: str
    title: str
    source: str
    matches: Callable[[Any], bool]
    convert: Convert

    def read(self, row: Any, index: int, reading: Reading, notes: Notes) -> Record:
        """`convert`, with every fault as a ``ValueError`` that names the row."""
        try:
            return self.convert(row, index, reading, notes)
        except (ValueError, OSError, KeyError, TypeError, AttributeError, IndexError) as error:
            name = row.get("id") if isinstance(row, Mapping) else None
            who = f"row {index}" if name is None else f"row {index} ({name})"
            raise ValueError(f"{who}: {_reason(error, self.name)}") from error


def _reason(error: Exception, name: str) -> str:
    if isinstance(error, ValueError | OSError):
        return first_reason(error)
    # A missing key or a value of another type: the row is not of this format.
    return f"not a row of the format {name} ({type(error).__name__}: {error})"


def row_id(row: Mapping[str, Any], index: int) -> str:
    """The row's own id as text, or its number."""
    own = row.get("id")
    return str(own) if own is not None and str(own) else f"row-{index}"
