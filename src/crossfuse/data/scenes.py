"""Rendered scenes: a few coloured shapes on a light ground, with the box of every shape.

A scene is drawn from an integer seed and a split. Splits never share a scene: the content of a scene (which
shapes of which colours lie in which cells of a 4 x 4 grid) is hashed, and the hash alone decides the split it
belongs to; a scene that was drawn for another split is drawn again.

Boxes are ``(x0, y0, x1, y1)`` in pixels of the scene, x to the right, y down, the last pixel excluded.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from PIL import Image, ImageDraw

Split = Literal["train", "validation", "test"]
Box = tuple[int, int, int, int]
RGB = tuple[int, int, int]

# The first three kinds and the first eight colours are those of easy-VQA, with its RGB values.
KINDS: tuple[str, ...] = ("circle", "rectangle", "triangle", "star", "cross", "diamond")
COLOURS: dict[str, RGB] = {
    "blue": (0, 0, 255),
    "red": (255, 0, 0),
    "brown": (165, 42, 42),
    "green": (0, 255, 0),
    "gray": (128, 128, 128),
    "teal": (0, 128, 128),
    "black": (0, 0, 0),
    "yellow": (255, 255, 0),
    "orange": (255, 140, 0),
    "purple": (128, 0, 200),
    "pink": (255, 105, 180),
}
# How often a kind or colour is drawn. Some are more frequent than others, so that "popular" absent objects exist.
KIND_WEIGHTS: dict[str, int] = dict(zip(KINDS, (3, 3, 3, 2, 2, 2), strict=True))
COLOUR_WEIGHTS: dict[str, int] = {colour: 3 if i < 4 else 2 for i, colour in enumerate(COLOURS)}

MIN_SIZE, MAX_SIZE = 64, 128
MAX_OBJECTS = 6
MAX_OVERLAP = 0.05
_SUPERSAMPLING = 4
_GRID = 4


@dataclass(frozen=True)
class SceneObject:
    """One shape: its kind, its colour's name, the longer side of its box and the box (both in pixels)."""

    kind: str
    colour: str
    size: int
    box: Box

    @property
    def centre(self) -> tuple[float, float]:
        """Centre of the box ``(x, y)`` in pixels."""
        return (self.box[0] + self.box[2]) / 2, (self.box[1] + self.box[3]) / 2

    @property
    def name(self) -> str:
        """Colour and kind, as questions name it."""
        return f"{self.colour} {self.kind}"


@dataclass(frozen=True)
class Scene:
    """A square picture of ``size`` x ``size`` pixels; later objects are drawn over earlier ones."""

    size: int
    background: RGB
    objects: tuple[SceneObject, ...]


def overlap(a: Box, b: Box) -> float:
    """Intersection over union of two boxes, 0 to 1."""
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    if width <= 0 or height <= 0:
        return 0.0
    common = width * height
    areas = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1])
    return common / (areas - common)


def scene_key(scene: Scene) -> str:
    """The content of a scene: sorted ``colour kind row column`` of its objects on a 4 x 4 grid."""
    parts = []
    for item in scene.objects:
        x, y = item.centre
        parts.append(f"{item.name} {int(_GRID * y / scene.size)} {int(_GRID * x / scene.size)}")
    return "; ".join(sorted(parts))


def split_of(scene: Scene) -> Split:
    """The split that a scene belongs to by its content: 80 % train, 10 % validation, 10 % test of all contents."""
    digit = hashlib.sha256(scene_key(scene).encode()).digest()[0] % 10
    return "test" if digit == 9 else "validation" if digit == 8 else "train"


def make_scene(seed: int, split: Split = "train") -> Scene:
    """Draw the scene number ``seed`` of a split; the same arguments always give the same scene.

    Raises ``ValueError`` for an unknown split.
    """
    if split not in get_args(Split):
        raise ValueError(f"split must be one of {', '.join(get_args(Split))}; got {split!r}")
    attempt = 0
    while True:
        # A string seed is hashed with SHA-512 by `random`, independent of the platform and of PYTHONHASHSEED.
        scene = _draw_scene(random.Random(f"scene/{split}/{seed}/{attempt}"))
        if split_of(scene) == split:
            return scene
        attempt += 1


def _draw_scene(rng: random.Random) -> Scene:
    side = rng.choice(range(MIN_SIZE, MAX_SIZE + 1, 8))
    low = rng.randint(224, 245)
    background: RGB = (rng.randint(low, 255), rng.randint(low, 255), rng.randint(low, 255))
    wanted = rng.randint(1, MAX_OBJECTS)
    largest = {1: 0.5, 2: 0.42, 3: 0.36}.get(wanted, 0.3)
    objects: list[SceneObject] = []
    while len(objects) < wanted:
        kind = draw_kind(rng)
        colour = draw_colour(rng)
        for _ in range(60):
            box = _draw_box(rng, kind, side, largest)
            if all(overlap(box, other.box) <= MAX_OVERLAP for other in objects):
                objects.append(SceneObject(kind, colour, max(box[2] - box[0], box[3] - box[1]), box))
                break
        else:
            break
    return Scene(side, background, tuple(objects))


def draw_kind(rng: random.Random) -> str:
    """A kind of shape, by ``KIND_WEIGHTS``."""
    return rng.choices(list(KIND_WEIGHTS), list(KIND_WEIGHTS.values()))[0]


def draw_colour(rng: random.Random) -> str:
    """A colour's name, by ``COLOUR_WEIGHTS``."""
    return rng.choices(list(COLOUR_WEIGHTS), list(COLOUR_WEIGHTS.values()))[0]


def _draw_box(rng: random.Random, kind: str, side: int, largest: float) -> Box:
    width = height = round(side * rng.uniform(0.16, largest))
    if kind == "rectangle":
        # Up to 1 : 2 either way; a square is a rectangle too.
        ratio = 2 ** rng.uniform(-1, 1)
        width, height = (width, round(width * ratio)) if ratio < 1 else (round(height / ratio), height)
        width, height = max(width, side // 10), max(height, side // 10)
    elif kind == "triangle":
        height = round(width * 0.87)
    x, y = rng.randint(0, side - width), rng.randint(0, side - height)
    return (x, y, x + width, y + height)


def render(scene: Scene) -> Image.Image:
    """Draw a scene as an anti-aliased RGB picture of ``scene.size`` x ``scene.size`` pixels."""
    side = scene.size * _SUPERSAMPLING
    canvas = Image.new("RGB", (side, side), scene.background)
    draw = ImageDraw.Draw(canvas)
    for item in scene.objects:
        x0, y0, x1, y1 = (float(value * _SUPERSAMPLING) for value in item.box)
        draw_shape(draw, item.kind, (x0, y0, x1, y1), COLOURS[item.colour])
    return canvas.reduce(_SUPERSAMPLING)


def draw_shape(draw: ImageDraw.ImageDraw, kind: str, box: tuple[float, float, float, float], fill: RGB | int) -> None:
    """Fill one shape into a box (pixels of the canvas, the last pixel excluded).

    Raises ``ValueError`` for an unknown kind.
    """
    x0, y0, x1, y1 = box
    if kind == "circle":
        draw.ellipse((x0, y0, x1 - 1, y1 - 1), fill=fill)
    elif kind == "rectangle":
        draw.rectangle((x0, y0, x1 - 1, y1 - 1), fill=fill)
    elif kind in _OUTLINES:
        width, height = x1 - x0 - 1, y1 - y0 - 1
        draw.polygon([(x0 + u * width, y0 + v * height) for u, v in _OUTLINES[kind]()], fill=fill)
    else:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}; got {kind!r}")


def _star() -> list[tuple[float, float]]:
    points = []
    for i in range(10):
        radius = 1.0 if i % 2 == 0 else 0.42
        angle = math.pi * i / 5
        points.append((radius * math.sin(angle), -radius * math.cos(angle)))
    xs, ys = [x for x, _ in points], [y for _, y in points]
    return [((x - min(xs)) / (max(xs) - min(xs)), (y - min(ys)) / (max(ys) - min(ys))) for x, y in points]


def _cross() -> list[tuple[float, float]]:
    a, b = 0.34, 0.66
    return [(a, 0), (b, 0), (b, a), (1, a), (1, b), (b, b), (b, 1), (a, 1), (a, b), (0, b), (0, a), (a, a)]


# Outlines in the unit square, x to the right and y down.
_OUTLINES: dict[str, Callable[[], list[tuple[float, float]]]] = {
    "triangle": lambda: [(0.5, 0), (1, 1), (0, 1)],
    "diamond": lambda: [(0.5, 0), (1, 0.5), (0.5, 1), (0, 0.5)],
    "star": _star,
    "cross": _cross,
}
