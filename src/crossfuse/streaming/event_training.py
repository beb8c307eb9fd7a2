"""Train a model to announce the events of rendered clips, and score it on unseen ones through `StreamSession`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crossfuse.data.stream_collate import StreamCollator
from crossfuse.data.streams import StreamRecord
from crossfuse.evaluation.events import READINGS, EventScore, other_frames, score_events, shuffled_frames
from crossfuse.reports.files import write_json
from crossfuse.streaming.event_recipe import StreamRecipe

CONDITIONS = ("as shown", "shuffled", "of another clip")


@dataclasses.dataclass(frozen=True)
class EventRun:
    """One fusion: how it was trained, and its scores by condition and reading."""

    fusion: str
    steps: int
    seconds: float
    final_loss: float
    scores: dict[str, dict[str, EventScore]]

    def to_json(self) -> dict[str, Any]:
        return {
            "fusion": self.fusion,
            "steps": self.steps,
            "seconds": round(self.seconds, 1),
            "final_loss": round(self.final_loss, 4),
            "scores": {
                condition: {reading: score.to_json() for reading, score in readings.items()}
                for condition, readings in self.scores.items()
            },
        }


def train_and_score(
    recipe: StreamRecipe,
    out: Path,
    fusions: Sequence[str] = (),
    *,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[EventRun]:
    """Train every fusion of the recipe (or those named), save it to ``out / name``, and score it.

    Each folder holds a model for ``crossfuse caption --layout stream``. ``out / "events.json"`` is written anew after
    each. ``progress`` is called with (what is done, step, of how many).
    """
    runs: list[EventRun] = []
    names = list(fusions) or list(recipe.fusions)
    for name in names:
        recipe.training_of(name)  # a wrong name is told before hours are spent
    for name in names:
        runs.append(_run(recipe, name, out, progress or (lambda what, step, steps: None)))
        content = {"recipe": recipe.model_dump(mode="json"), "runs": [run.to_json() for run in runs]}
        write_json(out / "events.json", content)
    return runs


def _run(recipe: StreamRecipe, name: str, out: Path, progress: Callable[[str, int, int], None]) -> EventRun:
    from crossfuse.training.start import starting_model
    from crossfuse.training.trainer import fine_tune, prepare_trainable

    training = recipe.training_of(name)
    torch.manual_seed(training.seed)
    model, processor = starting_model(training)
    layout = recipe.layout.build()
    collator: Any = StreamCollator(processor, layout, max_length=training.max_length)
    if training.trainable.projector == "frozen" and not training.trainable.vision_blocks:
        collator = EncodedFrames(collator, model, recipe.cached_frames)
    trained = prepare_trainable(model, training)
    done = 0

    def step(count: int) -> None:
        nonlocal done
        done += count
        progress(f"{name}: training", done, training.steps or 0)

    result = fine_tune(trained, recipe.clips.streams("train"), collator, training, progress=step)
    trained.eval()
    if hasattr(trained, "merge_and_unload"):
        trained = trained.merge_and_unload()
    trained.save_pretrained(out / name)
    processor.save_pretrained(out / name)
    session = layout.session(trained, processor, max_new_tokens=recipe.max_new_tokens)
    scores = score_conditions(session, list(recipe.clips.streams("test")), recipe.tolerance, name, progress)
    last = [loss for _, loss in result.losses[-20:]]
    return EventRun(name, result.steps, result.seconds, sum(last) / max(1, len(last)), scores)


def score_conditions(
    session: Any,
    records: Sequence[StreamRecord],
    tolerance: int,
    name: str = "",
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, dict[str, EventScore]]:
    """Scores of unseen clips, and of both controls."""
    given = (records, shuffled_frames(records), other_frames(records))
    scores = {}
    for condition, streams in zip(CONDITIONS, given, strict=True):
        done = 0

        def step(count: int, condition: str = condition) -> None:
            nonlocal done
            done += count
            if progress is not None:
                progress(f"{name}: {condition}", done, len(records))

        scores[condition] = score_events(session, streams, tolerance=tolerance, progress=step)
    return scores


class EncodedFrames:
    """A `StreamCollator` that runs a frozen vision encoder and projector once a picture, not once a step.

    Batches carry ``mm_encoder_outputs`` in place of pixels, as `generate` does: (N, d) float32 a frame. At most
    ``limit`` encoded frames are kept.
    """

    pins = False  # what is encoded lies on the model's device already

    def __init__(self, collator: StreamCollator, model: Any, limit: int):
        from crossfuse.streaming.engine import Engine
        from crossfuse.streaming.eviction import TextBudget

        self.collator, self.limit = collator, limit
        self.engine = Engine(model, TextBudget())
        self.known: dict[str, Tensor] = {}
        self.kept = 0

    def __call__(self, records: Sequence[StreamRecord]) -> dict[str, Any]:
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        features = [self._features(record) for record in records]
        rows = [
            self.collator.tokens(record, [encoded.shape[1]] * len(record.frames))
            for record, encoded in zip(records, features, strict=True)
        ]
        given = BaseModelOutputWithPooling(pooler_output=[frame for frames in features for frame in frames])  # type: ignore[arg-type]
        return {**self.collator.padded(rows), "mm_encoder_outputs": {"image": given}}

    def _features(self, record: StreamRecord) -> Tensor:
        """(frames, N, d)"""
        if record.id in self.known:
            return self.known[record.id]
        different = {id(frame.image): frame.image for frame in record.frames}  # nothing moves most of the time
        encoded = self.engine.encode(self.collator.processor, list(different.values()))
        places = {key: i for i, key in enumerate(different)}
        # Copies: what inference mode made cannot be used in training.
        stacked = torch.stack([frame.features for frame in encoded]).clone()
        features = stacked[[places[id(frame.image)] for frame in record.frames]]
        if self.kept + len(features) <= self.limit:
            self.known[record.id] = features
            self.kept += len(features)
        return features


def print_runs(runs: Sequence[EventRun]) -> None:
    """The table of scores: one row a fusion and condition, precision / recall by reading, delay of what was right."""
    from rich.console import Console
    from rich.table import Table

    # Narrow enough for 80 columns: names stand above their rows, and whole.
    shown = Table(
        title="Events of unseen clips through a stream session: precision / recall", pad_edge=False, show_edge=False
    )
    names = [run.fusion for run in runs] + [f"  {condition}" for condition in CONDITIONS]
    shown.add_column("fusion, frames", no_wrap=True, min_width=max(map(len, names)))
    for column in ("events", "said", *READINGS, "delay"):
        shown.add_column(column, justify="right", overflow="fold")
    for run in runs:
        shown.add_row(run.fusion, style="bold")
        for condition in CONDITIONS:
            scores = run.scores[condition]
            strict = scores["words"]
            cells = [f"{_percent(scores[r].precision)} / {_percent(scores[r].recall)}" for r in READINGS]
            delay = "–" if strict.mean_delay is None else f"{strict.mean_delay:.2f}"
            shown.add_row(f"  {condition}", str(strict.events), str(strict.announcements), *cells, delay)
        shown.add_section()
    console = Console()
    console.print(shown)
    console.print("any: something was said in time; kind: appears, vanishes, turns or moves; words: every word; in %")
    console.print("delay: frames from the first that shows the event, mean over those with the right words")


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f}"
