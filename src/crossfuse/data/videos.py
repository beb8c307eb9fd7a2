"""Frames of the span of a video, bounded in number and size, with times from the start of the span."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from PIL import Image

from crossfuse.data.records import Video


@dataclass(frozen=True)
class VideoSampling:
    """How a video becomes frames.

    fps: frames a second; frame k is the first one at or after k / fps seconds of the span.
    max_seconds: of a longer span, as many frames as this takes, spread evenly over it. None: no bound.
    max_pixels: larger frames are shrunk to this many pixels, the aspect kept.
    max_tokens: image tokens of one video. Where its frames take more, all of them are shrunk alike, to whole tokens: at
        2 fps and 504 x 504 pixels, 3 minutes of Qwen2.5-VL (28 x 28 pixels and two frames a token) are 58,320 tokens;
        with 46,080 each frame is shrunk to 448 x 448.
    """

    fps: float = 2.0
    max_seconds: float | None = 180.0
    max_pixels: int = 504 * 504
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("fps", "max_seconds", "max_pixels", "max_tokens"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be above 0; got {value}")

    @property
    def max_frames(self) -> int | None:
        """Most frames of one video."""
        return None if self.max_seconds is None else max(1, math.ceil(self.max_seconds * self.fps))

    def frame_count(self, seconds: float) -> int:
        """Frames of a span of that length: at least one."""
        count = max(1, math.ceil(seconds * self.fps - 1e-6))
        return count if self.max_frames is None else min(count, self.max_frames)

    def frame_size(
        self, width: int, height: int, frames: int, stride: int = 1, frames_a_token: int = 1
    ) -> tuple[int, int]:
        """(width, height) to which a frame is shrunk. stride: side of the square of pixels that one token covers."""
        from crossfuse.streaming.video import fitted

        width, height = fitted(width, height, self.max_pixels)
        if self.max_tokens is None:
            return width, height
        grids = math.ceil(frames / frames_a_token)
        rows, columns = max(1, round(height / stride)), max(1, round(width / stride))
        if grids * rows * columns <= self.max_tokens:
            return width, height
        scale = math.sqrt(self.max_tokens / grids / (rows * columns))
        rows, columns = max(1, math.floor(rows * scale)), max(1, math.floor(columns * scale))
        if grids * rows * columns > self.max_tokens:
            raise ValueError(
                f"{frames} frames take at least {grids * rows * columns} tokens, more than max_tokens="
                f"{self.max_tokens}; lower fps or max_seconds"
            )
        return columns * stride, rows * stride


def read_clip(
    video: Video, sampling: VideoSampling, stride: int = 1, frames_a_token: int = 1
) -> list[tuple[float, Image.Image]]:
    """``(seconds from the start of the span, RGB picture)`` of the sampled frames, at least one.

    stride, frames_a_token: pixels (one side) and frames that one token of the model covers, for ``max_tokens``.
    Raises ``FileNotFoundError`` for a missing file; ``ValueError`` for no video, or no frame in the span.
    """
    kept: list[tuple[float, Image.Image]] = []
    most, step = sampling.max_frames, 1
    for slot, image in _frames(video, sampling):
        if slot % step == 0:
            kept.append((slot / sampling.fps, image))
        # Memory stays bounded whatever the length: every second frame goes once there are twice too many.
        if most is not None and len(kept) >= 2 * most:
            kept, step = kept[::2], step * 2
    if not kept:
        raise ValueError(f"{video.path} has no frame from {video.start or 0:g} s on")
    if most is not None and len(kept) > most:
        kept = [kept[i * len(kept) // most] for i in range(most)]
    size = sampling.frame_size(*kept[0][1].size, len(kept), stride, frames_a_token)
    return [
        (time, image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)) for time, image in kept
    ]


def video_header(path: str) -> tuple[float | None, tuple[int, int]]:
    """(seconds by the file's header or None, (width, height)), nothing decoded.

    Raises ``FileNotFoundError``, or ``ValueError`` for what is no video.
    """
    import av

    if not os.path.exists(path):
        raise FileNotFoundError(f"video file not found: {path}; check the path")
    if os.path.isdir(path):
        return _folder_header(path)
    try:
        with av.open(path) as container:
            stream = _video_stream(container, path)
            seconds: float | None = None
            if stream.duration is not None and stream.time_base is not None:
                seconds = float(stream.duration * stream.time_base)
            elif container.duration is not None:
                seconds = container.duration / 1e6
            return seconds, (stream.width, stream.height)
    except av.error.FFmpegError as error:
        raise ValueError(f"{path} is not a video that can be read ({error.strerror})") from error


def _folder_header(path: str) -> tuple[float | None, tuple[int, int]]:
    from crossfuse.streaming.video import PICTURES

    names = sorted(name for name in os.listdir(path) if name.lower().endswith(PICTURES))
    if not names:
        raise ValueError(f"{path} holds no picture ({', '.join(PICTURES)})")
    with Image.open(os.path.join(path, names[0])) as image:
        return None, image.size


def _frames(video: Video, sampling: VideoSampling) -> Iterator[tuple[int, Image.Image]]:
    """(slot, picture) of the first frame of each 1 / fps seconds of the span."""
    if not os.path.exists(video.path) and "://" not in video.path:
        raise FileNotFoundError(f"video file not found: {video.path}; check the path")
    start = video.start or 0.0
    if os.path.isdir(video.path):
        yield from _pictures(video, sampling)
        return
    import av

    latest, seek = -1, start > 0
    while True:
        try:
            with av.open(video.path) as container:
                for time, frame in _decoded(container, video.path, start, seek):
                    if video.end is not None and time > video.end + 1e-6:
                        return
                    slot = math.floor((time - start) * sampling.fps + 1e-4)
                    if slot > latest:
                        latest = slot
                        yield slot, _picture(frame, sampling.max_pixels)
            return
        except av.error.FFmpegError as error:
            # Some streams can only be decoded from their beginning, which holds the decoder's settings.
            if not seek or latest >= 0:
                raise ValueError(f"{video.path} is not a video that can be read ({error.strerror})") from error
            seek = False


def _decoded(container: Any, path: str, start: float, seek: bool) -> Iterator[tuple[float, Any]]:
    """(seconds from the first frame of the file, frame) from ``start`` on."""
    stream = _video_stream(container, path)
    first = float(stream.start_time * stream.time_base) if stream.start_time is not None else 0.0
    if seek:
        container.seek(int((first + start) / stream.time_base), stream=stream, backward=True)
    for frame in container.decode(stream):
        if frame.time is not None and frame.time - first >= start - 1e-4:
            yield frame.time - first, frame


def _video_stream(container: Any, path: str) -> Any:
    if not container.streams.video:
        raise ValueError(f"{path} holds no video stream")
    return container.streams.video[0]


def _picture(frame: Any, max_pixels: int) -> Image.Image:
    from crossfuse.streaming.video import fitted

    aspect = float(getattr(frame, "sample_aspect_ratio", None) or 1) or 1.0
    width, height = fitted(round(frame.width * aspect), frame.height, max_pixels)
    image: Image.Image = frame.to_image(width=width, height=height)
    return image.rotate(frame.rotation, expand=True) if frame.rotation else image


def _pictures(video: Video, sampling: VideoSampling) -> Iterator[tuple[int, Image.Image]]:
    """A folder of frames that were taken at ``fps``."""
    from crossfuse.streaming.video import read_video

    start, latest = video.start or 0.0, -1
    for frame in read_video(video.path, max_pixels=sampling.max_pixels, frame_rate=sampling.fps):
        if video.end is not None and frame.time > video.end:
            return
        slot = math.floor((frame.time - start) * sampling.fps + 1e-4)
        if frame.time >= start and slot > latest:
            latest = slot
            yield slot, frame.image
