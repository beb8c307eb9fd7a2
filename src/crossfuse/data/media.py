"""A record with its images and videos opened, as a processor takes them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from PIL import Image

from crossfuse.data.images import MAX_RATIO, open_image, refuse_extreme
from crossfuse.data.lengths import takes_videos, template_messages, token_geometry
from crossfuse.data.records import ImagePart, Record, VideoPart
from crossfuse.data.videos import VideoSampling, read_clip


@dataclass(frozen=True)
class Clip:
    """Frames of one video and how many a second they are."""

    frames: list[Image.Image]
    fps: float

    @property
    def metadata(self) -> dict[str, Any]:
        """What video processors ask for; every frame is one that is to be seen."""
        count = len(self.frames)
        return {"fps": self.fps, "total_num_frames": count, "frames_indices": list(range(count))}


@dataclass(frozen=True)
class OpenedRecord:
    """A record, its images in the order of their slots, its videos where the processor takes videos, and its messages.

    For processors without videos a video is a run of images: its frames are among the images.
    """

    record: Record
    images: list[Image.Image]
    clips: list[Clip]
    messages: list[dict[str, Any]]


@dataclass(frozen=True)
class MediaOpener:
    """Opens the images and videos of records for one processor.

    Raises ``FileNotFoundError`` or ``ValueError``, in one line, for what is missing or broken, for a side below
    ``min_side`` pixels, and for a shape that processors which keep the aspect ratio refuse.
    """

    processor: Any
    video: VideoSampling
    allow_urls: bool = False
    min_side: int = 1

    def __call__(self, record: Record) -> OpenedRecord:
        native = takes_videos(self.processor)
        images = [self._image(image) for image in record.images]
        clips = [self._clip(video) for video in record.videos]
        messages = template_messages(record, [len(clip.frames) for clip in clips], native)
        if not native:
            images, clips = _frames_among(record, images, clips), []
        return OpenedRecord(record, images, clips, messages)

    def _image(self, source: Any) -> Image.Image:
        image = open_image(source, self.allow_urls)
        keeps_aspect = getattr(self.processor.image_processor, "merge_size", None) is not None
        try:
            refuse_extreme(*image.size, self.min_side, MAX_RATIO if keeps_aspect else math.inf)
        except ValueError as error:
            raise ValueError(f"{source if isinstance(source, str) else 'an image'}: {error}") from error
        return image

    def _clip(self, video: Any) -> Clip:
        frames = read_clip(video, self.video, *token_geometry(self.processor))
        times = [time for time, _ in frames]
        fps = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else self.video.fps
        return Clip([image for _, image in frames], fps)


def _frames_among(record: Record, images: list[Image.Image], clips: list[Clip]) -> list[Image.Image]:
    """The record's images and the frames of its videos, in the order of their slots."""
    pictures, videos = iter(images), iter(clips)
    slots: list[Image.Image] = []
    for message in record.messages:
        for part in message.content:
            if isinstance(part, ImagePart):
                slots.append(next(pictures))
            elif isinstance(part, VideoPart):
                slots += next(videos).frames
    return slots
