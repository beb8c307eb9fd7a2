"""What a run starts from: model, processor and data of a recipe, and the weights of an earlier stage."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from crossfuse.data.collate import Collator
from crossfuse.data.lazy import LazyRecords
from crossfuse.data.records import Record
from crossfuse.data.videos import VideoSampling
from crossfuse.loading import EMBEDDED, read_config
from crossfuse.training.batches import Joined
from crossfuse.training.layouts import LaidOut, LayoutCollator
from crossfuse.training.recipe import DataSource, Recipe
from crossfuse.training.recipe_sections import RenderedClips

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def starting_model(recipe: Recipe) -> tuple[Any, Any]:
    """(fused model in evaluation mode, processor) of `model` or `compose`, with the weights of `start_from` in it.

    Raises:
        ValueError: the recipe names neither, or the parts do not fit.
    """
    import crossfuse as xf

    # Weights that are trained are kept in float32; frozen ones may be loaded in half precision at once.
    dtype = torch.float32 if recipe.trainable.llm == "full" else DTYPES[recipe.precision]
    if recipe.compose is not None:
        parts = recipe.compose
        model: Any = xf.VisionLanguageModel.compose(
            parts.llm,
            parts.vision,
            parts.projector,
            image_size=parts.image_size,
            vision_feature_layer=parts.vision_feature_layer,
            dtype=dtype,
        )
        processor = model.processor
    elif recipe.model is None:
        raise ValueError("the recipe names no model; set model, or compose with llm and vision")
    elif recipe.model in EMBEDDED:
        model, processor = xf.load_embedded(EMBEDDED[recipe.model])
        model.to(dtype)
    else:
        from transformers import AutoProcessor

        read_config(recipe.model)
        model = xf.from_pretrained(recipe.model, dtype=dtype)
        processor = AutoProcessor.from_pretrained(recipe.model)
    fusion = recipe.make_fusion()
    current = xf.fusion_of(model)
    if current is not None and current != fusion:
        xf.unfuse(model)
    if xf.fusion_of(model) is None:
        xf.fuse(model, fusion)
    if recipe.start_from is not None:
        load_stage(model, stage_folder(Path(recipe.start_from)))
    if recipe.image_pixels is not None:
        set_image_pixels(processor, recipe.image_pixels.min, recipe.image_pixels.max)
    return model.eval(), processor


def stage_folder(path: Path) -> Path:
    """The checkpoint of a run (the best one, else the last), or the folder of an export itself."""
    for name in ("best", "last"):
        if (path / name).is_dir():
            return path / name
    if not path.is_dir():
        raise ValueError(f"start_from: no such run: {path}")
    return path


def load_stage(model: Any, folder: Path) -> None:
    """Put the trained weights of an earlier stage into a fused model without PEFT; its adapter is merged.

    Raises:
        ValueError: the folder holds no trained weights, or weights that this model does not have.
    """
    from safetensors.torch import load_file

    import crossfuse as xf
    from crossfuse.storage import load_weights

    found = False
    if (folder / "fusion.safetensors").is_file() and xf.fusion_parameters(model):
        load_weights(model, folder)
        found = True
    if (folder / "adapter_config.json").is_file():
        from peft import PeftModel

        PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
        found = True
    files = sorted({*folder.glob("trained.safetensors"), *folder.glob("model*.safetensors")})
    for file in files:
        state = load_file(file)
        unexpected = sorted(set(state) - set(model.state_dict()))
        if unexpected:
            raise ValueError(f"{file} holds {unexpected[0]}, which the model of this recipe does not have")
        model.load_state_dict(state, strict=False)
        found = True
    if not found:
        raise ValueError(f"start_from: {folder} holds no trained weights; give a finished run or its export")


def set_image_pixels(processor: Any, low: int | None, high: int | None) -> None:
    """Bounds on height x width for processors that keep the aspect ratio.

    Raises:
        ValueError: the processor has a fixed size.
    """
    images = processor.image_processor
    size = dict(getattr(images, "size", None) or {})
    if not {"shortest_edge", "longest_edge"} <= set(size):
        raise ValueError(
            f"image_pixels is for processors that keep the aspect ratio; {type(images).__name__} resizes to "
            f"{size or 'a fixed size'}; set it to null"
        )
    size |= {k: v for k, v in (("shortest_edge", low), ("longest_edge", high)) if v is not None}
    images.size = size
    for name, value in (("min_pixels", low), ("max_pixels", high)):
        if value is not None:
            setattr(images, name, value)


def open_sources(sources: Sequence[DataSource]) -> Joined | None:
    """The data sets of a recipe, joined; None without any."""
    if not sources:
        return None
    opened = [LaidOut(open_source(source), source.layout) for source in sources]
    return Joined(opened, [source.weight for source in sources])


def open_source(source: DataSource) -> Any:
    """One data set: of records, or of streams where rendered clips are laid out as such."""
    from crossfuse.data.formats import load_records

    if source.path == "clips":
        return _clips(source)
    if source.clips is not None:
        raise ValueError(f"data.clips is for rendered clips (path: clips); {source.path} has none, set it to null")
    if source.kinds is not None:
        if source.path != "scenes":
            raise ValueError(f"data.kinds is for rendered scenes and clips; {source.path} has none, set it to null")
        return _scenes(source)
    return load_records(
        source.path,
        source.format,
        source.split,
        name=source.subset,
        root=source.images,
        limit=source.limit,
        allow_urls=source.allow_urls,
        on_error=source.on_error,
    )


def _scenes(source: DataSource) -> LazyRecords:
    """Rendered scenes with some kinds of question only."""
    from crossfuse.data.formats.scenes import SCENE_KINDS, SCENES_DEFAULT
    from crossfuse.data.questions import SceneQuestions

    unknown = sorted(set(source.kinds or ()) - set(SCENE_KINDS))
    if unknown:
        raise ValueError(f"data.kinds: no kind of question is called {unknown[0]!r}; known: {', '.join(SCENE_KINDS)}")
    split, size, kinds = source.split or "train", source.limit or SCENES_DEFAULT, source.kinds
    questions = SceneQuestions(split, size, seed=0, kinds=kinds)  # type: ignore[arg-type]

    def make(index: int) -> Record:
        image, question, _ = questions[index]
        return Record.of_question(
            f"scenes-{split}-{index}", question.text, question.answer, [image], kind=question.kind
        )

    return LazyRecords(size, make)


def _clips(source: DataSource) -> Any:
    """Rendered clips: streams in which events are announced, or questions about the frames."""
    from crossfuse.data.clip_questions import CLIP_QUESTION_KINDS, CLIP_QUESTIONS_DEFAULT, ClipQuestions
    from crossfuse.data.streams import ClipStreams

    clips = source.clips or RenderedClips()
    split: Any = source.split or "train"
    size = source.limit or CLIP_QUESTIONS_DEFAULT
    if source.layout == "stream":
        if source.kinds is not None:
            raise ValueError("data.kinds are kinds of question; clips with the layout stream have none (clips.kinds)")
        return ClipStreams(
            split,
            size,
            duration=clips.duration,
            fps=clips.fps,
            events=clips.events,
            kinds=clips.kinds,
            objects=clips.objects,
        )
    return ClipQuestions(
        split,
        size,
        CLIP_QUESTION_KINDS if source.kinds is None else source.kinds,
        duration=clips.duration,
        fps=clips.fps,
        most_events=clips.events,
        events=clips.kinds,
        objects=clips.objects,
    )


def _sampling(video: Any) -> VideoSampling:
    return VideoSampling(
        fps=video.fps,
        max_seconds=video.max_seconds,
        max_pixels=video.max_pixels,
        max_tokens=video.max_image_tokens,
    )


def collator_for(recipe: Recipe, processor: Any) -> Any:
    """Records to batches as the recipe says, each in the layout of its source (`crossfuse.training.layouts`).

    With `alignment_weight` the batches of chats carry alignment labels.
    """
    sources = (*recipe.data, *recipe.validation)
    collator = Collator(
        processor,
        max_length=recipe.max_length,
        on_overflow=recipe.on_overflow,
        on_bad_image="skip" if any(source.on_error == "skip" for source in sources) else "raise",
        allow_urls=any(source.allow_urls for source in sources),
        keep=("id",),
        video=VideoSampling() if recipe.video is None else _sampling(recipe.video),
    )
    if not recipe.alignment_weight:
        return LayoutCollator(collator, recipe.stream.build())
    from crossfuse.fusions.anchors.alignment import AlignedCollator
    from crossfuse.fusions.anchors.patch_labels import ClipLabeller

    labeller = None if recipe.label_model is None else ClipLabeller.load(recipe.label_model, recipe.label_words)
    return LayoutCollator(AlignedCollator(collator, labeller=labeller), None)
