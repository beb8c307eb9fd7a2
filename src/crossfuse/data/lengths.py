"""How many tokens a record takes, from sizes alone: for packing, plans and checks."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from PIL import Image

from crossfuse.data.images import Source
from crossfuse.data.records import ImagePart, Record, TextPart, VideoPart
from crossfuse.data.videos import VideoSampling, video_header


class Lengths(NamedTuple):
    """Tokens of a record: of its text with the template's own words, and of its images and videos."""

    text: int
    image: int

    @property
    def total(self) -> int:
        """Positions of the row that the collator makes of the record."""
        return self.text + self.image


def template_messages(record: Record, video_frames: Sequence[int], native: bool) -> list[dict[str, Any]]:
    """The messages as a chat template takes them. ``video_frames``: the frames of each video of the record; where the
    processor takes no videos (``native`` False) every frame is an image of its own."""
    frames = iter(video_frames)
    messages = []
    for message in record.messages:
        parts: list[dict[str, Any]] = []
        for part in message.content:
            if isinstance(part, TextPart):
                parts.append({"type": "text", "text": part.text})
            elif isinstance(part, ImagePart):
                parts.append({"type": "image"})
            elif isinstance(part, VideoPart):
                count = next(frames)
                parts += [{"type": "video"}] if native else [{"type": "image"}] * count
        messages.append({"role": message.role, "content": parts})
    return messages


class TokenCounter:
    """Counts the tokens of records for one processor; images by their size, videos by their header, nothing decoded.

    Equals what the `Collator` makes of a record with images. Of a video the header tells length and size.
    """

    def __init__(self, processor: Any, video: VideoSampling | None = None) -> None:
        self.processor, self.video = processor, video or VideoSampling()
        self.stride, self.frames_a_token = token_geometry(processor)
        self._by_size: dict[tuple[int, int], int] = {}

    def __call__(self, record: Record) -> Lengths:
        sizes = [image_size(image) for image in record.images]
        clips = [self._clip(video) for video in record.videos]
        return self.lengths(record, sizes, clips)

    def lengths(
        self, record: Record, sizes: list[tuple[int, int]], clips: list[tuple[int, int, int]] | None = None
    ) -> Lengths:
        """The same with the (width, height) of every image and the (frames, width, height) of every video at hand."""
        native = takes_videos(self.processor)
        tokens = sum(self.image_tokens(*size) for size in sizes)
        slots = len(sizes)
        clips = clips or []
        for frames, width, height in clips:
            if native:
                tokens += self._video_tokens(frames, width, height)
            else:
                tokens += frames * self.image_tokens(width, height)
            slots += 1 if native else frames
        messages = template_messages(record, [frames for frames, _, _ in clips], native)
        return Lengths(self._text_tokens(messages) - slots, tokens)

    def image_tokens(self, width: int, height: int) -> int:
        """Tokens of an image of that size in pixels."""
        if (width, height) not in self._by_size:
            self._by_size[width, height] = self._count(width, height)
        return self._by_size[width, height]

    def _count(self, width: int, height: int) -> int:
        count = getattr(self.processor, "_get_num_multimodal_tokens", None)
        if count is not None:
            try:
                return int(count(image_sizes=[[height, width]])["num_image_tokens"][0])
            except (AttributeError, KeyError, NotImplementedError, TypeError):
                pass  # processors that cannot tell from a size are asked with an image
        blank = Image.new("RGB", (width, height))
        token = self.processor.image_token
        ids = self.processor(text=[token], images=[blank], add_special_tokens=False)["input_ids"][0]
        return list(ids).count(self.processor.tokenizer.convert_tokens_to_ids(token))

    def _video_tokens(self, frames: int, width: int, height: int) -> int:
        sizes = [[frames, height, width]]
        return int(self.processor._get_num_multimodal_tokens(video_sizes=sizes)["num_video_tokens"][0])

    def _text_tokens(self, messages: list[dict[str, Any]]) -> int:
        from crossfuse.data.collate import starts_with_bos
        from crossfuse.data.spans import render_supervised

        tokenizer = self.processor.tokenizer
        text = render_supervised(self.processor, messages).text
        text = self.processor.prepare_inputs_layout(images=None, text=[text])[1][0]
        return len(tokenizer(text, add_special_tokens=not starts_with_bos(text, tokenizer)).input_ids)

    def _clip(self, video: Any) -> tuple[int, int, int]:
        seconds, (width, height) = video_header(video.path)
        end = video.end if seconds is None or (video.end is not None and video.end < seconds) else seconds
        frames = self.video.frame_count(1.0 if end is None else max(end - (video.start or 0.0), 0.0))
        if os.path.isdir(video.path):
            frames = min(len(os.listdir(video.path)), self.video.max_frames or len(os.listdir(video.path)))
        return (frames, *self.video.frame_size(width, height, frames, self.stride, self.frames_a_token))


def takes_videos(processor: Any) -> bool:
    """Whether a processor has video slots of its own; with others a video is a run of images."""
    parts = (getattr(processor, name, None) for name in ("video_processor", "video_token"))
    return all(part is not None for part in parts)


def token_geometry(processor: Any) -> tuple[int, int]:
    """(side in pixels of the square that one token of a video covers, frames that it covers); (1, 1) where unknown."""
    part = processor.video_processor if takes_videos(processor) else processor.image_processor
    patch, merge = getattr(part, "patch_size", None), getattr(part, "merge_size", 1) or 1
    if not isinstance(patch, int):
        patch, merge = getattr(processor, "patch_size", None) or 1, 1
    temporal = getattr(part, "temporal_patch_size", 1) if takes_videos(processor) else 1
    return patch * merge, temporal


def image_size(source: Source) -> tuple[int, int]:
    """(width, height) of an upright picture by its header.

    Raises ``FileNotFoundError`` or ``ValueError`` in one line that names the file.
    """
    from crossfuse.data.images import open_header

    if isinstance(source, Image.Image):
        return source.size
    with open_header(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
        turned = image.getexif().get(0x0112, 1) in (5, 6, 7, 8)
        return (image.height, image.width) if turned else image.size
