"""Rows of a JSON file by their place in it: opened by one pass over the bytes, parsed one row at a time.

A JSON array (as LLaVA ships) and JSON lines are read alike. In memory are 16 bytes a row. `datasets`' own JSON reader
takes a whole array into memory and wants one type for every key, which mixed records do not have.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_CHUNK = 1 << 22
_QUOTE, _BACKSLASH, _NEWLINE = b'"'[0], b"\\"[0], b"\n"[0]
_OPEN, _CLOSE = (b"{"[0], b"["[0]), (b"}"[0], b"]"[0])


class JsonRows(Sequence[Any]):
    """Objects (or arrays) of a JSON array or of JSON lines, as Python values.

    Raises ``ValueError`` for a file that is neither or breaks off, and, at access, for a row that is no JSON.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        if not os.path.isfile(self.path):
            raise FileNotFoundError(f"no such file: {self.path}")
        spans = list(_spans(self.path))
        starts = np.concatenate([block[0] for block in spans]) if spans else np.zeros(0, np.int64)
        ends = np.concatenate([block[1] for block in spans]) if spans else np.zeros(0, np.int64)
        self._starts, self._ends = starts, ends
        self._file: int | None = None

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        if self._file is None:
            self._file = os.open(self.path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)
        start, end = int(self._starts[index]), int(self._ends[index])
        return _parse(os.pread(self._file, end - start, start), self.path, index % len(self), start)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}


def iter_json(paths: Sequence[str | os.PathLike[str]]) -> Iterator[dict[str, Any]]:
    """``{"row": value, "number": its number in its file}`` of each row of several files, read as they come."""
    for path in paths:
        number = 0
        with open(path, "rb") as file:
            for starts, ends in _spans(os.fspath(path)):
                for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
                    file.seek(start)
                    value = _parse(file.read(end - start), os.fspath(path), number, start)
                    yield {"row": value, "number": number}
                    number += 1


def _parse(data: bytes, path: str, index: int, start: int) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:
        raise ValueError(f"{path}, row {index} (byte {start}): no valid JSON ({error})") from error


Block = tuple[np.ndarray, np.ndarray]


def _spans(path: str) -> Iterator[Block]:
    """(starts, ends) in bytes of the rows of each part of the file."""
    with open(path, "rb") as file:
        head = file.read(4096)
        skipped = 3 if head.startswith(b"\xef\xbb\xbf") else 0
        first = head[skipped:].lstrip()[:1]
        if not first:
            raise ValueError(f"{path} is empty; a JSON array or JSON lines of records is needed")
        lines = Path(path).suffix.lower() in (".jsonl", ".ndjson") or first == b"{"
        if not lines and first != b"[":
            begins = first.decode(errors="replace")
            raise ValueError(f"{path} begins with {begins!r}; a JSON array or JSON lines of records is needed")
        file.seek(skipped)
        yield from _lines(file, skipped) if lines else _elements(file, skipped, path)


def _lines(file: Any, start: int) -> Iterator[Block]:
    """Lines with content; a last line that is a list of numbers is an index that some sets append."""
    base = begin = start
    held: Block | None = None
    while data := file.read(_CHUNK):
        ends = np.flatnonzero(np.frombuffer(data, np.uint8) == _NEWLINE) + base
        base += len(data)
        if len(ends):
            starts = np.concatenate([[begin], ends[:-1] + 1])
            begin = int(ends[-1]) + 1
            full = ends - starts > 1
            if full.any():
                if held is not None:
                    yield held
                held = starts[full], ends[full]
    if base - begin > 1:
        if held is not None:
            yield held
        held = np.array([begin], np.int64), np.array([base], np.int64)
    if held is not None:
        file.seek(int(held[0][-1]))
        if _is_index(file.read(64)):
            held = held[0][:-1], held[1][:-1]
        if len(held[0]):
            yield held


def _is_index(data: bytes) -> bool:
    text = data.lstrip()
    return text.startswith(b"[") and text[1:].lstrip()[:1].isdigit()


def _elements(file: Any, start: int, path: str) -> Iterator[Block]:
    """Objects and arrays one level below the outermost array, found by counting brackets outside of strings."""
    base, depth, inside, backslashes = start, 0, False, 0
    begin = -1
    while data := file.read(_CHUNK):
        bytes_ = np.frombuffer(data, np.uint8)
        quotes = np.flatnonzero(bytes_ == _QUOTE)
        escaped = _escaped(bytes_, quotes, backslashes)
        quotes = quotes[~escaped]
        opens = np.flatnonzero((bytes_ == _OPEN[0]) | (bytes_ == _OPEN[1]))
        closes = np.flatnonzero((bytes_ == _CLOSE[0]) | (bytes_ == _CLOSE[1]))
        marks = np.concatenate([opens, closes])
        steps = np.concatenate([np.ones(len(opens), np.int64), -np.ones(len(closes), np.int64)])
        order = np.argsort(marks, kind="stable")
        marks, steps = marks[order], steps[order]
        outside = (np.searchsorted(quotes, marks) + inside) % 2 == 0
        marks, steps = marks[outside], steps[outside]
        depths = depth + np.cumsum(steps)
        starts = marks[(steps == 1) & (depths == 2)] + base
        ends = marks[(steps == -1) & (depths == 1)] + base + 1
        if begin >= 0:
            starts = np.concatenate([[begin], starts])
            begin = -1
        if len(starts) > len(ends):
            begin = int(starts[-1])
            starts = starts[:-1]
        if len(starts):
            yield starts.astype(np.int64), ends.astype(np.int64)
        depth = int(depths[-1]) if len(depths) else depth
        inside = bool((len(quotes) + inside) % 2)
        backslashes = _trailing(data, backslashes)
        base += len(data)
    if depth != 0 or inside:
        where = f"inside the record that starts at byte {begin}" if begin >= 0 else "before its closing bracket"
        raise ValueError(f"{path} breaks off {where}; it is no complete JSON array (download it again?)")


def _escaped(data: np.ndarray, quotes: np.ndarray, before: int) -> np.ndarray:
    """Which quotes an odd number of backslashes precedes; ``before`` backslashes end the part before this one."""
    # One backslash and no second one is what nearly every escaped quote has; only longer runs are counted one by one.
    one = (quotes >= 1) & (data[np.maximum(quotes - 1, 0)] == _BACKSLASH)
    two = (quotes >= 2) & one & (data[np.maximum(quotes - 2, 0)] == _BACKSLASH)
    escaped = one & ~two
    at_start = (quotes == 0) | (quotes == 1) & one if before else np.zeros(len(quotes), bool)
    for i in np.flatnonzero(two | at_start).tolist():
        place = int(quotes[i])
        last = place - 1
        while last >= 0 and data[last] == _BACKSLASH:
            last -= 1
        run = place - 1 - last + (before if last < 0 else 0)
        escaped[i] = run % 2 == 1
    return escaped


def _trailing(data: bytes, before: int) -> int:
    run = len(data) - len(data.rstrip(b"\\"))
    return run + before if run == len(data) else run
