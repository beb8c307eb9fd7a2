"""What is trained, on what and for how long: a validated description of one run.

Read from YAML by `crossfuse.training.recipe_files`; run by `crossfuse.training.trainer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from crossfuse.fusion import Fusion, make_fusion
from crossfuse.training.recipe_sections import (
    Compose,
    DataSource,
    ImagePixels,
    LearningRates,
    Lora,
    Packing,
    RecipeSection,
    Stream,
    Trainable,
    Video,
)

__all__ = [
    "Compose",
    "DataSource",
    "ImagePixels",
    "LearningRates",
    "Lora",
    "Packing",
    "Recipe",
    "Stream",
    "Trainable",
    "Video",
    "set_dotted",
    "untag",
]

Tag = Literal["paper", "ours"]
SECTIONS = (Compose, DataSource, ImagePixels, LearningRates, Lora, Packing, Stream, Trainable, Video)
# Fields of which one at most may be set.
EXCLUSIVE = (
    ("steps", "epochs"),
    ("warmup_steps", "warmup_ratio"),
    ("model", "compose"),
    ("validation", "validation_share"),
)


class Recipe(RecipeSection):
    """One fine-tuning run. Unknown fields are refused, the nearest name suggested.

    Two runs have an equal budget where `steps`, `batch_size` and `accumulation` are equal: the same samples in the
    same order (`seed`), whatever is trained; wall time differs and is reported.
    """

    description: str = ""
    model: str | None = None
    """Directory, hub id, "embedded" or "embedded:start" (the common start for fair comparisons); None where `compose`
    is given or the caller brings the model."""
    compose: Compose | None = None
    start_from: str | None = None
    """A finished run (or its export) whose trained weights are loaded first: the stage before this one."""
    fusion: dict[str, Any] = Field(default={"name": "insertion"})
    """`name` and fields of a fusion, as `crossfuse.make_fusion` takes them."""
    data: tuple[DataSource, ...] = ()
    validation: tuple[DataSource, ...] = ()
    validation_share: float | None = Field(default=None, gt=0, lt=1)
    """This share of the records of `data`, drawn by `seed`, is never trained on and serves as `validation`."""
    trainable: Trainable = Trainable()
    learning_rates: LearningRates = LearningRates()
    lora: Lora = Lora()

    steps: int | None = Field(default=None, ge=1)
    """Optimiser steps; 100 where neither `steps` nor `epochs` is given."""
    epochs: float | None = Field(default=None, gt=0)
    batch_size: int = Field(default=32, ge=1)
    """Samples (packed rows, with `packing`) of one process in one forward pass."""
    accumulation: int = Field(default=1, ge=1)
    """Forward passes to one optimiser step."""
    devices: int = Field(default=1, ge=1)
    """Processes that the recipe is meant for: the plan counts with it, the launcher decides."""
    learning_rate: float = Field(default=1e-3, gt=0)
    scheduler: Literal["cosine", "linear", "constant", "constant_with_warmup"] = "cosine"
    warmup_steps: int | None = Field(default=None, ge=0)
    """10 where neither `warmup_steps` nor `warmup_ratio` is given."""
    warmup_ratio: float | None = Field(default=None, ge=0, le=1)
    """Share of all steps."""
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    optimizer: Literal["adamw", "adamw_fused", "adamw_8bit", "paged_adamw_8bit", "adafactor"] = "adamw"
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    gradient_checkpointing: bool = False
    packing: Packing | None = None
    max_length: int | None = Field(default=None, ge=1)
    """Most tokens of a sample, image tokens included; nothing is ever cut."""
    on_overflow: Literal["raise", "skip"] = "raise"
    """A sample longer than `max_length`: stop, or leave it out and count it."""
    image_pixels: ImagePixels | None = None
    video: Video | None = None
    stream: Stream = Stream()
    eval_every: int | None = Field(default=None, ge=1)
    """Steps between two validation losses; None: at the end of every epoch."""
    save_every: int | None = Field(default=None, ge=1)
    """Steps between two checkpoints; None: as `eval_every`."""
    patience: int | None = Field(default=None, ge=1)
    """Stop after so many steps without a better validation loss."""
    best_epoch: float | None = Field(default=None, gt=0)
    """For the record: the epoch whose checkpoint the source reports as its best. Nothing is done with it."""
    alignment_weight: float = Field(default=0.0, ge=0)
    """Weight of the loss that pulls image tokens towards the words that name them; records need boxes, or
    `label_model` names them."""
    label_model: str | None = None
    """A CLIP-type model (directory or hub id) whose patch-word cosines label the records that have no boxes."""
    label_words: tuple[str, ...] = ()
    """The words that `label_model` may give to a patch."""
    workers: int = Field(default=0, ge=0)
    """Processes that load data beside the training."""
    log_every: int = Field(default=1, ge=1)
    return_logits: bool = False
    """False: the head runs on supervised positions only."""
    seed: int = 0
    tags: dict[str, Tag] = Field(default={})
    """Where each setting comes from: "paper", or "ours" where the source does not state it. Keys are dotted; a section
    covers its fields."""

    @model_validator(mode="before")
    @classmethod
    def _one_source_is_a_list(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = dict(values)
        for name in ("data", "validation"):
            given = values.get(name, ())
            if isinstance(given, str | dict | DataSource):
                given = [given]
            values[name] = [{"path": s} if isinstance(s, str) else s for s in given or ()]
        if isinstance(values.get("fusion"), str):
            values["fusion"] = {"name": values["fusion"]}
        for name in ("trainable", "learning_rates", "lora", "stream", "tags"):
            if name in values and values[name] is None:
                del values[name]
        return values

    @field_validator("fusion")
    @classmethod
    def _known_fusion(cls, fields: dict[str, Any]) -> dict[str, Any]:
        if "name" not in fields:
            raise ValueError(f"`fusion` needs a name, such as text-anchors; got only {', '.join(fields) or 'nothing'}")
        make_fusion(**fields)
        return fields

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        for first, second in EXCLUSIVE:
            if getattr(self, first) not in (None, ()) and getattr(self, second) not in (None, ()):
                raise ValueError(f"{first} and {second} exclude each other; set one of them to null")
        if self.steps is None and self.epochs is None:
            object.__setattr__(self, "steps", 100)
        if self.warmup_steps is None and self.warmup_ratio is None:
            object.__setattr__(self, "warmup_steps", 10)
        if self.alignment_weight > 0 and self.trainable.projector == "frozen":
            raise ValueError(
                f"alignment_weight={self.alignment_weight:g} moves nothing while the projector is frozen; set "
                f"trainable.projector to full or lora"
            )
        if self.label_model is not None and len(self.label_words) < 2:
            raise ValueError(
                f"label_model tells patches apart by words; got {len(self.label_words)} label_words, give 2 or more"
            )
        if self.patience is not None and not self.validation and self.validation_share is None:
            raise ValueError(
                f"patience={self.patience} needs a validation loss; give `validation` or `validation_share`, or set "
                "patience to null"
            )
        return self

    def changed(self, changes: Mapping[str, Any]) -> Recipe:
        """A copy with other values, by dotted name: ``changed({"lora.rank": 8, "epochs": 2})``.

        A field that excludes another (epochs and steps) takes its place; a changed value loses its tag.

        Raises:
            ValueError: an unknown name, or a value that does not fit.
        """
        values = self.model_dump()
        for name, value in changes.items():
            set_dotted(values, name, value)
            untag(values, name)
        return Recipe.model_validate(values)

    @classmethod
    def field_names(cls) -> list[str]:
        """Every field by dotted name, those of sections included."""
        names = []
        for name in cls.model_fields:
            section = next((s for s in SECTIONS if s.title == name and s is not DataSource), None)
            names += [f"{name}.{inner}" for inner in section.model_fields] if section else [name]
        return names

    def make_fusion(self) -> Fusion:
        """The fusion that `fusion` describes."""
        return make_fusion(**self.fusion)

    @property
    def samples_per_step(self) -> int:
        """Samples (packed rows) of one optimiser step on `devices` processes."""
        return self.batch_size * self.accumulation * self.devices


def set_dotted(values: dict[str, Any], name: str, value: Any) -> None:
    """Set ``values[a][b]`` for "a.b" in place; list items are numbered from 0. Sections on the way are made.

    What excludes the field is cleared. Unknown names are left for the validation to refuse.
    """
    *path, last = name.split(".")
    place: Any = values
    for depth, part in enumerate(path):
        if isinstance(place, list | tuple):
            place = _item(place, part, name)
        else:
            inner = place.get(part)
            if inner is None:
                inner = {}
            elif isinstance(inner, tuple):
                inner = list(inner)
            elif not isinstance(inner, dict | list):
                raise ValueError(f"{'.'.join(path[: depth + 1])} is no section; {name!r} cannot be set in it")
            place[part] = inner
            place = inner
    if isinstance(place, list):
        _item(place, last, name)
        place[int(last)] = value
        return
    if not path and value is not None:
        for pair in EXCLUSIVE:
            if last in pair:
                values[pair[1 - pair.index(last)]] = None
    place[last] = value


def untag(values: dict[str, Any], name: str) -> None:
    """Take the tag off a dotted field, in place; the rest of a section that was tagged as a whole keeps its tag."""
    tags = dict(values.get("tags") or {})
    for key in list(tags):
        if key == name or key.startswith(f"{name}."):
            del tags[key]
        elif name.startswith(f"{key}."):
            tag, section = tags.pop(key), values.get(key)
            rest = section if isinstance(section, dict) else {}
            for inner in rest:
                if not f"{name}.".startswith(f"{key}.{inner}."):
                    tags.setdefault(f"{key}.{inner}", tag)
    values["tags"] = tags


def _item(items: Any, part: str, name: str) -> Any:
    if not part.isdecimal() or int(part) >= len(items):
        raise ValueError(f"{name!r}: {part!r} is no item of a list of {len(items)}; items count from 0")
    return items[int(part)]
