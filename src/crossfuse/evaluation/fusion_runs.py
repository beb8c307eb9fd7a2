"""Training and evaluating one fusion with one seed, from the common start: resumable, one folder each."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import crossfuse as xf
from crossfuse.data.collate import Collator
from crossfuse.evaluation.benchmarks.base import BenchmarkSample
from crossfuse.evaluation.cache_growth import cache_growth
from crossfuse.evaluation.contenders import build_fusion
from crossfuse.evaluation.runs import TaskScores, ask, describe_run, load_samples, score_task, write_scores
from crossfuse.evaluation.step_cost import StepCost, step_cost
from crossfuse.evaluation.tasks import task
from crossfuse.evaluation.training_mix import training_mix
from crossfuse.reports.files import write_json
from crossfuse.training.recipe import Recipe
from crossfuse.training.trainer import prepare_trainable, train

TRAINING, LOGS, MODEL, COST, FAILURE = "training.json", "training", "model", "cost.json", "failure.json"
CALIBRATION_PROMPTS = 128
VALIDATION_RECORDS = 128
VALIDATIONS, SAVES = 8, 4
"""Validation losses and checkpoints of a run."""
IMAGE_COUNTS = (1, 4)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What every fusion of a comparison gets. Exactly one budget is set.

    samples: training questions seen. seconds: processor seconds of training. operations: floating-point operations of
    training, forward and backward. The latter two give each fusion as many steps as fit, by its own measured step.
    questions: questions to a picture in training, as turns of one conversation.
    """

    samples: int | None = 9600
    seconds: float | None = None
    operations: float | None = None
    batch_size: int = 16
    learning_rate: float = 1.5e-3
    questions: int = 1
    tasks: tuple[str, ...] = ("scenes", "easy-vqa", "scene-captions")
    limits: tuple[int, ...] = (500, 300, 100)
    answer_batch: int = 64

    def __post_init__(self) -> None:
        given = [n for n in ("samples", "seconds", "operations") if getattr(self, n) is not None]
        if len(given) != 1:
            raise ValueError(f"a comparison has one budget: samples, seconds or operations; got {given or 'none'}")
        if getattr(self, given[0]) <= 0:
            raise ValueError(f"the budget must be above 0; got {getattr(self, given[0])} {given[0]}")
        if len(self.limits) != len(self.tasks):
            raise ValueError(f"one limit a task: got {len(self.limits)} limits for {len(self.tasks)} tasks")

    def steps(self, cost: StepCost) -> int:
        """Optimiser steps within the budget, at least 1."""
        if self.samples is not None:
            return max(self.samples // self.batch_size, 1)
        if self.seconds is not None:
            return max(int(self.seconds / cost.cpu_seconds), 1)
        assert self.operations is not None
        return max(int(self.operations / cost.operations), 1)

    def recipe(self, steps: int, seed: int) -> Recipe:
        """All of the language model, the projector and the fusion's own layers are trained; the tower is frozen."""
        return Recipe.model_validate(
            {
                "model": "embedded:start",
                "steps": steps,
                "batch_size": self.batch_size,
                "learning_rate": self.learning_rate,
                "warmup_steps": min(20, steps // 5),
                "weight_decay": 0.02,
                "eval_every": max(steps // VALIDATIONS, 1),
                "save_every": max(steps // SAVES, 1),
                "trainable": {"llm": "full", "projector": "full", "fusion": True},
                "seed": seed,
            }
        )


class Control:
    """The shuffled-image control is asked for on these tasks; captions of other pictures need no model to be wrong."""

    tasks = ("scenes", "easy-vqa")


def run_fusion(
    name: str, fields: dict[str, Any], seed: int, plan: Plan, directory: Path, progress: Callable[[str, int, int], None]
) -> dict[str, TaskScores]:
    """Train (unless that is done), answer what is missing, score. Everything lies in `directory` afterwards.

    Args:
        progress: called with (stage, done, of).
    """
    if not (directory / TRAINING).is_file():
        _train(name, fields, seed, plan, directory, progress)
    model, processor = _load(directory)
    describe_run(
        directory,
        model,
        name,
        seed=seed,
        source="embedded:start",
        training=json.loads((directory / TRAINING).read_text()),
    )
    scores = {}
    for task_name, samples in task_samples(plan):
        shuffled = task_name in Control.tasks
        total, done = len(samples) * (1 + shuffled), 0

        def step(count: int, label: str = task_name, of: int = total) -> None:
            nonlocal done
            done += count
            progress(f"{label}: answering", done, of)

        ask(
            model, processor, name, task(task_name), samples, directory,
            batch_size=plan.answer_batch, shuffled=shuffled, progress=step,
        )  # fmt: skip
        scores[task_name] = score_task(directory, task_name)
        write_scores(directory, scores)
    return scores


def task_samples(plan: Plan) -> list[tuple[str, list[BenchmarkSample]]]:
    """Samples of each task of the plan, the same for every fusion and seed."""
    return [(n, load_samples(task(n), None, None, limit)) for n, limit in zip(plan.tasks, plan.limits, strict=True)]


def _train(
    name: str, fields: dict[str, Any], seed: int, plan: Plan, directory: Path, progress: Callable[[str, int, int], None]
) -> None:
    start, processor = xf.load_embedded("start")
    collate = Collator(processor)
    # A longer list than any budget reads: record i does not depend on how many there are.
    data = training_mix(10**9, seed=seed, questions=plan.questions)
    prompts = Collator(processor, prompt_only=True)([data[i] for i in range(CALIBRATION_PROMPTS)])
    fusion = build_fusion(fields, start, [prompts])
    torch.manual_seed(seed)
    model = prepare_trainable(xf.fuse(start, fusion), plan.recipe(1, seed))
    cost = _cost(model, [collate(data[i * plan.batch_size : (i + 1) * plan.batch_size]) for i in range(6)], directory)
    steps = plan.steps(cost)
    torch.manual_seed(seed)
    started = time.process_time()
    run = train(
        model,
        training_mix(steps * plan.batch_size, seed=seed, questions=plan.questions),
        collate,
        plan.recipe(steps, seed),
        out=directory / LOGS,
        validation=training_mix(VALIDATION_RECORDS, seed=0, questions=plan.questions, split="validation"),
        resume=True,
        progress=lambda info: progress("training", info.step, steps),
    )
    cpu_seconds = time.process_time() - started
    model.eval()
    model.save_pretrained(directory / MODEL)
    processor.save_pretrained(directory / MODEL)
    cache = cache_growth(model, processor, "is there a circle?", IMAGE_COUNTS)
    # Written last: without it the training counts as not done.
    write_json(
        directory / TRAINING,
        {
            "name": name,
            "seed": seed,
            "plan": dataclasses.asdict(plan),
            "steps": steps,
            "samples": steps * plan.batch_size,
            "seconds": round(run.seconds, 2),
            "cpu_seconds": round(cpu_seconds, 2),
            "trained_parameters": run.trained_parameters,
            "fusion_parameters": sum(p.numel() for p in xf.fusion_parameters(model).values()),
            "step_cost": dataclasses.asdict(cost),
            "cache_bytes": {str(count): sum(parts.values()) for count, parts in cache},
            "validation_loss": run.validation[-1][1],
            "threads": torch.get_num_threads(),
        },
    )
    for left in ("checkpoints", "tensorboard"):
        shutil.rmtree(directory / LOGS / left, ignore_errors=True)
    for link in ("last", "best"):
        (directory / LOGS / link).unlink(missing_ok=True)


def _cost(model: Any, batches: list[dict[str, Any]], directory: Path) -> StepCost:
    """The cost of a step, measured once: a resumed run keeps its number of steps."""
    path = directory / COST
    if path.is_file():
        return StepCost(**json.loads(path.read_text(encoding="utf-8")))
    # On a copy: the steps leave no trace in weights, optimiser or schedules of the fusion's own.
    cost = step_cost(copy.deepcopy(model), batches)
    write_json(path, dataclasses.asdict(cost))
    return cost


def _load(directory: Path) -> tuple[Any, Any]:
    from crossfuse.loading import load_model

    return load_model(str(directory / MODEL))
