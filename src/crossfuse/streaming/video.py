"""Frames as they come: (time, image) from a file, a pipe, a folder of pictures or any Python iterable.

Nothing here asks for a length, a duration or a frame count; the end is where decoding ends. Times are seconds from the
first frame of the stream, whatever its clock says.
"""

from __future__ import annotations

import contextlib
import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
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
    start: float = 0.0,
    end: float | None = None,
) -> Iterator[VideoFrame]:
    """Frames of ``source``, one by one; what belongs to it is closed when the iterator ends, fails or is closed.

    Args:
        source: a video file or URL, ``"-"`` (standard input), a binary file object, a folder of pictures (in the order
            of the numbers in their names), or an iterable of (time, image) pairs or of images.
        fps: at most one frame for each 1 / fps seconds: the first whose time falls into it. None takes every frame.
        max_frames: most frames. Of a source that can be read twice (a file, a folder, a list) and holds more, so many
            are spread evenly over it, first and last included; counting takes a pass of decoding before the first
            frame. Any other source is live: it ends after so many. A shorter source ends by itself.
        max_pixels: larger frames are shrunk to this many pixels, their aspect kept; None leaves them.
        frame_rate: frames a second of a source without times (pictures, bare images); default: ``fps``, or 1.
        start, end: seconds from the first frame of the source: what lies before ``start`` or from ``end`` on is passed
            over, and times count from the first frame that is not.

    Raises:
        ValueError: fps, max_frames, max_pixels or the span out of range.
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
    if start < 0 or (end is not None and end <= start):
        raise ValueError(f"a span starts at 0 or later and ends after its start; got {start} to {end}")

    def sampled() -> Iterator[tuple[float, Any]]:
        return _sampled(_span(_open(source, frame_rate or fps or 1.0), start, end), fps)

    frames = sampled()  # what does not exist is refused here, not at the first frame
    if max_frames is not None and _is_finite(source):
        frames.close()  # type: ignore[attr-defined]
        return _converted(_spread(sampled, max_frames), None, max_pixels, _name(source))
    return _converted(frames, max_frames, max_pixels, _name(source))


def padded(frames: Sequence[VideoFrame], multiple: int) -> list[VideoFrame]:
    """The frames, the last one repeated up to a multiple: what towers need that take several frames at once (Qwen's
    take 2). ValueError without a frame."""
    if not frames or multiple < 1:
        raise ValueError(f"padding takes at least 1 frame and a multiple of at least 1; got {len(frames)}, {multiple}")
    return [*frames, *[frames[-1]] * (-len(frames) % multiple)]


def _is_finite(source: Any) -> bool:
    """Can be read twice and ends."""
    if isinstance(source, str) and (source == "-" or _URL.match(source)):
        return False
    if isinstance(source, (str, Path)):
        path = Path(source).expanduser()
        return path.is_file() or path.is_dir()  # no named pipe, no device
    return isinstance(source, Sequence)


def _spread(sampled: Any, most: int) -> Iterator[tuple[float, Any]]:
    """At most ``most`` frames of all, evenly; an error that ends the source is told after them."""
    count, failure = 0, None
    try:
        for _ in sampled():
            count += 1
    except VideoError as error:
        failure = error
    places = set(range(count))
    if count > most:
        places = {round(i * (count - 1) / max(1, most - 1)) for i in range(most)}
    last = max(places, default=-1)
    frames = sampled()
    try:
        for index, item in enumerate(frames):
            if index in places:
                yield item
            if index >= last:
                break
    finally:
        frames.close()
    if failure is not None:
        raise failure


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


def _span(frames: Iterator[tuple[float, Any]], start: float, end: float | None) -> Iterator[tuple[float, Any]]:
    first: float | None = None
    with contextlib.closing(frames):  # type: ignore[type-var]
        for time, frame in frames:
            if end is not None and time >= end - 1e-6:
                return
            if time >= start - 1e-6:
                first = time if first is None else first
                yield time - first, frame


def _sampled(frames: Iterator[tuple[float, Any]], fps: float | None) -> Iterator[tuple[float, Any]]:
    """Keep the first frame of each 1 / fps seconds."""
    slot, latest = -1, 0.0
    with contextlib.closing(frames):  # type: ignore[type-var]
        for time, frame in frames:
            latest = time = max(time, latest)  # clocks of live streams jump back
            if fps is not None:
                own = math.floor(time * fps + 1e-6)
                if own <= slot:
                    continue
                slot = own
            yield time, frame


def _converted(
    frames: Iterator[tuple[float, Any]], most: int | None, max_pixels: int | None, name: str
) -> Iterator[VideoFrame]:
    """Only what is kept is converted."""
    count = 0
    with contextlib.closing(frames):  # type: ignore[type-var]
        for time, frame in frames:
            yield VideoFrame(time, _image(frame, max_pixels))
            count += 1
            if count == most:
                return
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
