"""A picture of a few records: their images (or frames) with the conversation below."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from crossfuse.data.images import open_image
from crossfuse.data.records import Record
from crossfuse.data.videos import VideoSampling, read_clip

_WIDTH, _MARGIN, _GAP = 400, 16, 8
_MAX_LINES, _MAX_PICTURES = 26, 9
_INK, _PALE, _GROUND, _CARD = "#1c2733", "#6b7785", "#eceff2", "#ffffff"
_ROLES = {"user": "#0072b2", "assistant": "#00785a", "system": "#6b7785"}


def contact_sheet(records: Sequence[Record], columns: int = 3, allow_urls: bool = False) -> Image.Image:
    """One card a record, at most ``columns`` beside each other; RGB.

    A card shows up to nine images, or of each video four frames with their times, then who says what, shortened. What
    cannot be opened is named in its place. Raises ``ValueError`` without records.
    """
    if not records:
        raise ValueError("a contact sheet needs at least one record")
    cards = [_card(record, allow_urls) for record in records]
    columns = max(1, min(columns, len(cards)))
    rows = [cards[i : i + columns] for i in range(0, len(cards), columns)]
    heights = [max(card.height for card in row) for row in rows]
    sheet = Image.new(
        "RGB",
        (columns * (_WIDTH + _MARGIN) + _MARGIN, sum(heights) + (len(rows) + 1) * _MARGIN),
        _GROUND,
    )
    top = _MARGIN
    for row, height in zip(rows, heights, strict=True):
        for column, card in enumerate(row):
            sheet.paste(card, (_MARGIN + column * (_WIDTH + _MARGIN), top))
        top += height + _MARGIN
    return sheet


def _card(record: Record, allow_urls: bool) -> Image.Image:
    body, bold = _font(13), _font(13, bold=True)
    pictures = _pictures(record, allow_urls)
    across = 1 if len(pictures) == 1 else 2 if len(pictures) <= 4 else 3
    side = (_WIDTH - 2 * _GAP - (across - 1) * _GAP) // across
    tallest = round(side * 0.75) if across > 1 else side
    thumbnails = [(_fitted(picture, side, tallest), caption) for picture, caption in pictures]
    lines = _lines(record, body, bold, _WIDTH - 2 * _GAP)
    line_height = 18
    rows = [thumbnails[i : i + across] for i in range(0, len(thumbnails), across)]
    heights = [max(t.height for t, _ in row) + (line_height if any(c for _, c in row) else 0) for row in rows]
    height = sum(heights) + len(rows) * _GAP + len(lines) * line_height + 2 * _GAP
    card = Image.new("RGB", (_WIDTH, height), _CARD)
    draw = ImageDraw.Draw(card)
    top = _GAP
    for row, row_height in zip(rows, heights, strict=True):
        for column, (thumbnail, caption) in enumerate(row):
            left = _GAP + column * (side + _GAP)
            card.paste(thumbnail, (left + (side - thumbnail.width) // 2, top))
            if caption:
                words = _wrapped(caption, body, side)[0]
                draw.text((left, top + row_height - line_height + 1), words, font=body, fill=_PALE)
        top += row_height + _GAP
    for text, font, colour in lines:
        draw.text((_GAP, top), text, font=font, fill=colour)
        top += line_height
    return card


def _pictures(record: Record, allow_urls: bool) -> list[tuple[Image.Image, str]]:
    pictures: list[tuple[Image.Image, str]] = []
    for source in record.images[:_MAX_PICTURES]:
        try:
            image = open_image(source, allow_urls)
            pictures.append((image, f"{image.width} x {image.height}"))
        except (OSError, ValueError) as error:
            pictures.append((_placeholder(), str(error)))
    for video in record.videos[:2]:
        try:
            frames = read_clip(video, VideoSampling(fps=1.0, max_seconds=16))
            chosen = [frames[round(i * (len(frames) - 1) / 3)] for i in range(4)] if len(frames) > 4 else frames
            pictures += [(image, f"{time:.1f} s") for time, image in chosen]
        except (OSError, ValueError) as error:
            pictures.append((_placeholder(), str(error)))
    return pictures


def _placeholder() -> Image.Image:
    image = Image.new("RGB", (160, 90), "#f3dddd")
    ImageDraw.Draw(image).text((80, 45), "cannot be opened", font=_font(12), fill="#8c2f2f", anchor="mm")
    return image


def _fitted(image: Image.Image, width: int, height: int) -> Image.Image:
    """Shrunk into the box; small pictures are enlarged by whole pixels, so that they can be seen."""
    scale = min(width / image.width, height / image.height)
    if scale >= 2:
        return image.resize((image.width * int(scale), image.height * int(scale)), Image.Resampling.NEAREST)
    size = (max(1, round(image.width * min(scale, 1))), max(1, round(image.height * min(scale, 1))))
    return image.resize(size, Image.Resampling.LANCZOS)


def _lines(record: Record, body: Any, bold: Any, width: int) -> list[tuple[str, Any, str]]:
    lines: list[tuple[str, Any, str]] = []
    hidden = len(record.images) - _MAX_PICTURES
    if hidden > 0:
        lines.append((f"and {hidden} more images", body, _PALE))
    lines += [(line, bold, _INK) for line in _wrapped(record.id, bold, width)]
    for message in record.messages:
        slots = Counter(part.type for part in message.content if part.type != "text")
        counted = ", ".join(kind if count == 1 else f"{count} {kind}s" for kind, count in slots.items())
        lines.append((f"{message.role} [{counted}]" if counted else message.role, bold, _ROLES[message.role]))
        lines += [(line, body, _INK) for line in _wrapped(message.text or "(empty)", body, width)]
    return lines if len(lines) <= _MAX_LINES else [*lines[: _MAX_LINES - 1], ("…", body, _PALE)]


def _wrapped(text: str, font: Any, width: int) -> list[str]:
    """Lines of at most ``width`` pixels; a word that is too long for a line is cut."""
    lines: list[str] = []
    for paragraph in text.strip().split("\n"):
        line = ""
        for word in paragraph.split():
            while font.getlength(word) > width:
                cut = next(n for n in range(len(word) - 1, 0, -1) if font.getlength(word[:n]) <= width)
                if line:
                    lines.append(line)
                    line = ""
                lines.append(word[:cut])
                word = word[cut:]
            longer = f"{line} {word}".strip()
            if font.getlength(longer) > width:
                lines.append(line)
                longer = word
            line = longer
        lines.append(line)
    return lines or [""]


def _font(size: int, bold: bool = False) -> Any:
    """DejaVu Sans, which matplotlib brings along: Pillow's own font has few letters beyond Latin."""
    import matplotlib

    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name), size)
