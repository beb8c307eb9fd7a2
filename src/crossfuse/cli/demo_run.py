"""The run behind `crossfuse demo`: equal budgets from one start, the same unseen questions, one report."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import io
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import crossfuse as xf
from crossfuse.cli.demo_data import DataName, DemoData, demo_data
from crossfuse.cli.demo_texts import demo_texts
from crossfuse.cli.progress import Stages
from crossfuse.data.collate import Collator, open_image
from crossfuse.data.records import Record
from crossfuse.evaluation.cache_growth import cache_growth
from crossfuse.evaluation.comparison import Comparison, Outcome, ScoredQuestion
from crossfuse.evaluation.generation import answer
from crossfuse.evaluation.scoring import other_images
from crossfuse.loading import load_model
from crossfuse.reports.comparison import comparison_charts, comparison_page
from crossfuse.reports.curves import Curve
from crossfuse.reports.files import write_bytes, write_json
from crossfuse.reports.overlay import anchor_labels, draw_anchors
from crossfuse.training.recipe import Recipe
from crossfuse.training.trainer import fine_tune, prepare_trainable

INSERTION = "insertion (baseline)"
ANCHORS = "text anchors (AttAnchor)"
CROSS_ATTENTION = "cross-attention (CASA)"
UNTRAINED = "insertion, before fine-tuning"
SHARE = 0.10
PICTURES = 6
ANSWER_TOKENS = 6
ANSWER_BATCH = 50
IMAGE_COUNTS = (1, 2, 4, 6, 8)


@dataclasses.dataclass(frozen=True)
class Budget:
    """The same for every fusion."""

    steps: int
    batch_size: int
    scored: int
    calibration: int


USUAL = Budget(steps=150, batch_size=32, scored=500, calibration=128)
QUICK = Budget(steps=20, batch_size=16, scored=150, calibration=64)


@dataclasses.dataclass(frozen=True)
class Contender:
    """One row of the comparison; without a recipe it is scored as it is."""

    name: str
    fusion: xf.Fusion
    recipe: Recipe | None


def run_demo(budget: Budget, data_name: DataName, out: Path, *, seed: int, quick: bool) -> None:
    """Run everything and write report.html, the PNG files and results.json to `out`; each file appears whole."""
    started = time.perf_counter()
    with Stages() as stages:
        data = demo_data(data_name, train=budget.steps * budget.batch_size, scored=budget.scored, seed=seed)
        _, processor = _start()
        calibration = _calibrate(processor, data, budget)
        stages.say(
            f"threshold {calibration.threshold:.3f}: copies {calibration.achieved:.1%} of {calibration.n_tokens:,} "
            f"prompt tokens; unrelated vectors would reach a cosine of {calibration.noise_floor:.3f} in the median"
        )
        questions = [ScoredQuestion.of(record) for record in data.scored]
        contenders = _contenders(budget, calibration, seed)
        models, outcomes = {}, []
        for contender in contenders:
            model, outcome = _compete(contender, processor, data, questions, stages, seed)
            models[contender.name] = model
            outcomes.append(outcome)
        comparison = Comparison(questions, outcomes)
        cache = _cache_curves(models, processor, questions[0].prompt)
        pictures = _anchor_pictures(models[ANCHORS], processor, data.scored, questions)
    seconds = time.perf_counter() - started
    command = f"crossfuse demo{' --quick' if quick else ''} --data {data_name} --seed {seed}"
    texts = demo_texts(comparison, data.description, calibration, seconds, command)
    charts = comparison_charts(comparison, cache)
    for name, png in [*charts.items(), *((f"anchors-{i + 1}.png", png) for i, (png, _) in enumerate(pictures))]:
        write_bytes(out / name, png)
    results = comparison.to_json() | {
        "data": data.description,
        "seed": seed,
        "seconds": round(seconds, 1),
        "calibration": dataclasses.asdict(calibration),
        "cache_bytes": {name: [list(point) for point in points] for name, points in cache.items()},
        "settings": {
            "dtype": "float32",
            "attn_implementation": "sdpa",
            "batch_size": ANSWER_BATCH,
            "max_new_tokens": ANSWER_TOKENS,
            "decoding": "greedy",
        },
        "versions": {p: importlib.metadata.version(p) for p in ("crossfuse", "torch", "transformers", "peft")},
        "machine": {"cpus": os.cpu_count(), "threads": torch.get_num_threads()},
    }
    write_json(out / "results.json", results)
    page = comparison_page(comparison, texts, charts, pictures, cache)
    report = page.write(out / "report.html")
    for sentence in texts.summary:
        stages.say(sentence)
    stages.say(f"{seconds:.0f} s; open {report}")


def _contenders(budget: Budget, calibration: xf.Calibration, seed: int) -> list[Contender]:
    lora = Recipe(steps=budget.steps, batch_size=budget.batch_size, seed=seed)
    new_layers = lora.changed({"trainable.llm": "frozen"})
    return [
        Contender(INSERTION, xf.Insertion(), lora),
        Contender(ANCHORS, calibration.fusion(), lora),
        Contender(CROSS_ATTENTION, xf.CrossAttention(joint_text=True), new_layers),
        Contender(UNTRAINED, xf.Insertion(), None),
    ]


def _start() -> tuple[Any, Any]:
    return load_model(None)


def _calibrate(processor: Any, data: DemoData, budget: Budget) -> xf.Calibration:
    """On prompts of the training set: the scored questions have no say in the threshold."""
    model, _ = _start()
    count = min(budget.calibration, len(data.train))
    batch = Collator(processor, prompt_only=True)([data.train[i] for i in range(count)])
    return xf.calibrate_threshold(model, [batch], share=SHARE)


def _compete(
    contender: Contender,
    processor: Any,
    data: DemoData,
    questions: Sequence[ScoredQuestion],
    stages: Stages,
    seed: int,
) -> tuple[Any, Outcome]:
    """Train (where there is a recipe) and score one contender, from a fresh copy of the start."""
    model, _ = _start()
    xf.fuse(model, contender.fusion)
    losses: Sequence[tuple[int, float]] = ()
    train_seconds, trained_parameters = 0.0, 0
    if contender.recipe is not None:
        torch.manual_seed(seed)
        model = prepare_trainable(model, contender.recipe)
        with stages.stage(f"{contender.name}: training", contender.recipe.steps or 0) as progress:
            run = fine_tune(model, data.train, Collator(processor), contender.recipe, progress=progress)
        losses, train_seconds, trained_parameters = run.losses, run.seconds, run.trained_parameters
    model.eval()
    swapped = other_images(data.picture_ids, seed=seed)
    control = [
        r.model_copy(update={"images": data.scored[j].images}) for r, j in zip(data.scored, swapped, strict=True)
    ]
    began = time.perf_counter()
    with stages.stage(f"{contender.name}: answering", 2 * len(data.scored)) as progress:
        options: dict[str, Any] = {"max_new_tokens": ANSWER_TOKENS, "batch_size": ANSWER_BATCH, "progress": progress}
        own = answer(model, processor, data.scored, **options)
        answer_seconds = time.perf_counter() - began
        shuffled = answer(model, processor, control, **options)
    outcome = Outcome(
        name=contender.name,
        fusion=contender.fusion.to_dict(),
        answers=own,
        shuffled_answers=shuffled,
        answer_seconds=answer_seconds,
        recipe=contender.recipe,
        losses=losses,
        train_seconds=train_seconds,
        trained_parameters=trained_parameters,
    )
    value = Comparison(questions, [outcome]).score(outcome)
    trained = f"{contender.recipe.steps} steps in {train_seconds:.0f} s, " if contender.recipe else ""
    stages.say(f"{contender.name}: {trained}{value.right} of {value.total} questions right ({value.share:.1%})")
    return model, outcome


def _cache_curves(models: Mapping[str, Any], processor: Any, prompt: str) -> dict[str, Curve]:
    inserted = cache_growth(_base(models[INSERTION]), processor, prompt, IMAGE_COUNTS)
    crossed = cache_growth(_base(models[CROSS_ATTENTION]), processor, prompt, IMAGE_COUNTS)
    return {
        "insertion": [(count, sum(parts.values())) for count, parts in inserted],
        "cross-attention, all": [(count, sum(parts.values())) for count, parts in crossed],
        "cross-attention, text only": [(count, parts["self_attention"]) for count, parts in crossed],
    }


def _base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _anchor_pictures(
    model: Any, processor: Any, records: Sequence[Record], questions: Sequence[ScoredQuestion]
) -> list[tuple[bytes, str]]:
    """PNG and caption of the first scored questions that have anchors, the kinds of questions taking turns."""
    chosen = _in_turns([question.kind for question in questions])[: 8 * PICTURES]
    found = xf.explain_anchors(_base(model), Collator(processor, prompt_only=True)([records[i] for i in chosen]))
    pictures: list[tuple[bytes, str]] = []
    for index, anchors in zip(chosen, found, strict=True):
        if not anchors or len(pictures) == PICTURES:
            continue
        words = [processor.tokenizer.decode([anchor.token_id]) for anchor in anchors]
        grid = anchors[0].grid
        assert grid is not None, "the embedded model's images have a square grid"
        drawn = draw_anchors(open_image(records[index].images[0]), anchor_labels(anchors, words), grid)
        buffer = io.BytesIO()
        drawn.save(buffer, format="PNG", optimize=True)
        question = questions[index]
        pictures.append((buffer.getvalue(), f"{question.prompt} ({question.kind}; right answer: {question.answer})"))
    return pictures


def _in_turns(kinds: Sequence[str]) -> list[int]:
    """Indices ordered so that the kinds take turns."""
    seen: dict[str, int] = {}
    turn = []
    for index, kind in enumerate(kinds):
        seen[kind] = seen.get(kind, 0) + 1
        turn.append((seen[kind], index))
    return [index for _, index in sorted(turn)]
