"""The recipe of a stream model: which clips, which layout, which fusions, and how each is trained."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, field_validator

from crossfuse.data.records import first_reason
from crossfuse.data.scenes import Split
from crossfuse.data.streams import ClipStreams
from crossfuse.fusion import make_fusion
from crossfuse.training.recipe import Recipe, set_dotted
from crossfuse.training.recipe_sections import RecipeSection, RenderedClips, Stream


class Clips(RenderedClips):
    """Rendered clips: ``train`` and ``test`` are numbers of clips, of disjoint splits."""

    train: int = Field(default=2000, ge=1)
    test: int = Field(default=100, ge=2)

    def streams(self, split: Split) -> ClipStreams:
        """The clips of a split as training streams; ``test`` of them outside of the training split."""
        return ClipStreams(
            split,
            self.train if split == "train" else self.test,
            duration=self.duration,
            fps=self.fps,
            events=self.events,
            kinds=self.kinds,
            objects=self.objects,
        )


class StreamRecipe(RecipeSection):
    """Train each of ``fusions`` from the same start on the same clips, and score it on unseen ones."""

    clips: Clips = Clips()
    layout: Stream = Stream()
    fusions: dict[str, dict[str, Any]] = Field(default={"insertion": {"name": "insertion"}}, min_length=1)
    """By the name of the run: ``name`` and fields of a fusion."""
    training: Recipe = Recipe(model="embedded")
    """What `crossfuse.training` runs; its own ``fusion`` and ``data`` are not used."""
    tolerance: int = Field(default=1, ge=0)
    """An event may be announced so many frames late."""
    max_new_tokens: int = Field(default=16, ge=1)
    """Most tokens of a frame when scored."""
    cached_frames: int = Field(default=12_000, ge=0)
    """Encoded frames that are kept in memory while vision encoder and projector are frozen."""

    @field_validator("fusions")
    @classmethod
    def _known_fusions(cls, fusions: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for fields in fusions.values():
            if "name" not in fields:
                raise ValueError(f"a fusion needs a name, such as cross-attention; got {fields}")
            make_fusion(**fields)
        return fusions

    def training_of(self, name: str) -> Recipe:
        """The training recipe of one fusion. ValueError where there is none of that name."""
        if name not in self.fusions:
            raise ValueError(f"the recipe has no fusion {name!r}; its fusions: {', '.join(self.fusions)}")
        return self.training.changed({"fusion": self.fusions[name]})


def load_stream_recipe(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> StreamRecipe:
    """Read YAML; ``overrides`` are ``key=value`` with dotted keys, such as ``training.steps=400``.

    Raises ValueError in one line that names the file, FileNotFoundError where it does not exist.
    """
    source = Path(path)
    try:
        values = yaml.safe_load(source.read_text(encoding="utf-8")) or {}
        if not isinstance(values, dict):
            raise ValueError("it must be a mapping of fields to values")
        for text in overrides:
            name, sign, value = text.partition("=")
            if not sign:
                raise ValueError(f"a change is written key=value, such as training.steps=400; got {text!r}")
            set_dotted(values, name.strip(), yaml.safe_load(value))
        return StreamRecipe.model_validate(values)
    except (ValueError, yaml.YAMLError) as error:  # pydantic's ValidationError is a ValueError
        raise ValueError(f"{source.name}: {' '.join(first_reason(error).split())}") from error
