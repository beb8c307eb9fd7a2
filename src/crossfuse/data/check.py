"""What is wrong with a data set, before it is trained on: every row read, every image decoded."""

from __future__ import annotations

import hashlib
import io
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from crossfuse.data.formats.base import RoleError, TagError
from crossfuse.data.formats.dataset import RecordDataset
from crossfuse.data.images import MAX_RATIO, MIN_SIDE
from crossfuse.data.inspection import LookedAt, look_at
from crossfuse.data.lengths import Lengths, TokenCounter
from crossfuse.data.records import Record

FAULTS = (
    "not a record",
    "role error",
    "tag mismatch",
    "empty answer",
    "reserved string",
    "missing file",
    "broken image",
    "broken video",
    "tiny image",
    "extreme image",
    "duplicate",
)


class Fault(NamedTuple):
    """One thing wrong with one row: a kind of `FAULTS`, the row's number, its id and a line of explanation."""

    kind: str
    row: int
    id: str
    reason: str


@dataclass
class DataReport:
    """What a check found. ``lengths`` are the tokens of the rows that are records, where they were counted."""

    source: str
    format: str
    rows: int = 0
    records: int = 0
    images: int = 0
    videos: int = 0
    answers: int = 0
    without_images: int = 0
    faults: list[Fault] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    lengths: list[Lengths] = field(default_factory=list)

    @property
    def counts(self) -> Counter[str]:
        """Faults by kind."""
        return Counter(fault.kind for fault in self.faults)

    def to_dict(self) -> dict[str, Any]:
        """As JSON: counts, length statistics with histograms, and every fault."""
        return {
            "source": self.source,
            "format": self.format,
            "rows": self.rows,
            "records": self.records,
            "images": self.images,
            "videos": self.videos,
            "answers": self.answers,
            "records_without_images": self.without_images,
            "fault_counts": dict(self.counts),
            "faults": [fault._asdict() for fault in self.faults],
            "notes": dict(self.notes),
            "tokens": {name: _statistics(values) for name, values in self.token_lengths().items()},
        }

    def token_lengths(self) -> dict[str, np.ndarray]:
        """Tokens of each record as ``text``, ``image`` and ``total``; empty where they were not counted."""
        if not self.lengths:
            return {}
        text, image = np.array(self.lengths, dtype=np.int64).T
        return {"text": text, "image": image, "total": text + image}


def histogram(values: np.ndarray) -> list[tuple[int, int, int]]:
    """(first, last, count) of bins without gaps from the least to the largest value.

    About ten bins of one round width, or bins that double (0, 1, 2-3, 4-7, ...) where the largest value is more than
    ten times the least.
    """
    least, most = int(values.min()), int(values.max())
    if most > 10 * max(least, 1):
        edges = [0] if least == 0 else []
        edges += [2**e for e in range(max(least, 1).bit_length() - 1, most.bit_length() + 1)]
    else:
        width = next(w for e in range(20) for w in (10**e, 2 * 10**e, 5 * 10**e) if most // w - least // w < 10)
        edges = list(range(least // width * width, most + width + 1, width))
    counts, _ = np.histogram(values, bins=[*edges])
    # The last bin of numpy includes its end, which no value reaches here.
    return [(low, high - 1, int(n)) for low, high, n in zip(edges, edges[1:], counts, strict=False) if low <= most]


def _statistics(values: np.ndarray) -> dict[str, Any]:
    low, half, high = np.percentile(values, [5, 50, 95]).tolist()
    return {
        "sum": int(values.sum()),
        "mean": float(values.mean()),
        "min": int(values.min()),
        "p5": low,
        "median": half,
        "p95": high,
        "max": int(values.max()),
        "histogram": [{"from": a, "to": b, "records": n} for a, b, n in histogram(values)],
    }


def check_data(
    data: RecordDataset,
    processor: Any = None,
    *,
    min_side: int = MIN_SIDE,
    max_ratio: float = MAX_RATIO,
    decode: bool = True,
    progress: Callable[[int], None] | None = None,
) -> DataReport:
    """Read every row and open every image.

    Args:
        processor: counts the tokens of each record, and names the strings that a text must not hold.
        min_side, max_ratio: shorter sides (pixels) and longer shapes are faults.
        decode: decode images whole; otherwise only their headers are read, which misses truncated files.
        progress: called with the number of rows seen.
    """
    report = DataReport(data.source, data.format.name)
    counter = None if processor is None else TokenCounter(processor)
    seen: dict[bytes, int] = {}
    ids: Counter[str] = Counter()
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for number, record, images in _inspected(data, report, pool, min_side, max_ratio, decode):
            report.records += 1
            report.images += len(record.images)
            report.videos += len(record.videos)
            report.answers += sum(message.role == "assistant" for message in record.messages)
            report.without_images += not record.images and not record.videos
            ids[record.id] += 1
            report.faults += [Fault(kind, number, record.id, reason) for kind, reason in images.faults]
            report.notes.update(images.notes)
            faults = [*_conversation_faults(record), *(_reserved_faults(record, processor) if processor else ())]
            first = seen.setdefault(_digest(record), number)
            if first != number:
                faults.append(("duplicate", f"the same images and texts as row {first}"))
            report.faults += [Fault(kind, number, record.id, reason) for kind, reason in faults]
            if counter is not None and not _broken(images.faults) and "role error" not in dict(faults):
                report.lengths.append(_lengths(counter, record, images.sizes))
            if progress is not None:
                progress(report.rows)
    repeated = sum(count > 1 for count in ids.values())
    if repeated:
        report.notes["id that several records share"] = repeated
    report.faults.sort(key=lambda fault: (fault.row, FAULTS.index(fault.kind)))
    return report


def _inspected(
    data: RecordDataset, report: DataReport, pool: ThreadPoolExecutor, min_side: int, max_ratio: float, decode: bool
) -> Iterator[tuple[int, Record, LookedAt]]:
    """Rows that are records with what their images are like; images are opened by several threads at once."""
    rows = _records(data, report)
    while window := list(islice(rows, 64)):
        looked = pool.map(lambda item: look_at(item[1], min_side, max_ratio, decode), window)
        for (number, record), images in zip(window, looked, strict=True):
            yield number, record, images


def _records(data: RecordDataset, report: DataReport) -> Iterator[tuple[int, Record]]:
    for index in range(len(data)):
        number = data.row_number(index)
        report.rows += 1
        notes: list[str] = []
        try:
            record = data.format.read(data.rows[number], number, data.reading, notes)
        except ValueError as error:
            report.faults.append(Fault(_kind(error), number, "", str(error)))
            continue
        for note in notes:
            if "tag" in note or "image part" in note:
                report.faults.append(Fault("tag mismatch", number, record.id, note))
            else:
                report.notes[note] += 1
        yield number, record


def _kind(error: BaseException | None) -> str:
    while error is not None:
        if isinstance(error, RoleError):
            return "role error"
        if isinstance(error, TagError):
            return "tag mismatch"
        if isinstance(error, FileNotFoundError):
            return "missing file"
        error = error.__cause__
    return "not a record"


def _broken(faults: list[tuple[str, str]]) -> bool:
    return any(kind in ("missing file", "broken image", "broken video") for kind, _ in faults)


def _lengths(counter: TokenCounter, record: Record, sizes: list[tuple[int, int]]) -> Lengths:
    return counter(record) if record.videos or len(sizes) < len(record.images) else counter.lengths(record, sizes)


def _conversation_faults(record: Record) -> Iterator[tuple[str, str]]:
    roles = [message.role for message in record.messages]
    spoken = roles[1:] if roles[0] == "system" else roles
    expected = [("user", "assistant")[i % 2] for i in range(len(spoken))]
    if spoken != expected or len(spoken) % 2 or not spoken:
        yield "role error", f"the messages are of {', '.join(roles)}; user and assistant must take turns, user first"
    for number, message in enumerate(record.messages, 1):
        if message.role == "assistant" and not message.text.strip():
            yield "empty answer", f"message {number} is empty"


def _reserved_faults(record: Record, processor: Any) -> Iterator[tuple[str, str]]:
    from crossfuse.data.collate import refuse_reserved

    try:
        refuse_reserved(record, processor)
    except ValueError as error:
        yield "reserved string", str(error)


def _digest(record: Record) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for image in record.images:
        digest.update(image.encode() if isinstance(image, str) else _bytes(image))
    for video in record.videos:
        digest.update(f"{video.path} {video.start} {video.end}".encode())
    for message in record.messages:
        digest.update(f"\0{message.role}\0{message.text}".encode())
    return digest.digest()


def _bytes(image: bytes | Image.Image) -> bytes:
    if isinstance(image, bytes):
        return image
    buffer = io.BytesIO()
    image.save(buffer, format="BMP")
    return buffer.getvalue()
