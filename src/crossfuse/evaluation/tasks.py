"""Everything that `--tasks` takes: the public benchmarks and the tasks that are made on the spot."""

from __future__ import annotations

from collections.abc import Sequence

from crossfuse.evaluation.benchmarks import BENCHMARKS, Benchmark
from crossfuse.evaluation.generated_tasks import GENERATED_TASKS
from crossfuse.fusion import nearest


def tasks() -> dict[str, Benchmark]:
    """Tasks by name: those made on the spot first."""
    return {**GENERATED_TASKS, **BENCHMARKS}


def task(name: str) -> Benchmark:
    """The task of that name. Raises ValueError with the nearest name."""
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


def needs_directory(chosen: Benchmark) -> bool:
    """Whether its samples lie in published files that the user brings."""
    return chosen.name not in GENERATED_TASKS
