"""Published benchmark files on the disk: found by their names, read as rows."""

from __future__ import annotations

import base64
import csv
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from crossfuse.data.records import ImagePart, Record, TextPart, Video, VideoPart

Row = dict[str, Any]


def find(root: Path, *names: str) -> Path:
    """The first of these names (or glob patterns) under `root`; ValueError naming all that were looked for."""
    found = find_all(root, *names)
    if not found:
        raise ValueError(f"{root} has none of {', '.join(names)}; give the directory that holds the published files")
    return found[0]


def find_all(root: Path, *names: str) -> list[Path]:
    """Files of the first name or pattern that matches any, sorted; folders between are searched too."""
    for name in names:
        found = sorted(path for path in root.rglob(name) if path.is_file())
        if found:
            return found
    return []


def rows(path: Path) -> list[Row]:
    """Rows of a JSON list, JSON lines (under any name), CSV, TSV or Parquet file.

    Raises ValueError naming the file where it is none of these.
    """
    if path.suffix == ".parquet":
        from pyarrow.parquet import read_table

        table: list[Row] = read_table(path).to_pylist()
        return table
    if path.suffix in (".csv", ".tsv"):
        csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # MMBench keeps whole images in a field
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","))
    content = document(path)
    if isinstance(content, list) and all(isinstance(row, dict) for row in content):
        return content
    raise ValueError(f"{path} holds no list of records; is it the published file?")


def document(path: Path) -> Any:
    """The JSON value of a file; where the file is JSON lines, their list."""
    text = path.read_text(encoding="utf-8")
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return [_line(path, number, line) for number, line in _lines(text)]


def records_of(path: Path, key: str) -> list[Row]:
    """The list under `key` of a JSON object; ValueError where it is not there."""
    content = document(path)
    if not isinstance(content, dict) or not isinstance(content.get(key), list):
        raise ValueError(f'{path} has no list "{key}"; is it the published file?')
    return list(content[key])


def field(row: Row, *names: str) -> Any:
    """The value under the first of these names that the row has; ValueError with all of them."""
    for name in names:
        if name in row:
            return row[name]
    raise ValueError(f"a record has no {' or '.join(map(repr, names))}; it has {', '.join(map(repr, row))}")


def image_of(root: Path, value: Any, *folders: str) -> str | bytes:
    """An image as Parquet holds it (bytes), as TSV holds it (base64), or the path of a named file.

    The path is the first that exists of `root`/folder/name for the folders given; where none does, the first of them,
    so that opening it later names the missing file.
    """
    if isinstance(value, dict):
        content = value.get("bytes")
        return content if content else image_of(root, value.get("path") or "", *folders)
    if isinstance(value, bytes):
        return value
    name = str(value)
    if len(name) > 255 and "/" not in name[:2] and "." not in name[-6:]:
        return base64.b64decode(name)
    return str(place(root, name, *folders))


def place(root: Path, name: str, *folders: str) -> Path:
    """Where a named file lies: the first of `root`/folder/name that exists, else the first."""
    candidates = [root / folder / name for folder in folders or ("",)]
    return next((path for path in candidates if path.exists()), candidates[0])


def question(id: str, text: str, images: Sequence[str | bytes] = (), video: Video | None = None, **meta: Any) -> Record:
    """A record with one user turn: images, then the video, then the words."""
    content = [ImagePart() for _ in images] + ([VideoPart()] if video else []) + [TextPart(text=text)]
    return Record.model_validate(
        {
            "id": id,
            "images": tuple(images),
            "videos": () if video is None else (video,),
            "messages": [{"role": "user", "content": content}],
            "meta": meta,
        }
    )


def lettered(options: Sequence[str], form: str = "{}. {}") -> str:
    """The options below each other, each behind its letter."""
    return "\n".join(form.format(letter, option) for letter, option in zip("ABCDEFGHIJ", options, strict=False))


def _lines(text: str) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip())


def _line(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number}, is neither JSON nor part of JSON lines: {error.msg}") from error
