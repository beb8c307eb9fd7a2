"""The sizes of a recipe's samples: from data that lie here, else from what is known of published sets."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from crossfuse.training.recipe import DataSource, Recipe

ASSUMED_TEXT = 200
ASSUMED_SUPERVISED = 0.7
ASSUMED_CLIP_SECONDS = 60.0
_SAMPLED = 32


@dataclasses.dataclass(frozen=True)
class KnownSet:
    """Records as the set's own page counts them; text tokens of a record are our rough guess."""

    records: int | None
    text_tokens: int
    video: bool = False


# By the last part of a path or hub id, in lower case, without its ending.
KNOWN_SETS = {
    "llava_instruct_150k": KnownSet(157_712, 300),
    "llava_v1_5_mix665k": KnownSet(665_298, 400),
    "llava-instruct-mix-vsft": KnownSet(259_155, 350),
    "llava-instruct-mix-vsft-mini": KnownSet(None, 350),
    "finevision": KnownSet(24_300_000, 400),
    "llava-onevision-1.5-instruct-data": KnownSet(22_000_000, 300),
    "llava-video-178k": KnownSet(1_300_000, 150, video=True),
    "live-whisperx-526k": KnownSet(526_000, 600, video=True),
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
    counts = [records for records, _, _ in sizes]
    known = [count for count in counts if count is not None]
    total = sum(known) if sizes and len(known) == len(counts) else None
    weights = [source.weight or (count or 1) for source, count in zip(recipe.data, counts, strict=True)]
    image = _image_tokens(recipe, model, notes)
    text = images = 0.0
    for weight, (_, tokens, video) in zip(weights, sizes, strict=True):
        share = weight / sum(weights)
        text += share * tokens
        images += share * (_clip_tokens(recipe, model, notes) if video and recipe.video is not None else image)
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


def _size(source: DataSource, recipe: Recipe, notes: list[str]) -> tuple[int | None, float, bool]:
    """(records, text tokens of one, is video)."""
    known = KNOWN_SETS.get(Path(source.path).name.lower().removesuffix(".json"))
    if source.path in ("scenes", "easy-vqa") or Path(source.path).exists():
        here, tokens = _here(source, recipe, notes)
        return here, tokens, bool(known and known.video)
    if known is None:
        notes.append(f"{source.path} is not here and its size not known: {ASSUMED_TEXT} text tokens a sample assumed")
        return source.limit, ASSUMED_TEXT, False
    count = known.records if source.limit is None else min(source.limit, known.records or source.limit)
    how_many = "an unknown number of" if count is None else f"{count:,}"
    notes.append(f"{source.path} is not here: {how_many} records of {known.text_tokens} text tokens assumed")
    return count, known.text_tokens, known.video


def _here(source: DataSource, recipe: Recipe, notes: list[str]) -> tuple[int, float]:
    """Counted, and the words of some records measured with the embedded tokenizer or guessed by their length."""
    from crossfuse.training.start import open_source

    dataset = open_source(source.model_copy(update={"on_error": "raise"}))
    step = max(1, len(dataset) // _SAMPLED)
    texts = ["\n".join(message.text for message in dataset[i].messages) for i in range(0, len(dataset), step)]
    if recipe.model in ("embedded", "embedded:start"):
        from crossfuse.api import load_embedded

        tokenizer = load_embedded("start")[1].tokenizer
        return len(dataset), sum(len(tokenizer(text).input_ids) + 3 for text in texts) / len(texts)
    notes.append(f"text tokens of {source.path}: guessed from {len(texts)} records, 4 characters a token")
    return len(dataset), sum(len(text) / 4 + 10 for text in texts) / len(texts)


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


def _clip_tokens(recipe: Recipe, model: Any, notes: list[str]) -> float:
    assert recipe.video is not None
    from crossfuse.data.videos import VideoSampling

    video, vision = recipe.video, model.config.vision_config
    stride = vision.patch_size * getattr(vision, "spatial_merge_size", 1)
    pair = getattr(vision, "temporal_patch_size", 1)
    sampling = VideoSampling(video.fps, video.max_seconds, video.max_pixels, video.max_image_tokens)
    frames, side = sampling.frame_count(ASSUMED_CLIP_SECONDS), round(video.max_pixels**0.5)
    width, height = sampling.frame_size(side, side, frames, stride, pair)
    notes.append(f"clips of {ASSUMED_CLIP_SECONDS:g} s are assumed")
    return math.ceil(frames / pair) * (width // stride) * (height // stride)
