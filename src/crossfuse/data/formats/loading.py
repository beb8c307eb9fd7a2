"""Opening a data set by path, hub id or name, and telling its format."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from crossfuse.data.formats import (
    easy_vqa,
    finevision,
    livecc,
    llava,
    llava_mix_vsft,
    llava_onevision,
    llava_video,
    records,
    scenes,
)
from crossfuse.data.formats.base import Format, Reading
from crossfuse.data.formats.dataset import RecordDataset
from crossfuse.data.formats.finevision import rated_turns
from crossfuse.data.formats.opening import open_rows
from crossfuse.fusion import nearest

if TYPE_CHECKING:
    from crossfuse.data.formats.streamed import StreamedRecords

# In the order of detection: the most specific first.
FORMATS: dict[str, Format] = {
    module.FORMAT.name: module.FORMAT
    for module in (
        livecc,
        finevision,
        llava_mix_vsft,
        records,
        llava_video,
        llava_onevision,
        llava,
        easy_vqa,
        scenes,
    )
}
_SAMPLED = 50
_SLICE = re.compile(r"(\w+)?\[(-?\d+%?)?:(-?\d+%?)?\]")


@overload
def load_records(
    path: str | os.PathLike[str],
    format: str | None = ...,
    split: str | None = ...,
    *,
    streaming: Literal[False] = ...,
    name: str | None = ...,
    root: str | os.PathLike[str] | None = ...,
    limit: int | None = ...,
    allow_urls: bool = ...,
    on_error: Literal["raise", "skip"] = ...,
    missing_tag: Literal["first", "raise"] = ...,
    min_ratings: Mapping[str, int] | None = ...,
    seed: int = ...,
) -> RecordDataset: ...


@overload
def load_records(
    path: str | os.PathLike[str],
    format: str | None = ...,
    split: str | None = ...,
    *,
    streaming: Literal[True],
    name: str | None = ...,
    root: str | os.PathLike[str] | None = ...,
    limit: int | None = ...,
    allow_urls: bool = ...,
    on_error: Literal["raise", "skip"] = ...,
    missing_tag: Literal["first", "raise"] = ...,
    min_ratings: Mapping[str, int] | None = ...,
    seed: int = ...,
) -> StreamedRecords: ...


def load_records(
    path: str | os.PathLike[str],
    format: str | None = None,
    split: str | None = None,
    *,
    name: str | None = None,
    root: str | os.PathLike[str] | None = None,
    streaming: bool = False,
    limit: int | None = None,
    allow_urls: bool = False,
    on_error: Literal["raise", "skip"] = "raise",
    missing_tag: Literal["first", "raise"] = "first",
    min_ratings: Mapping[str, int] | None = None,
    seed: int = 0,
) -> RecordDataset | StreamedRecords:
    """A data set of `Record`, of any format in `FORMATS`.

    Args:
        path: a ``.json``, ``.jsonl`` or ``.parquet`` file; a folder of such files (``.parquet`` by `datasets`' rules,
            or what ``save_to_disk`` wrote); a hub id ``owner/name``; ``hf://datasets/owner/name/file.json``;
            ``"scenes"`` or ``"easy-vqa"``.
        format: a name of `FORMATS`; by default told from the first rows.
        split: ``train`` and the like, with an optional slice as in `datasets`: ``train[:90%]``, ``train[90%:]``,
            ``[100:200]``.
        name: configuration of a hub data set or folder, such as ``ai2d_merged`` of FineVision.
        root: folder that paths of images and videos are relative to; default: where the file lies.
        streaming: one after the other without length, for sets larger than memory or disk.
        limit: no more than this many rows; of scenes how many to draw (default 20,000).
        allow_urls: accept images given as URLs; the `Collator` has to allow them too.
        on_error: what is no record, or names a missing file, raises when it is reached; or everything is read once
            here (no image decoded), and what cannot be used is left out and listed in ``rejected``.
        missing_tag: an image without a tag in the text goes first and is counted in ``notes``, or is an error.
        min_ratings: FineVision: leave out turns (and rows without any other) rated lower, as ``{"relevance": 3}``.
        seed: of the rendered scenes.

    Raises ``ValueError`` or ``FileNotFoundError``, in one line, for what cannot be opened, an unknown format or split.
    """
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error must be 'raise' or 'skip'; got {on_error!r}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1; got {limit}")
    chosen = None if format is None else _format(format)
    source = os.fspath(path)
    part, bounds = _parse_split(split)
    rows, folder = open_rows(source, part, name, streaming and bounds is None, limit, seed)
    chosen = chosen or (FORMATS[source] if source in ("scenes", "easy-vqa") else detect_format(_first(rows), source))
    reading = Reading(Path(root) if root is not None else folder, allow_urls, missing_tag, dict(min_ratings or {}))
    if reading.min_ratings:
        if chosen.name != "finevision":
            raise ValueError(f"min_ratings is for the format finevision; {source} is {chosen.name}")
        rated_turns({}, reading.min_ratings)
    if not hasattr(rows, "__len__"):
        return _stream(rows, chosen, reading, source, limit, on_error)
    dataset = RecordDataset(rows, chosen, reading, source)
    if bounds is not None:
        dataset = dataset.select(range(*bounds(len(dataset))))
    if reading.min_ratings:
        dataset = _rated(dataset)
    if limit is not None and limit < len(dataset):
        dataset = dataset.select(range(limit))
    if on_error == "skip":
        dataset = dataset.usable()
    return dataset.stream() if streaming else dataset


def detect_format(rows: Iterable[Any], source: str) -> Format:
    """The first format that all of the rows look like.

    Raises ``ValueError`` naming the keys found and the known formats.
    """
    sample = list(rows)
    if not sample:
        raise ValueError(f"{source} holds no rows; check the path or the split")
    for known in FORMATS.values():
        if all(known.matches(row) for row in sample):
            return known
    odd = sample[0]
    keys = ", ".join(map(str, odd)) if isinstance(odd, Mapping) else f"a {type(odd).__name__}"
    raise ValueError(f"the rows of {source} ({keys}) are of no known format; known: {', '.join(FORMATS)}")


def _format(name: str) -> Format:
    if name not in FORMATS:
        raise ValueError(f"unknown format {name!r}{nearest(name, FORMATS)}; known: {', '.join(FORMATS)}")
    return FORMATS[name]


def _first(rows: Any) -> list[Any]:
    if hasattr(rows, "__len__"):
        return [rows[i] for i in range(min(_SAMPLED, len(rows)))]
    return [item["row"] for item in islice(rows, _SAMPLED)]


def _rated(dataset: RecordDataset) -> RecordDataset:
    """Rows with a turn that reaches the ratings, told from the rating columns alone."""
    least = dataset.reading.min_ratings
    columns = [f"{name}_ratings" for name in least]
    rows: Any = dataset.rows
    if hasattr(rows, "select_columns"):
        rows = rows.select_columns([column for column in columns if column in rows.column_names])
    return dataset.select(i for i in range(len(dataset)) if rated_turns(rows[dataset.row_number(i)], least))


def _stream(
    rows: Any, format: Format, reading: Reading, source: str, limit: int | None, on_error: Literal["raise", "skip"]
) -> StreamedRecords:
    from crossfuse.data.formats.streamed import StreamedRecords

    if reading.min_ratings:
        rows = rows.filter(_has_rated_turn, fn_kwargs={"least": reading.min_ratings})
    return StreamedRecords(rows if limit is None else rows.take(limit), format, reading, source, on_error)


def _has_rated_turn(item: Mapping[str, Any], least: Mapping[str, int]) -> bool:
    return bool(rated_turns(item["row"], least))


def _parse_split(split: str | None) -> tuple[str | None, Any]:
    """The split's name, and where it has a slice a function from the number of rows to (first, last)."""
    if split is None or "[" not in split:
        return split, None
    match = _SLICE.fullmatch(split)
    if match is None:
        raise ValueError(f"split must look like train, train[:90%] or train[100:200]; got {split!r}")

    def bounds(count: int) -> tuple[int, int]:
        first, last = (_place(text, count) for text in (match[2], match[3]))
        start, stop, _ = slice(first, last).indices(count)
        return start, stop

    return match[1], bounds


def _place(text: str | None, count: int) -> int | None:
    if not text:
        return None
    return round(count * int(text[:-1]) / 100) if text.endswith("%") else int(text)
