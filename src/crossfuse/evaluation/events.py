"""Announced events: precision, recall and delay of what a live captioner says, through the session that says it.

An announcement matches an event that is said no earlier than the first frame that shows it and at most ``tolerance``
frames later; each matches one at most, the earliest first. Three readings, from loose to strict:

* ``any``: something was said, whatever the words;
* ``kind``: the kind of event is right (appears, vanishes, moves, turns);
* ``words``: every word is right.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from crossfuse.data.streams import StreamRecord

READINGS = ("any", "kind", "words")
VERBS = ("appears", "vanishes", "moves", "turns")

Said = Sequence[tuple[int, str]]
"""(index of the frame, words), in the order of the frames."""


@dataclasses.dataclass(frozen=True)
class EventScore:
    """Counts over all streams, and delays in frames of the matched announcements.

    Rates are None where nothing was said (precision), nothing happened (recall), or nothing matched (delay).
    """

    events: int
    announcements: int
    delays: tuple[int, ...]

    @property
    def matched(self) -> int:
        return len(self.delays)

    @property
    def precision(self) -> float | None:
        return self.matched / self.announcements if self.announcements else None

    @property
    def recall(self) -> float | None:
        return self.matched / self.events if self.events else None

    @property
    def f1(self) -> float | None:
        total = self.events + self.announcements
        return 2 * self.matched / total if total else None

    @property
    def mean_delay(self) -> float | None:
        return statistics.fmean(self.delays) if self.delays else None

    def __add__(self, other: EventScore) -> EventScore:
        return EventScore(
            self.events + other.events, self.announcements + other.announcements, self.delays + other.delays
        )

    def to_json(self) -> dict[str, Any]:
        names = ("events", "announcements", "matched", "precision", "recall", "f1", "mean_delay")
        return {name: getattr(self, name) for name in names}


def match_events(expected: Said, said: Said, tolerance: int = 1, reading: str = "words") -> EventScore:
    """Score one stream. ``expected`` holds each event at the first frame that shows it.

    Raises ValueError for a negative tolerance, an unknown reading, or frames that are not in order.
    """
    if tolerance < 0:
        raise ValueError(f"tolerance must be at least 0 frames; got {tolerance}")
    if reading not in READINGS:
        raise ValueError(f"reading must be one of {', '.join(READINGS)}; got {reading!r}")
    for name, entries in (("expected", expected), ("said", said)):
        frames = [frame for frame, _ in entries]
        if frames != sorted(frames):
            raise ValueError(f"{name} is not in the order of its frames; sort it")
    open_events = [(frame, _key(text, reading)) for frame, text in expected]
    delays = []
    for frame, text in said:
        key = _key(text, reading)
        for index, (shown, wanted) in enumerate(open_events):
            # Windows are equally long, so the earliest that fits is never the wrong one to take.
            if shown <= frame <= shown + tolerance and wanted == key:
                delays.append(frame - shown)
                del open_events[index]
                break
    return EventScore(len(expected), len(said), tuple(delays))


def _key(text: str, reading: str) -> str:
    words = text.lower().replace(".", " ").split()
    if reading == "any":
        return ""
    if reading == "kind":
        return next((word for word in words if word in VERBS), "")
    return " ".join(words)


def announce(session: Any, record: StreamRecord) -> list[tuple[int, str]]:
    """What a `StreamSession` says about the frames of a stream, one by one as they come; its words are never shown."""
    session.reset()
    if record.opening:
        session.add_text(record.opening)
    said = []
    for index, frame in enumerate(record.frames):
        session.add_frame(frame.image)
        text = "".join(session.generate()).strip()
        if text:
            said.append((index, text))
    return said


def score_events(
    session: Any,
    records: Iterable[StreamRecord],
    *,
    tolerance: int = 1,
    progress: Callable[[int], None] | None = None,
) -> dict[str, EventScore]:
    """Run every stream through the session -> score by reading, summed over the streams.

    The first frame is no event: what is said about it is not counted.
    """
    totals = {reading: EventScore(0, 0, ()) for reading in READINGS}
    for record in records:
        expected, said = ([one for one in given if one[0]] for given in (record.spoken, announce(session, record)))
        for reading in READINGS:
            totals[reading] += match_events(expected, said, tolerance, reading)
        if progress is not None:
            progress(1)
    return totals


def shuffled_frames(records: Iterable[StreamRecord], seed: int = 0) -> Iterator[StreamRecord]:
    """Control: the same events, each stream's own frames in a random order: what is right was not seen to happen."""
    for record in records:
        order = list(range(len(record.frames)))
        random.Random(f"{seed}/{record.id}").shuffle(order)
        yield _with_images(record, [record.frames[i].image for i in order])


def other_frames(records: Sequence[StreamRecord]) -> Iterator[StreamRecord]:
    """Control: the same events, the frames of the next stream. What is right here was guessed.

    Raises ValueError for fewer than two streams.
    """
    if len(records) < 2:
        raise ValueError(f"frames can be exchanged between 2 streams or more; got {len(records)}")
    for index, record in enumerate(records):
        images = [frame.image for frame in records[(index + 1) % len(records)].frames]
        yield _with_images(record, [images[i % len(images)] for i in range(len(record.frames))])


def _with_images(record: StreamRecord, images: Sequence[Any]) -> StreamRecord:
    frames = tuple(dataclasses.replace(f, image=image) for f, image in zip(record.frames, images, strict=True))
    return dataclasses.replace(record, frames=frames)
