"""The sizes of a recipe's samples: from data that lie here, else from what is known of published sets."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, Literal, NamedTuple

from crossfuse.data.streams import StreamRecord, UnopenedStream
from crossfuse.loading import EMBEDDED
from crossfuse.training.recipe import DataSource, Recipe

Layout = Literal["chat", "stream"]

ASSUMED_TEXT = 200
ASSUMED_SUPERVISED = 0.7
ASSUMED_CLIP_SECONDS = 60.0
_SAMPLED = 32


@dataclasses.dataclass(frozen=True)
class KnownSet:
    """Records of a published set; text tokens of a record are our rough guess.

    source: who states the number of records; None: it is an estimate of ours.
    """

    records: int
    text_tokens: int
    source: str | None
    clip: Layout | None = None


# By the last part of a path or hub id, in lower case, without its ending.
KNOWN_SETS = {
    "llava_instruct_150k": KnownSet(157_712, 300, "several projects that have counted the file"),
    "llava_v1_5_mix665k": KnownSet(665_298, 400, "haotian-liu/LLaVA, issue 657"),
    "llava-instruct-mix-vsft": KnownSet(259_155, 350, "its page, split train"),
    # Its page says 1,000 to 10,000; the file has 357 MB, at the 41.8 kB a record of the whole set.
    "llava-instruct-mix-vsft-mini": KnownSet(8_500, 350, None),
    "finevision": KnownSet(24_300_000, 400, "its page"),
    "llava-onevision-1.5-instruct-data": KnownSet(22_000_000, 300, "its page, in millions"),
    "llava-video-178k": KnownSet(
        1_300_000, 150, "its paper: 178K captions, 960K open and 196K closed questions", "chat"
    ),
    "live-whisperx-526k": KnownSet(526_000, 600, "its name", "stream"),
}


@dataclasses.dataclass(frozen=True)
class SampleShape:
    """The mean sample. `records`: of all sets together, None where not known. `samples_per_row`: 1 without packing."""

    records: int | None
    text_tokens: float
    supervised: float
    image_tokens: float
    samples_per_row: float
    notes: list[str]


def sample_shape(recipe: Recipe, model: Any) -> SampleShape:
    """The mean sample of the recipe's data; ``model`` is unfused and may be on the device "meta"."""
    notes: list[str] = []
    sizes = [_size(source, recipe, notes) for source in recipe.data]
    counts = [size.records for size in sizes]
    known = [count for count in counts if count is not None]
    total = sum(known) if sizes and len(known) == len(counts) else None
    weights = [source.weight or (count or 1) for source, count in zip(recipe.data, counts, strict=True)]
    image = _image_tokens(recipe, model, notes)
    text = images = 0.0
    for weight, size in zip(weights, sizes, strict=True):
        share = weight / sum(weights)
        text += share * size.text_tokens
        if size.clip is None or recipe.video is None:
            images += share * size.pictures * image
        else:
            images += share * _clip_tokens(recipe, model, size.clip, notes)
    if not sizes:
        text, images = ASSUMED_TEXT, image
        notes.append(f"the recipe names no data: {ASSUMED_TEXT} text tokens and one image a sample are assumed")
    per_row = 1.0
    if recipe.packing is not None:
        per_row = recipe.packing.max_image_tokens / max(images, 1)
        if text * per_row > recipe.packing.max_text_tokens:
            per_row = recipe.packing.max_text_tokens / text
        per_row = max(1.0, per_row)
    return SampleShape(total, text, ASSUMED_SUPERVISED * text, images, per_row, list(dict.fromkeys(notes)))


class _SetSize(NamedTuple):
    """Of one data set: records (None: not known), text tokens and pictures of one, and what its clips are, if any."""

    records: int | None
    text_tokens: float
    pictures: float = 1.0
    clip: Layout | None = None


def _size(source: DataSource, recipe: Recipe, notes: list[str]) -> _SetSize:
    known = KNOWN_SETS.get(Path(source.path).name.lower().removesuffix(".json"))
    if source.path in ("scenes", "clips", "easy-vqa") or Path(source.path).exists():
        return _here(source, recipe, notes)
    if known is None:
        notes.append(f"{source.path} is not here and its size not known: {ASSUMED_TEXT} text tokens a sample assumed")
        return _SetSize(source.limit, ASSUMED_TEXT)
    count = known.records if source.limit is None else min(source.limit, known.records)
    by = f"by {known.source}" if known.source else "an estimate"
    notes.append(
        f"{source.path} is not here: {count:,} records ({by}) of {known.text_tokens} text tokens (an estimate) assumed"
    )
    return _SetSize(count, known.text_tokens, clip=(source.layout or known.clip) if known.clip else None)


def _here(source: DataSource, recipe: Recipe, notes: list[str]) -> _SetSize:
    """Counted, and the words of some records measured with the embedded tokenizer or guessed by their length."""
    from crossfuse.training.layouts import LaidOut
    from crossfuse.training.start import open_source

    dataset = LaidOut(open_source(source.model_copy(update={"on_error": "raise"})), source.layout)
    step = max(1, len(dataset) // _SAMPLED)
    samples = [dataset[i] for i in range(0, len(dataset), step)]
    texts, pictures = [_words(item) for item in samples], sum(map(_pictures, samples)) / len(samples)
    clips: list[Layout] = [_clip(item) for item in samples if _clip(item) is not None]  # type: ignore[misc]
    clip = clips[0] if len(clips) > len(samples) / 2 else None
    if recipe.model in EMBEDDED:
        from crossfuse.api import load_embedded

        tokenizer = load_embedded("start")[1].tokenizer
        tokens = sum(len(tokenizer(text).input_ids) + 3 for text in texts) / len(texts)
    else:
        notes.append(f"text tokens of {source.path}: guessed from {len(texts)} records, 4 characters a token")
        tokens = sum(len(text) / 4 + 10 for text in texts) / len(texts)
    return _SetSize(len(dataset), tokens, pictures, clip)


def _words(item: Any) -> str:
    if isinstance(item, StreamRecord):
        said = [frame.words or "" for frame in item.frames]
        return "\n".join([item.opening, *said, item.question or "", item.answer or ""])
    record = item.record if isinstance(item, UnopenedStream) else item
    return "\n".join(message.text for message in record.messages)


def _pictures(item: Any) -> int:
    if isinstance(item, StreamRecord):
        return len(item.frames)
    return len((item.record if isinstance(item, UnopenedStream) else item).images)


def _clip(item: Any) -> Layout | None:
    if isinstance(item, StreamRecord):
        return None
    return "stream" if isinstance(item, UnopenedStream) else "chat" if item.videos else None


def _image_tokens(recipe: Recipe, model: Any, notes: list[str]) -> float:
    """Tokens of one image before any compression."""
    vision = model.config.vision_config
    patch, merge = vision.patch_size, getattr(vision, "spatial_merge_size", None)
    if merge is None:
        side = getattr(model.config, "image_size", None) or vision.image_size
        stride = getattr(model.config, "image_stride", None) or patch
        return float((side // stride) ** 2)
    pixels = recipe.image_pixels.max if recipe.image_pixels is not None else None
    if pixels is None:
        pixels = 640 * 480
        notes.append("the recipe bounds no image size: pictures of 640 × 480 pixels are assumed")
    elif recipe.image_pixels is not None and recipe.image_pixels.min is None:
        notes.append(f"pictures are taken to have the largest size, {pixels:,} pixels")
    return pixels / (patch * merge) ** 2


def _clip_tokens(recipe: Recipe, model: Any, layout: Layout, notes: list[str]) -> float:
    """Image tokens of one clip. The frames of a stream are images each; of a chat's video one token may cover two."""
    assert recipe.video is not None
    from crossfuse.data.videos import VideoSampling

    video, vision = recipe.video, model.config.vision_config
    stride = vision.patch_size * getattr(vision, "spatial_merge_size", 1)
    pair = 1 if layout == "stream" else getattr(vision, "temporal_patch_size", 1)
    sampling = VideoSampling(video.fps, video.max_seconds, video.max_pixels, video.max_image_tokens)
    frames, side = sampling.frame_count(ASSUMED_CLIP_SECONDS), round(video.max_pixels**0.5)
    width, height = sampling.frame_size(side, side, frames, stride, pair)
    notes.append(f"clips of {ASSUMED_CLIP_SECONDS:g} s are assumed")
    return math.ceil(frames / pair) * (width // stride) * (height // stride)
