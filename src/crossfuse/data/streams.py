"""Interleaved (frame, words) training streams, in the layout in which `StreamSession` takes and says them.

    opening  F0 d "a red circle appears" e  F1 d s  F2 d s  F3 d "the red circle vanishes" e

``F`` is a frame (image tokens, or a window of cross-attention), ``d`` the delimiter, ``e`` the token that ends words,
``s`` silence. Words and silence are supervised, everything else is given. Four sources:

* `live_stream`: words with times, as LiveCC writes them: each frame is followed by the words that are spoken from its
  time until the next frame's, silence where there are none.
* `video_question`: frames without words, then a question and its supervised answer.
* `RecordStreams`: records with a video, such as LiveCC's, in one of these two layouts; `UnopenedStream` is one of them.
* `ClipStreams`: rendered clips, whose events are announced at the first frame that shows them.

`StreamCollator` (in `crossfuse.data.stream_collate`) turns them into batches.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from crossfuse.data.clips import EVENT_KINDS, Clip, Event, EventKind, make_clip
from crossfuse.data.questions import article
from crossfuse.data.scenes import MAX_OBJECTS, Split

if TYPE_CHECKING:
    from crossfuse.data.records import Record
    from crossfuse.data.videos import VideoSampling

# Frames a second of rendered clips: two events are at least 0.75 s apart, so no frame shows two for the first time.
CLIP_FPS = 4 / 3
CLIP_PROMPT = "describe what changes.\n"


class TimedWords(NamedTuple):
    """Words and when they are spoken, in seconds on the clock of the frames; None where nobody knows."""

    text: str
    start: float | None = None


@dataclass(frozen=True)
class StreamFrame:
    """One frame and what is said until the next: words, ``""`` for silence, None for nothing that is supervised."""

    time: float
    image: Any  # path, bytes or PIL image
    words: str | None = ""


@dataclass(frozen=True)
class StreamRecord:
    """One training stream. ``question`` and ``answer`` come after the last frame (the video-QA layout)."""

    id: str
    frames: tuple[StreamFrame, ...]
    opening: str = ""
    question: str | None = None
    answer: str | None = None

    def __post_init__(self) -> None:
        if not self.frames:
            raise ValueError(f"stream {self.id!r} has no frame; leave it out")
        if any(b.time < a.time for a, b in itertools.pairwise(self.frames)):
            raise ValueError(f"stream {self.id!r}: its frames are not in the order of their times; sort them")
        if (self.question is None) != (self.answer is None):
            raise ValueError(f"stream {self.id!r} has a question without an answer or the reverse; give both")

    @property
    def spoken(self) -> list[tuple[int, str]]:
        """(index of the frame, words) where something is said."""
        return [(index, frame.words) for index, frame in enumerate(self.frames) if frame.words]


def words_by_frame(
    words: Iterable[TimedWords], times: Sequence[float], *, end: float | None = None, name: str = "the stream"
) -> list[str]:
    """What is spoken from each frame's time until the next's, joined by blanks -> one string a frame.

    Words keep their order whatever their times say: one that is out of order, or has no time, stands with the word
    before it (with the first frame, where there is none). Words before the first frame go to it. Words after ``end``
    (default: one more interval after the last frame) are left out, with one warning.

    Raises ValueError where there is no frame or the times do not rise.
    """
    if not times or any(b <= a for a, b in itertools.pairwise(times)):
        raise ValueError(f"frame times of {name} must rise, one at least; got {list(times)[:4]}")
    if end is None:
        end = times[-1] + (times[-1] - times[-2] if len(times) > 1 else math.inf)
    spoken: list[list[str]] = [[] for _ in times]
    latest, late = times[0], 0
    for item in words:
        if item.start is not None and math.isfinite(item.start):
            latest = max(latest, item.start)
        if not item.text.strip():
            continue
        if latest > end + 1e-6:
            late += 1
            continue
        spoken[bisect.bisect_right(times, latest + 1e-6) - 1].append(item.text.strip())
    if late:
        warnings.warn(f"{late} word(s) of {name} come after its end at {end:.2f} s and are left out", stacklevel=2)
    return [" ".join(parts) for parts in spoken]


def live_stream(
    id: str,
    frames: Iterable[tuple[float, Any]],
    words: Iterable[TimedWords],
    *,
    opening: str = "",
    end: float | None = None,
) -> StreamRecord:
    """The LiveCC layout from frames (time, image) and words with times, on the same clock."""
    given = list(frames)
    texts = words_by_frame(words, [time for time, _ in given], end=end, name=repr(id))
    pairs = zip(given, texts, strict=True)
    return StreamRecord(id, tuple(StreamFrame(time, image, text) for (time, image), text in pairs), opening)


def video_question(id: str, frames: Iterable[tuple[float, Any]], question: str, answer: str) -> StreamRecord:
    """Frames alone, then the question and the answer: what plain video question answering is as a stream."""
    given = tuple(StreamFrame(time, image, None) for time, image in frames)
    return StreamRecord(id, given, question=question, answer=answer)


@dataclass(frozen=True)
class UnopenedStream:
    """A record whose video becomes the frames of a stream once it is opened."""

    record: Record

    @property
    def id(self) -> str:
        return self.record.id

    def open(self, sampling: VideoSampling, stride: int = 1) -> StreamRecord:
        """Decode the frames. stride: side in pixels of the square that one image token covers, for ``max_tokens``.

        Where the record has words with times (``meta["words"]``: start, end, word, in seconds from the start of its
        span) it is a `live_stream` that opens with the user's words; otherwise its last question and answer make a
        `video_question`.

        Raises FileNotFoundError or ValueError for a record without exactly one video, with neither words nor an
        answer, or with a video that cannot be read.
        """
        from crossfuse.data.videos import read_clip

        record = self.record
        if len(record.videos) != 1 or record.images:
            raise ValueError(
                f"record {record.id!r} has {len(record.videos)} videos and {len(record.images)} images; a stream is "
                "made of one video"
            )
        (video,) = record.videos
        asked = [message.text for message in record.messages if message.role == "user"]
        spoken: Any = record.meta.get("words")
        if spoken is None and (not record.answer or not asked):
            raise ValueError(f"record {record.id!r} has neither words with times nor a question with an answer")
        frames = read_clip(video, sampling, stride)
        if spoken is None:
            return video_question(record.id, frames, f"{asked[-1]}\n", record.answer or "")
        words = [TimedWords(word, start) for start, _, word in spoken]
        end = None if video.end is None else video.end - (video.start or 0.0)
        opening = f"{asked[0]}\n" if asked and asked[0] else ""
        return live_stream(record.id, frames, words, opening=opening, end=end)


class RecordStreams(Sequence[StreamRecord]):
    """Map-style data set over records with one video each, as the adapters of `crossfuse.data.formats` give them.

    Frames are decoded when a record is asked for, as `UnopenedStream` says.
    """

    def __init__(self, records: Any, sampling: VideoSampling | None = None, stride: int = 1) -> None:
        from crossfuse.data.videos import VideoSampling

        self.records, self.sampling, self.stride = records, sampling or VideoSampling(), stride

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index):  # type: ignore[no-untyped-def, override]
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return UnopenedStream(self.records[index]).open(self.sampling, self.stride)


def shown_at(event: Event) -> float:
    """When a rendered event can be seen in full: a move at its end, all else at once."""
    return event.end


def clip_stream(id: str, clip: Clip, *, opening: str = CLIP_PROMPT) -> StreamRecord:
    """A rendered clip: the first frame is described, each event is announced at the first frame that shows it, and the
    rest is silence.

    An event that no frame shows any more is left out.
    """
    frames = list(clip.frames())
    times = [time for time, _ in frames]
    # What was said is what text that sees one frame at a time remembers of the earlier ones.
    first = sorted(clip.scene(0.0).objects, key=lambda item: item.name)  # an order that can be told from the words
    words = [TimedWords(" and ".join(f"{article(item.name)} {item.name}" for item in first), 0.0)]
    for event in clip.events:
        place = bisect.bisect_left(times, shown_at(event) - 1e-6)
        if place < len(times):
            words.append(TimedWords(event.text, times[place]))
    return live_stream(id, frames, words, opening=opening)


class ClipStreams(Sequence[StreamRecord]):
    """Map-style data set of rendered clips with 0 to ``events`` events each; clips are drawn when asked for.

    Clip ``i`` of a split is the same whatever the size of the set. Raises ValueError for a size below 1, an unknown
    kind of event, or values that `make_clip` refuses.
    """

    def __init__(
        self,
        split: Split = "train",
        size: int = 1000,
        *,
        duration: float = 6.0,
        fps: float = CLIP_FPS,
        events: int = 3,
        kinds: Sequence[EventKind] = EVENT_KINDS,
        objects: int = MAX_OBJECTS,
        opening: str = CLIP_PROMPT,
    ) -> None:
        if size < 1:
            raise ValueError(f"a set of clips needs at least 1; got {size}")
        unknown = set(kinds) - set(EVENT_KINDS)
        if unknown or not kinds:
            raise ValueError(
                f"kinds must be among {', '.join(EVENT_KINDS)}; got {', '.join(sorted(unknown)) or 'none'}"
            )
        self.split, self.size, self.opening = split, size, opening
        self.duration, self.fps, self.events = duration, fps, events
        self.kinds, self.objects = tuple(kinds), objects

    def __len__(self) -> int:
        return self.size

    def clip(self, index: int) -> Clip:
        """The clip itself, with its list of events."""
        if not 0 <= index < self.size:
            raise IndexError(f"this set has {self.size} clips; got {index}")
        count = random.Random(f"events/{self.split}/{index}").randint(0, self.events)
        return make_clip(index, self.split, self.duration, self.fps, count, self.kinds, self.objects)

    def __getitem__(self, index):  # type: ignore[no-untyped-def, override]
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self.size))]
        return clip_stream(f"clip-{self.split}-{index}", self.clip(index), opening=self.opening)

    def __iter__(self) -> Iterator[StreamRecord]:
        return (self[index] for index in range(self.size))
