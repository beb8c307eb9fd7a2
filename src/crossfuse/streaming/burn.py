"""A video of the captioned frames with their captions written into them."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from crossfuse.streaming.captions import Caption

_CLOCK = Fraction(1, 1000)
_CODECS = ("libx264", "mpeg4")


class BurnedVideo:
    """Writes sampled frames, each from its own time on, as a fragmented MP4: what a killed run leaves plays.

    Raises OSError where the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]):
        import av

        self.path = Path(path)
        if not self.path.parent.is_dir():
            raise FileNotFoundError(f"no such folder: {self.path.parent}")
        self._container: Any = av.open(
            str(self.path), "w", format="mp4", options={"movflags": "frag_keyframe+empty_moov+default_base_moof"}
        )
        self._stream: Any = None
        self._last = -1
        self._end = 0.0
        self._image: Image.Image | None = None

    def write(self, caption: Caption, image: Image.Image) -> None:
        """Append one frame. All frames get the size of the first."""
        if self._stream is None:
            self._start(image)
        size = (self._stream.width, self._stream.height)
        self._image = with_caption(image if image.size == size else image.resize(size), caption.text)
        self._put(caption.start)
        self._end = caption.end

    def close(self) -> None:
        """Show the last frame to its end and finish the file."""
        if self._stream is not None:
            self._put(self._end)
            self._container.mux(self._stream.encode())
        self._container.close()

    def __enter__(self) -> BurnedVideo:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self, image: Image.Image) -> None:
        import av

        codec = next(name for name in _CODECS if name in av.codecs_available)
        self._stream = self._container.add_stream(codec, rate=1000)
        # Small frames are enlarged so that words can be read; encoders want even sides.
        scale = max(1, -(-320 // max(image.size)))
        self._stream.width, self._stream.height = (max(2, side * scale // 2 * 2) for side in image.size)
        self._stream.pix_fmt = "yuv420p"
        self._stream.time_base = _CLOCK
        self._stream.codec_context.gop_size = 8
        self._stream.codec_context.max_b_frames = 0
        if codec == "libx264":
            self._stream.options = {"tune": "zerolatency", "preset": "veryfast"}

    def _put(self, time: float) -> None:
        import av

        assert self._image is not None
        frame = av.VideoFrame.from_image(self._image)
        self._last = max(self._last + 1, round(time * 1000))
        frame.pts, frame.time_base = self._last, _CLOCK
        self._container.mux(self._stream.encode(frame))


def with_caption(image: Image.Image, text: str) -> Image.Image:
    """A copy with the text in a dark band at the bottom, wrapped to the width; the picture itself where it is blank."""
    words = text.split()
    if not words:
        return image.copy()
    size = max(12, image.width // 24)
    font = ImageFont.load_default(size)
    draw = ImageDraw.Draw(image)
    room = image.width - size
    lines = [""]
    for word in words:
        longer = f"{lines[-1]} {word}".strip()
        if draw.textlength(longer, font=font) <= room or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    step = round(size * 1.3)
    lines = lines[-max(1, image.height // (2 * step)) :]  # at most the lower half
    band = step * len(lines) + size // 2
    shaded = image.convert("RGBA")
    shade = Image.new("RGBA", (image.width, band), (0, 0, 0, 170))
    shaded.alpha_composite(shade, (0, image.height - band))
    result = shaded.convert("RGB")
    draw = ImageDraw.Draw(result)
    for number, line in enumerate(lines):
        left = (image.width - draw.textlength(line, font=font)) / 2
        draw.text((left, image.height - band + size // 4 + number * step), line, font=font, fill="white")
    return result
