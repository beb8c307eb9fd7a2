"""The caption loop: frames in, captions out, as they are made."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from crossfuse.streaming.captions import Caption

if TYPE_CHECKING:
    from crossfuse.streaming.session import StreamSession
    from crossfuse.streaming.video import VideoFrame


@dataclasses.dataclass(frozen=True)
class FramePrompt:
    """The words around every frame.

    opening: once, before the first frame. before, after: around each frame. Frames of a model that was trained on
    streams need no words of their own (`stream_prompt`); other models get a chat turn a frame (`turn_prompt`).
    alone: forget the stream before each frame, for models that were never trained on more than one image.
    """

    opening: str = ""
    before: str = ""
    after: str = ""
    alone: bool = False


@dataclasses.dataclass(frozen=True)
class CaptionedFrame:
    """A caption (blank where the model was silent) with its frame and how long it took."""

    caption: Caption
    frame: VideoFrame
    latency: float  # seconds from the frame's arrival to its last word


def captions_of(
    session: StreamSession, frames: Iterable[VideoFrame], prompt: FramePrompt, interval: float = 1.0
) -> Iterator[CaptionedFrame]:
    """Caption frame after frame. ``interval`` is the time between samples (1 / fps): each caption is shown for the
    frame's own interval, so captions never overlap and none waits for the next frame."""
    for frame in frames:
        begin = time.perf_counter()
        if prompt.alone:
            session.reset()
        if session.stream.is_new and prompt.opening:
            session.add_text(prompt.opening)
        if prompt.before:
            session.add_text(prompt.before)
        session.add_frame(frame.image)
        if prompt.after:
            session.add_text(prompt.after)
        text = "".join(session.generate()).strip()
        latency = time.perf_counter() - begin
        end = (int(frame.time / interval + 1e-6) + 1) * interval
        yield CaptionedFrame(Caption(frame.time, max(end, frame.time + 1e-3), text), frame, latency)


def stream_prompt(prompt: str) -> FramePrompt:
    """The prompt once, then frames alone: for models trained on streams."""
    return FramePrompt(opening=prompt.rstrip("\n") + "\n" if prompt.strip() else "")


def turn_prompt(processor: Any, prompt: str, alone: bool = False) -> FramePrompt:
    """A turn of the model's chat template for each frame, in one conversation or (``alone``) each in its own.

    ValueError where the prompt is blank or holds the image placeholder, or the template has no place for one image.
    """
    placeholder = processor.image_token
    if not prompt.strip():
        raise ValueError('the prompt is empty; say what to do with a frame, as "describe the image"')
    if placeholder in prompt:
        raise ValueError(f"the prompt holds {placeholder!r}, which stands for an image in this model")
    content = [{"type": "image"}, {"type": "text", "text": prompt}]
    written: str = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    if written.count(placeholder) != 1:
        raise ValueError(
            f"the chat template writes {written.count(placeholder)} placeholders for one image; use --layout stream"
        )
    before, after = written.split(placeholder)
    opening = processor.tokenizer.bos_token or ""
    if opening and before.startswith(opening):
        return FramePrompt(opening, before[len(opening) :], after, alone)
    return FramePrompt("", before, after, alone)
