"""Everything that `--tasks` takes: the public benchmarks and the tasks that are made on the spot."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from crossfuse.evaluation.benchmarks import BENCHMARKS, Benchmark
from crossfuse.evaluation.generated_tasks import GENERATED_TASKS
from crossfuse.evaluation.lmms_tasks import is_lmms_task, lmms_task
from crossfuse.fusion import nearest


def tasks() -> dict[str, Benchmark]:
    """Tasks by name: those made on the spot first."""
    return {**GENERATED_TASKS, **BENCHMARKS}


def task(name: str) -> Benchmark:
    """The task of that name; NAME@lmms-eval is one of lmms-eval's. Raises ValueError with the nearest name."""
    if is_lmms_task(name):
        return lmms_task(name)
    known = tasks()
    if name not in known:
        raise ValueError(f"unknown task {name!r}{nearest(name, known)}; known: {', '.join(known)}")
    return known[name]


def parse_tasks(names: str) -> list[Benchmark]:
    """Tasks of a list with commas, each once, in its order. Raises ValueError for an unknown one or none."""
    chosen: Sequence[str] = [name.strip() for name in names.split(",") if name.strip()]
    if not chosen:
        raise ValueError(f"--tasks names no task; known: {', '.join(tasks())}")
    return [task(name) for name in dict.fromkeys(chosen)]


def with_bertscore(chosen: Benchmark, encoder: Mapping[str, Any] | None) -> Benchmark:
    """A captioning task whose BERTScore compares with this encoder ({"model": ..., "layers": ...}); others as they are.

    Without an encoder BERTScore stays empty, with the reason.
    """
    if encoder is None or not chosen.captions:
        return chosen
    fields = {"bertscore_model": encoder["model"], "bertscore_layers": encoder["layers"]}
    return dataclasses.replace(chosen, scorer=functools.partial(chosen.scorer, **fields))


def bertscore_encoder(model: str | None, layers: int | None, asked: Iterable[Benchmark]) -> dict[str, Any] | None:
    """What `--bertscore-model` and `--bertscore-layers` give for these tasks.

    Raises `ValueError` for layers without a model, a folder that holds no model, and where no task has captions.
    """
    if model is None:
        if layers is not None:
            raise ValueError(f"--bertscore-layers {layers} needs a model: --bertscore-model DIR or a hub id")
        return None
    if not any(each.captions for each in asked):
        known = ", ".join(name for name, each in tasks().items() if each.captions)
        raise ValueError(f"--bertscore-model is for tasks with captions, and none is asked here; there is {known}")
    folder = Path(model).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(f"{model} holds no model for BERTScore: there is no config.json")
    return {"model": str(folder.resolve()) if folder.is_dir() else model, "layers": layers}


def needs_directory(chosen: Benchmark) -> bool:
    """Whether its samples lie in published files that the user brings."""
    return chosen.name not in GENERATED_TASKS
