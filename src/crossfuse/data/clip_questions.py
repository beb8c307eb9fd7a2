"""Questions about rendered clips: frames in time, then what colour or shape one of their objects has.

Only objects that the question tells apart in the whole clip are asked about, whenever they are to be seen: the last
frame alone does not always hold the answer.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from crossfuse.data.clips import EVENT_KINDS, Clip, EventKind, make_clip
from crossfuse.data.records import Record
from crossfuse.data.scenes import MAX_OBJECTS, SceneObject, Split
from crossfuse.data.streams import CLIP_FPS

CLIP_QUESTION_KINDS: tuple[str, ...] = ("colour", "shape", "appear", "vanish")
CLIP_QUESTIONS_DEFAULT = 20_000
_VERBS = {"appear": "appears", "vanish": "vanishes"}


class ClipQuestions(Sequence[Record]):
    """Map-style data set of rendered clips with one question each, drawn when asked for: the frames as images.

    kinds: of questions, in turn: ``colour`` and ``shape`` of an object, what does ``appear``, what does ``vanish``.
    events: kinds of events; each clip has one to ``most_events`` of them.
    Raises ValueError for a size below 1, an unknown kind, or values that `make_clip` refuses.
    """

    def __init__(
        self,
        split: Split = "train",
        size: int = CLIP_QUESTIONS_DEFAULT,
        kinds: Sequence[str] = CLIP_QUESTION_KINDS,
        *,
        duration: float = 6.0,
        fps: float = CLIP_FPS,
        most_events: int = 3,
        events: Sequence[EventKind] = EVENT_KINDS,
        objects: int = MAX_OBJECTS,
    ) -> None:
        if size < 1:
            raise ValueError(f"a set of clips needs at least 1; got {size}")
        unknown = sorted(set(kinds) - set(CLIP_QUESTION_KINDS))
        if unknown or not kinds:
            raise ValueError(
                f"kinds of questions about clips must be among {', '.join(CLIP_QUESTION_KINDS)}; got "
                f"{', '.join(unknown) or 'none'}"
            )
        missing = [kind for kind in kinds if kind in _VERBS and kind not in events]
        if missing:
            raise ValueError(
                f"a question about what {_VERBS[missing[0]]} needs clips in which something does; add the event to "
                "clips.kinds, or leave the question out"
            )
        self.split, self.size, self.kinds = split, size, tuple(kinds)
        self.duration, self.fps, self.most_events = duration, fps, most_events
        self.events, self.objects = tuple(events), objects

    def __len__(self) -> int:
        return self.size

    def clip(self, index: int) -> tuple[Clip, str, str]:
        """(clip, question, answer)"""
        if not 0 <= index < self.size:
            raise IndexError(f"this set has {self.size} clips; got {index}")
        kind = self.kinds[index % len(self.kinds)]
        rng = random.Random(f"clip question/{self.split}/{index}")
        while True:
            count = rng.randint(1, self.most_events)
            seed = rng.getrandbits(32)
            clip = make_clip(seed, self.split, self.duration, self.fps, count, self.events, self.objects)
            asked = _ask(clip, kind, rng)
            if asked is not None:
                return clip, *asked

    def __getitem__(self, index):  # type: ignore[no-untyped-def, override]
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self.size))]
        clip, question, answer = self.clip(index)
        name, kind = f"clip-question-{self.split}-{index}", self.kinds[index % len(self.kinds)]
        frames = [picture for _, picture in clip.frames()]
        return Record.of_question(name, question, answer, frames, kind=kind)


def _ask(clip: Clip, kind: str, rng: random.Random) -> tuple[str, str] | None:
    """(question, answer), or None where the clip allows no unambiguous one."""
    shown = [clip.scene(i / clip.fps) for i in range(len(clip))]
    if kind in _VERBS:
        events = [event for event in clip.events if event.kind == kind and event.time <= (len(clip) - 1) / clip.fps]
        if len(events) != 1:
            return None
        item = events[0].after or events[0].before
        return f"what {_VERBS[kind]}?", item.name  # type: ignore[union-attr]
    seen: dict[SceneObject, None] = {item: None for scene in shown for item in scene.objects}
    names = {(item.colour, item.kind) for item in seen}
    if kind == "colour":
        single = [(c, k) for c, k in sorted(names) if sum(k == other for _, other in names) == 1]
    else:
        single = [(c, k) for c, k in sorted(names) if sum(c == other for other, _ in names) == 1]
    if not single:
        return None
    colour, shape = rng.choice(single)
    return (f"what color is the {shape}?", colour) if kind == "colour" else (f"what is the {colour} shape?", shape)
