"""Frames as they come: (time, image) from a file, a pipe, a folder of pictures or any Python iterable.

Nothing here asks for a length, a duration or a frame count; the end is where decoding ends. Times are seconds from the
first frame of the stream, whatever its clock says.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

MAX_PIXELS = 504 * 504
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_URL = re.compile(r"[a-z][a-z0-9+.-]+://")


class VideoError(ValueError):
    """A source that cannot be read, or not to its end; the message is one line."""


class VideoFrame(NamedTuple):
    """One sampled frame."""

    time: float  # seconds since the first frame of the stream
    image: Image.Image  # RGB, upright


def read_video(
    source: Any,
    *,
    fps: float | None = None,
    max_frames: int | None = None,
    max_pixels: int | None = MAX_PIXELS,
    frame_rate: float | None = None,
) -> Iterator[VideoFrame]:
    """Frames of ``source``, one by one; what belongs to it is closed when the iterator ends, fails or is closed.

    Args:
        source: a video file or URL, ``"-"`` (standard input), a binary file object, a folder of pictures (in the order
            of the numbers in their names), or an iterable of (time, image) pairs or of images.
        fps: at most one frame for each 1 / fps seconds: the first whose time falls into it. None takes every frame.
        max_frames: end after this many; a shorter source ends by itself.
        max_pixels: larger frames are shrunk to this many pixels, their aspect kept; None leaves them.
        frame_rate: frames a second of a source without times (pictures, bare images); default: ``fps``, or 1.

    Raises:
        ValueError: fps, max_frames or max_pixels out of range.
        FileNotFoundError: no such file or folder.
        VideoError: not a video, no video stream, not one frame, or an end inside a frame (after the frames before it).
    """
    for name, value in (
        ("fps", fps),
        ("max_frames", max_frames),
        ("max_pixels", max_pixels),
        ("frame_rate", frame_rate),
    ):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be above 0; got {value}")
    return _sampled(_open(source, frame_rate or fps or 1.0), fps, max_frames, max_pixels, _name(source))


def _open(source: Any, frame_rate: float) -> Iterator[tuple[float, Any]]:
    if isinstance(source, str) and source == "-":
        return _decoded(_Unseekable(sys.stdin.buffer), "standard input")
    if isinstance(source, str) and _URL.match(source):
        return _decoded(source, source)
    if isinstance(source, (str, Path)):
        path = Path(source).expanduser()
        if path.is_dir():
            return _pictures(path, frame_rate)
        if not path.exists():
            raise FileNotFoundError(f"no such file or folder: {source}")
        return _decoded(str(path), str(source))
    if hasattr(source, "read"):
        return _decoded(source, _name(source))
    if isinstance(source, Iterable):
        return _given(source, frame_rate)
    raise ValueError(
        f"a video is a path, '-', a folder of pictures or an iterable of (time, image); got {type(source).__name__}"
    )


def _sampled(
    frames: Iterator[tuple[float, Any]], fps: float | None, most: int | None, max_pixels: int | None, name: str
) -> Iterator[VideoFrame]:
    """Keep the first frame of each 1 / fps seconds. Only what is kept is converted."""
    count, slot, latest = 0, -1, 0.0
    try:
        for time, frame in frames:
            latest = time = max(time, latest)  # clocks of live streams jump back
            if fps is not None:
                own = math.floor(time * fps + 1e-6)
                if own <= slot:
                    continue
                slot = own
            yield VideoFrame(time, _image(frame, max_pixels))
            count += 1
            if count == most:
                return
    finally:
        close = getattr(frames, "close", None)
        if close is not None:
            close()
    if not count:
        raise VideoError(f"{name} holds no frame that could be decoded; check the file with ffprobe")


def _decoded(source: Any, name: str) -> Iterator[tuple[float, Any]]:
    """(time, PyAV frame) of the first video stream. Broken packets are passed over and told at the end."""
    import av

    try:
        container = av.open(source)
    except av.error.FFmpegError as error:
        raise VideoError(f"{name} is not a video that can be read ({_reason(error)}){_hint(source)}") from error
    with container:
        if not container.streams.video:
            raise VideoError(f"{name} holds no video stream")
        stream = container.streams.video[0]
        stream.thread_type = "SLICE"  # frame threads would hold back several frames of a live stream
        rate = float(stream.average_rate or 25)
        start: float | None = None
        time, broken = 0.0, 0
        try:
            for frame in _frames(container, stream):
                if frame is None:
                    broken += 1
                    continue
                clock = frame.time if frame.time is not None else (start or 0.0) + time + 1 / rate
                start = clock if start is None else start
                time = clock - start
                yield time, frame
        except av.error.FFmpegError as error:
            raise VideoError(f"{name} breaks off after {time:.2f} s ({_reason(error)})") from error
        if broken:
            packets = "1 packet" if broken == 1 else f"{broken} packets"
            raise VideoError(
                f"{name} ends inside a frame or is damaged: {packets} could not be decoded, {time:.2f} s could"
            )


def _frames(container: Any, stream: Any) -> Iterator[Any]:
    """Decoded frames, None for a packet that is cut short or cannot be decoded."""
    import av

    for packet in container.demux(stream):
        if packet.is_corrupt:
            yield None
            continue
        try:
            yield from packet.decode()
        except av.error.InvalidDataError:
            yield None


def _pictures(folder: Path, rate: float) -> Iterator[tuple[float, Any]]:
    paths = [path for path in folder.iterdir() if path.suffix.lower() in PICTURES]
    if not paths:
        raise VideoError(f"{folder} holds no picture ({', '.join(PICTURES)})")
    for number, path in enumerate(sorted(paths, key=_natural)):
        try:
            with Image.open(path) as image:
                image.load()
                yield number / rate, image
        except OSError as error:
            raise VideoError(f"{path} cannot be read as a picture ({error})") from error


def _given(source: Iterable[Any], rate: float) -> Iterator[tuple[float, Any]]:
    iterator = iter(source)
    start: float | None = None
    try:
        for number, item in enumerate(iterator):
            time, image = item if isinstance(item, tuple) else (number / rate, item)
            start = float(time) if start is None else start
            yield float(time) - start, image
    finally:
        close = getattr(iterator, "close", None)
        if close is not None:
            close()


def _image(frame: Any, max_pixels: int | None) -> Image.Image:
    """RGB, upright, square pixels, at most ``max_pixels``."""
    if hasattr(frame, "to_image"):
        aspect = float(getattr(frame, "sample_aspect_ratio", None) or 1) or 1.0
        width, height = fitted(round(frame.width * aspect), frame.height, max_pixels)
        image: Image.Image = frame.to_image(width=width, height=height)
        return image.rotate(frame.rotation, expand=True) if frame.rotation else image
    if not isinstance(frame, Image.Image):
        if getattr(frame, "ndim", 0) != 3 or frame.shape[-1] != 3:
            kind = getattr(frame, "shape", type(frame).__name__)
            raise VideoError(f"a frame is a PIL image or an (H, W, 3) array; got {kind}")
        frame = Image.fromarray(frame)
    from PIL import ImageOps

    upright = ImageOps.exif_transpose(frame).convert("RGB")
    size = fitted(*upright.size, max_pixels)
    return upright if size == upright.size else upright.resize(size, Image.Resampling.BICUBIC)


def fitted(width: int, height: int, max_pixels: int | None) -> tuple[int, int]:
    """The largest size of the same aspect with at most ``max_pixels``; never larger than it was."""
    if max_pixels is None or width * height <= max_pixels:
        return max(1, width), max(1, height)
    scale = math.sqrt(max_pixels / (width * height))
    return max(1, math.floor(width * scale)), max(1, math.floor(height * scale))


class _Unseekable:
    """Standard input: bytes in their order, nothing else."""

    def __init__(self, stream: Any):
        self.read = stream.read


def _natural(path: Path) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.name.lower())]


def _name(source: Any) -> str:
    if isinstance(source, str) and source == "-":
        return "standard input"
    return str(source) if isinstance(source, (str, Path)) else str(getattr(source, "name", type(source).__name__))


def _reason(error: Any) -> str:
    return str(getattr(error, "strerror", None) or error)


def _hint(source: Any) -> str:
    if isinstance(source, _Unseekable):
        return "; a pipe needs a container that can be read from the front: MPEG-TS, Matroska or fragmented MP4"
    return ""
