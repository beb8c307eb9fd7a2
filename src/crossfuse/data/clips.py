"""Rendered clips: shapes that move, appear, vanish and change colour, with the events and their times.

A clip is deterministic by seed and split. Its splits are disjoint as those of scenes are: the clip opens with a scene
of its split. Times are seconds from the start of the clip; frame ``i`` is shown at ``i / fps``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from PIL import Image

from crossfuse.data.questions import article
from crossfuse.data.scenes import (
    COLOURS,
    KINDS,
    MAX_OBJECTS,
    MAX_OVERLAP,
    Box,
    Scene,
    SceneObject,
    Split,
    make_scene,
    overlap,
    render,
)

EventKind = Literal["appear", "vanish", "move", "colour"]
EVENT_KINDS: tuple[EventKind, ...] = ("appear", "vanish", "move", "colour")
# Seconds from the end of one event to the start of the next, and how long a move takes.
MIN_PAUSE, MOVE_SECONDS = 0.75, 0.5
_DIRECTIONS: dict[str, tuple[int, int]] = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}


@dataclass(frozen=True)
class Event:
    """What happens at ``time`` (seconds from the start; of a move, when it begins), in words.

    ``before`` and ``after`` are the object as it was and as it becomes; ``None`` where it is not there.
    """

    time: float
    kind: EventKind
    text: str
    before: SceneObject | None
    after: SceneObject | None

    @property
    def end(self) -> float:
        """When it is over: a move takes ``MOVE_SECONDS``, all else happens at once."""
        return self.time + (MOVE_SECONDS if self.kind == "move" else 0.0)


@dataclass(frozen=True)
class Clip:
    """A first scene and the events that change it, in order of time."""

    first: Scene
    events: tuple[Event, ...]
    duration: float
    fps: float

    def __len__(self) -> int:
        """Number of frames."""
        return max(1, round(self.duration * self.fps))

    def scene(self, time: float) -> Scene:
        """The scene at a time in seconds; during a move the object is on its way."""
        objects = list(self.first.objects)
        for event in self.events:
            if event.time > time:
                break
            if event.before is None:
                assert event.after is not None
                objects.append(event.after)
                continue
            place = objects.index(event.before)
            if event.after is None:
                objects.pop(place)
            elif time < event.end:
                share = (time - event.time) / MOVE_SECONDS
                objects[place] = _between(event.before, event.after, share)
            else:
                objects[place] = event.after
        return Scene(self.first.size, self.first.background, tuple(objects))

    def frames(self) -> Iterator[tuple[float, Image.Image]]:
        """``(time in seconds, RGB picture)`` of each frame; drawn when asked for, so a long clip needs no memory.

        Frames between which nothing changes are one and the same picture.
        """
        shown: tuple[Scene, Image.Image] | None = None
        for i in range(len(self)):
            time = i / self.fps
            scene = self.scene(time)
            if shown is None or scene != shown[0]:
                shown = scene, render(scene)
            yield time, shown[1]


def make_clip(
    seed: int,
    split: Split = "train",
    duration: float = 6.0,
    fps: float = 4.0,
    events: int = 3,
    kinds: Sequence[EventKind] = EVENT_KINDS,
    objects: int = MAX_OBJECTS,
) -> Clip:
    """Clip number ``seed`` of a split, with as many events as asked for, or fewer where time or room is too short.

    Only events of ``kinds`` happen, and never are there more than ``objects`` objects. No two objects of a clip ever
    bear the same name, so every event's text names one object.
    Raises ``ValueError`` for a duration or rate that is not positive and for a negative number of events.
    """
    if not duration > 0 or not fps > 0 or events < 0:
        raise ValueError(f"duration and fps must be above 0 and events at least 0; got {duration}, {fps} and {events}")
    if objects < 1:
        raise ValueError(f"objects must be at least 1; got {objects}")
    rng = random.Random(f"clip/{split}/{seed}")
    scene = make_scene(rng.getrandbits(48), split)
    while len({item.name for item in scene.objects}) < len(scene.objects) or len(scene.objects) > objects:
        scene = make_scene(rng.getrandbits(48), split)
    present, happened, named = list(scene.objects), [], {item.name for item in scene.objects}
    for time in _times(rng, duration, events):
        order = list(kinds)
        rng.shuffle(order)
        for kind in order:
            event = _draw_event(rng, kind, time, present, scene.size, named, objects)
            if event is None:
                continue
            happened.append(event)
            if event.before is None:
                assert event.after is not None
                present.append(event.after)
            elif event.after is None:
                present.remove(event.before)
            else:
                present[present.index(event.before)] = event.after
            named |= {event.after.name} if event.after else set()
            break
    return Clip(scene, tuple(happened), duration, fps)


def _times(rng: random.Random, duration: float, count: int) -> list[float]:
    """Start times with a pause before each event and after the last one, by spreading what is left at random."""
    needed = MOVE_SECONDS + MIN_PAUSE
    count = min(count, int((duration - MIN_PAUSE) / needed))
    if count <= 0:
        return []
    left = duration - MIN_PAUSE - count * needed
    cuts = sorted(rng.uniform(0, left) for _ in range(count))
    return [round(MIN_PAUSE + i * needed + cut, 2) for i, cut in enumerate(cuts)]


def _draw_event(
    rng: random.Random,
    kind: EventKind,
    time: float,
    objects: list[SceneObject],
    side: int,
    named: set[str],
    most: int,
) -> Event | None:
    """An event of one kind, or ``None`` where there is no room for it."""
    if kind == "appear":
        newcomer = _newcomer(rng, objects, side, named) if len(objects) < min(most, MAX_OBJECTS) else None
        if newcomer is None:
            return None
        return Event(time, kind, f"{article(newcomer.name)} {newcomer.name} appears", None, newcomer)
    before = rng.choice(objects)
    if kind == "vanish":
        return Event(time, kind, f"the {before.name} vanishes", before, None) if len(objects) > 1 else None
    if kind == "colour":
        free = [colour for colour in COLOURS if f"{colour} {before.kind}" not in named]
        if not free:
            return None
        after = SceneObject(before.kind, rng.choice(free), before.size, before.box)
        return Event(time, kind, f"the {before.name} turns {after.colour}", before, after)
    directions = list(_DIRECTIONS)
    rng.shuffle(directions)
    others = [item.box for item in objects if item is not before]
    for direction in directions:
        moved = _moved(rng, before, direction, side)
        if moved is not None and all(overlap(moved.box, box) <= MAX_OVERLAP for box in others):
            return Event(time, kind, f"the {before.name} moves {direction}", before, moved)
    return None


def _newcomer(rng: random.Random, objects: list[SceneObject], side: int, named: set[str]) -> SceneObject | None:
    free = [(colour, kind) for colour in COLOURS for kind in KINDS if f"{colour} {kind}" not in named]
    colour, kind = rng.choice(free)
    for _ in range(60):
        size = round(side * rng.uniform(0.18, 0.3))
        x, y = rng.randint(0, side - size), rng.randint(0, side - size)
        box: Box = (x, y, x + size, y + size)
        if all(overlap(box, item.box) <= MAX_OVERLAP for item in objects):
            return SceneObject(kind, colour, size, box)
    return None


def _moved(rng: random.Random, item: SceneObject, direction: str, side: int) -> SceneObject | None:
    """The object at least a quarter of the side further on, or ``None`` where the border is nearer."""
    step_x, step_y = _DIRECTIONS[direction]
    x0, y0, x1, y1 = item.box
    room = {"left": x0, "right": side - x1, "up": y0, "down": side - y1}[direction]
    if room < side // 4:
        return None
    distance = rng.randint(side // 4, room)
    dx, dy = step_x * distance, step_y * distance
    return SceneObject(item.kind, item.colour, item.size, (x0 + dx, y0 + dy, x1 + dx, y1 + dy))


def _between(before: SceneObject, after: SceneObject, share: float) -> SceneObject:
    box = tuple(round(a + (b - a) * share) for a, b in zip(before.box, after.box, strict=True))
    return SceneObject(before.kind, before.colour, before.size, (box[0], box[1], box[2], box[3]))
