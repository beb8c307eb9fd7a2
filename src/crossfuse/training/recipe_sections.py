"""The sections of a recipe: data, what is trained, adapters, packing, image and video sizes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from crossfuse.data.clips import EVENT_KINDS, EventKind
from crossfuse.data.scenes import MAX_OBJECTS
from crossfuse.data.stream_collate import StreamLayout
from crossfuse.data.streams import CLIP_FPS
from crossfuse.fusion import nearest

Part = Literal["frozen", "lora", "full"]


class RecipeSection(BaseModel):
    """Base of all parts of a recipe: immutable, unknown keys refused with the nearest name."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    title: ClassVar[str] = ""
    """Name of the recipe's field that holds the section."""

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, values: Any) -> Any:
        if isinstance(values, dict):
            cls.refuse_unknown(values)
        return values

    @classmethod
    def refuse_unknown(cls, values: Iterable[Any]) -> None:
        """ValueError with the nearest name where a key is none of the fields."""
        for key in values:
            if key not in cls.model_fields:
                what = f"`{cls.title}` of a recipe" if cls.title else "a recipe"
                known = ", ".join(cls.model_fields)
                raise ValueError(f"{what} has no field {key!r}{nearest(str(key), cls.model_fields)}; known: {known}")


class RenderedClips(RecipeSection):
    """Rendered clips: how long they are and what happens in them."""

    title = "clips"

    duration: float = Field(default=6.0, gt=0)
    """Seconds."""
    fps: float = Field(default=CLIP_FPS, gt=0)
    events: int = Field(default=3, ge=1)
    """Most events of a clip."""
    kinds: tuple[EventKind, ...] = EVENT_KINDS
    objects: int = Field(default=MAX_OBJECTS, ge=1)
    """Most objects at a time."""


class DataSource(RecipeSection):
    """One data set. With several, each sample comes from one of them with a chance proportional to `weight`."""

    title = "data"

    path: str
    """A file, a folder, a hub id, "scenes", "clips" (rendered ones) or "easy-vqa"."""
    format: str | None = None
    """Name of the adapter; None: found out from the file."""
    split: str | None = None
    """Such as "train"; None: the format's own choice."""
    subset: str | None = None
    """The configuration of a hub set that has several."""
    images: str | None = None
    """Folder that relative image and video paths start from; None: the file's own."""
    limit: int | None = Field(default=None, ge=1)
    """The first so many records; of rendered scenes how many to draw."""
    weight: float | None = Field(default=None, gt=0)
    """None: its number of records."""
    kinds: tuple[str, ...] | None = None
    """Rendered scenes and clips only: the kinds of question; None: all."""
    layout: Literal["chat", "stream"] | None = None
    """Chat: the model's chat template, a video in the place of its slot (questions about videos). Stream: each frame
    followed by the words that are spoken until the next, as a `StreamSession` takes and says them. None: a record
    whose words have times (LiveCC, Live-WhisperX) is a stream, every other one a chat."""
    clips: RenderedClips | None = None
    """Rendered clips only; with the layout "stream" their events are announced."""
    allow_urls: bool = False
    on_error: Literal["raise", "skip"] = "raise"
    """A record with a missing or broken image: stop, or leave it out and count it."""


class Compose(RecipeSection):
    """A text-only LLM and a vision encoder, joined by `VisionLanguageModel.compose`."""

    title = "compose"

    llm: str
    """Directory, hub id or a text GGUF."""
    vision: str
    """Directory or hub id; of a vision-language model its vision encoder is taken."""
    projector: Literal["mlp", "linear"] = "mlp"
    image_size: int | None = Field(default=None, ge=1)
    vision_feature_layer: int | None = None


class Trainable(RecipeSection):
    """What is trained. LoRA (Hu et al. 2022) reaches the named part only, never the vision encoder."""

    title = "trainable"

    llm: Part = "lora"
    projector: Part = "frozen"
    fusion: bool = True
    """The fusion's own weights, where it has any, in full."""
    vision_blocks: int = Field(default=0, ge=0)
    """The last so many blocks of the vision encoder, in full."""


class LearningRates(RecipeSection):
    """Peak rates of single parts; None: the recipe's `learning_rate`."""

    title = "learning_rates"

    llm: float | None = Field(default=None, gt=0)
    projector: float | None = Field(default=None, gt=0)
    fusion: float | None = Field(default=None, gt=0)
    vision: float | None = Field(default=None, gt=0)


class Lora(RecipeSection):
    """Low-rank adapters; `target_modules` None: attention and MLP projections of the decoder's blocks."""

    title = "lora"

    rank: int = Field(default=16, ge=1)
    alpha: int = Field(default=32, ge=1)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    target_modules: str | None = None
    """A regular expression over full module names, or "all-linear" (every linear layer of the decoder)."""


class Packing(RecipeSection):
    """Most text tokens and most image tokens of one packed row, each counted apart whatever the fusion."""

    title = "packing"

    max_text_tokens: int = Field(default=2048, ge=1)
    max_image_tokens: int = Field(default=20480, ge=1)
    on_overflow: Literal["raise", "skip"] = "raise"
    """A sample that exceeds a budget alone."""


class ImagePixels(RecipeSection):
    """Bounds on height × width of an image, for processors that keep the aspect ratio (Qwen2.5-VL's)."""

    title = "image_pixels"

    min: int | None = Field(default=None, ge=1)
    max: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> ImagePixels:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"image_pixels.min={self.min} exceeds image_pixels.max={self.max}; swap them")
        return self


class Stream(RecipeSection):
    """The tokens between frames and words of a stream: the fields of `crossfuse.data.stream_collate.StreamLayout`."""

    title = "stream"

    silence: str = "..."
    """One token of the model: nothing is said."""
    keep_silence: bool = False
    delimiter: str = "\n"
    """Text after every frame."""
    end: str | None = None
    """One token, after the words of a frame; None: the end-of-sequence token."""

    def build(self) -> StreamLayout:
        """The layout for collator and session; they check that silence and end are one token of the model each."""
        return StreamLayout(**self.model_dump())


class Video(RecipeSection):
    """How clips are sampled: the fields of `crossfuse.data.videos.VideoSampling`, which states what becomes of a clip
    that would exceed `max_image_tokens` (its frames are made smaller until it fits)."""

    title = "video"

    fps: float = Field(default=2.0, gt=0)
    max_seconds: float = Field(default=180.0, gt=0)
    """A longer clip gets as many frames as this takes, spread evenly over it."""
    max_pixels: int = Field(default=504 * 504, ge=1)
    """Of one frame."""
    max_image_tokens: int = Field(default=46080, ge=1)
