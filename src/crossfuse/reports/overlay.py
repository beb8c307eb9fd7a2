"""Anchors drawn on the image: the patch grid, and each anchor's word and cosine in green at its patch."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from PIL import Image, ImageDraw, ImageFont

GREEN = (57, 255, 120)
SMALLEST_SIDE = 768


class Box(NamedTuple):
    """A rectangle in pixels: left, top, right, bottom."""

    left: float
    top: float
    right: float
    bottom: float

    @property
    def centre(self) -> tuple[float, float]:
        return ((self.left + self.right) / 2, (self.top + self.bottom) / 2)

    def overlap(self, other: Box) -> float:
        """Area shared with `other`, in square pixels."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(width, 0.0) * max(height, 0.0)


class PlacedAnchor(Protocol):
    """What the overlay reads of `crossfuse.Anchor`."""

    @property
    def row(self) -> int: ...
    @property
    def column(self) -> int: ...
    @property
    def cosine(self) -> float: ...


AnchorLabel = tuple[str, int, int, float]
"""The word, its patch's row and column, and the cosine."""


def anchor_labels(anchors: Sequence[PlacedAnchor], words: Sequence[str]) -> list[AnchorLabel]:
    """Join `crossfuse.Anchor` objects with the word of each (same order) into what `draw_anchors` takes."""
    if len(anchors) != len(words):
        raise ValueError(f"one word an anchor: got {len(words)} words for {len(anchors)} anchors")
    return [(word, a.row, a.column, a.cosine) for a, word in zip(anchors, words, strict=True)]


def draw_anchors(
    image: Image.Image,
    labels: Sequence[AnchorLabel],
    grid: tuple[int, int],
    area: tuple[float, float, float, float] | None = None,
) -> Image.Image:
    """Draw anchors on a copy of `image`.

    Args:
        image: any size and mode. One whose shorter side has fewer than 768 pixels is enlarged to that; a
            larger one keeps its size, and the lettering grows with it.
        labels: (word, row, column, cosine) of each anchor, rows and columns counted in patches from the top
            left.
        grid: (rows, columns) of patches.
        area: left, top, right, bottom of the grid in pixels of `image`, where a processor crops or pads; by
            default the grid covers the whole image.

    Returns:
        A new RGB image.

    Raises:
        ValueError: a patch outside the grid, or a grid without patches.
    """
    rows, columns = grid
    if rows < 1 or columns < 1:
        raise ValueError(f"the patch grid needs at least 1 row and 1 column; got {rows} x {columns}")
    for word, row, column, _ in labels:
        if not (0 <= row < rows and 0 <= column < columns):
            raise ValueError(f"anchor {word!r} lies at patch ({row}, {column}), outside the grid {rows} x {columns}")
    canvas = _enlarged(_on_white(image))
    layer = Image.new("RGBA", canvas.size, (0, 0, 0, 0))
    draw = ImageDraw.Draw(layer)
    factor = canvas.width / image.width
    covered = Box(0, 0, *canvas.size) if area is None else Box(*(edge * factor for edge in area))
    patch_width = (covered.right - covered.left) / columns
    patch_height = (covered.bottom - covered.top) / rows
    _draw_grid(draw, canvas.size, grid, covered)
    font = _font(_font_size(canvas.size, (patch_width, patch_height)))
    texts: dict[Box, list[str]] = {}
    for word, row, column, cosine in labels:
        left, top = covered.left + column * patch_width, covered.top + row * patch_height
        patch = _inside(Box(left, top, left + patch_width, top + patch_height), canvas.size)
        texts.setdefault(patch, []).append(f"{_visible(word)} {cosine:.2f}")
    line = max(2, round(min(canvas.size) / 300))
    placed: list[tuple[Box, str]] = []
    for patch, lines in texts.items():
        text = "\n".join(lines)
        box = _place(patch, _label_size(draw, text, font), canvas.size, [b for b, _ in placed], list(texts))
        placed.append((box, text))
        if box.overlap(patch) == 0:
            draw.line([patch.centre, box.centre], fill=(*GREEN, 200), width=line)
    # Frames go over the leader lines and labels over both: what must be read is never crossed out.
    for patch in texts:
        draw.rectangle(patch, outline=(*GREEN, 255), width=line)
    for box, text in placed:
        draw.rounded_rectangle(box, radius=0.25 * font.size, fill=(0, 0, 0, 190))
        draw.multiline_text(box.centre, text, font=font, fill=(*GREEN, 255), align="center", anchor="mm")
    return Image.alpha_composite(canvas.convert("RGBA"), layer).convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        solid = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", solid.size, (255, 255, 255, 255)), solid).convert("RGB")
    return image.convert("RGB")


def _enlarged(image: Image.Image) -> Image.Image:
    factor = SMALLEST_SIDE / min(image.size)
    if factor <= 1:
        return image
    size = (round(image.width * factor), round(image.height * factor))
    return image.resize(size, Image.Resampling.BILINEAR)


def _inside(box: Box, size: tuple[int, int]) -> Box:
    """The part of a box that lies on the picture (a line on its edge where a processor's padding is meant)."""
    x = [min(max(edge, 0.0), size[0]) for edge in (box.left, box.right)]
    y = [min(max(edge, 0.0), size[1]) for edge in (box.top, box.bottom)]
    return Box(x[0], y[0], x[1], y[1])


def _draw_grid(draw: ImageDraw.ImageDraw, size: tuple[int, int], grid: tuple[int, int], area: Box) -> None:
    line = max(1, round(min(size) / 1000))
    seen = _inside(area, size)
    margins = seen != Box(0, 0, *size)
    for column in range(0 if margins else 1, grid[1] + margins):
        x = area.left + (area.right - area.left) * column / grid[1]
        draw.line([(x, seen.top), (x, seen.bottom)], fill=(128, 128, 128, 130), width=line)
    for row in range(0 if margins else 1, grid[0] + margins):
        y = area.top + (area.bottom - area.top) * row / grid[0]
        draw.line([(seen.left, y), (seen.right, y)], fill=(128, 128, 128, 130), width=line)


def _font_size(size: tuple[int, int], patch: tuple[float, float]) -> int:
    # Readable first, in a report's small picture too: never below a fortieth of the shorter side, however
    # fine the grid.
    shorter = min(size)
    return round(min(max(0.22 * min(patch), shorter / 40), shorter / 24))


@functools.lru_cache(maxsize=8)
def _font(size: int) -> ImageFont.FreeTypeFont:
    import matplotlib

    # DejaVu comes with matplotlib and holds Latin, Greek, Cyrillic and more; Pillow's own font is Latin only.
    return ImageFont.truetype(f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans-Bold.ttf", size)


def _visible(word: str) -> str:
    stripped = word.strip()
    return stripped or word.replace("\n", "↵").replace("\t", "→").replace(" ", "␣") or "∅"


def _label_size(draw: ImageDraw.ImageDraw, text: str, font: ImageFont.FreeTypeFont) -> tuple[float, float]:
    left, top, right, bottom = draw.multiline_textbbox((0, 0), text, font=font, align="center", anchor="mm")
    return (right - left + 0.5 * font.size, bottom - top + 0.5 * font.size)


def _place(
    patch: Box,
    size: tuple[float, float],
    canvas: tuple[int, int],
    labels: Sequence[Box],
    patches: Sequence[Box],
) -> Box:
    """The place nearest to `patch` that covers no earlier label and no anchored patch, or else the least
    covered one.

    A label small enough to leave its own patch recognisable stands on it.
    """
    width, height = patch.right - patch.left, patch.bottom - patch.top
    on_patch = size[1] <= 0.75 * height and size[0] <= 1.6 * width
    best, least = patch, float("inf")
    for x, y in _offsets(patch.centre, size, (width, height), on_patch=on_patch):
        left = min(max(x - size[0] / 2, 0), max(canvas[0] - size[0], 0))
        top = min(max(y - size[1] / 2, 0), max(canvas[1] - size[1], 0))
        box = Box(left, top, left + size[0], top + size[1])
        # A hidden label loses a word, a hidden patch only its frame: labels weigh more.
        covered = 4 * sum(box.overlap(other) for other in labels)
        covered += sum(box.overlap(other) for other in patches if not on_patch)
        if covered == 0:
            return box
        if covered < least:
            best, least = box, covered
    return best


def _offsets(
    centre: tuple[float, float], size: tuple[float, float], patch: tuple[float, float], *, on_patch: bool
) -> Iterator[tuple[float, float]]:
    """Centres to try: the patch's own, then rings around the patch, above and below before the sides."""
    if on_patch:
        yield centre
    for ring in range(12):
        across = 0.55 * patch[0] + size[0] * (0.5 + 0.55 * ring)
        along = 0.65 * patch[1] + size[1] * (0.5 + 0.6 * ring)
        for dy, dx in ((-1, 0), (1, 0), (0, 1), (0, -1), (-1, 1), (-1, -1), (1, 1), (1, -1)):
            yield centre[0] + dx * across, centre[1] + dy * along
