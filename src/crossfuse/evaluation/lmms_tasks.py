"""Which engine asks a task, crossfuse or lmms-eval, and how lmms-eval's tasks are named here: `TASK@lmms-eval`.

Two engines ask differently (prompt, cutting, scoring), so that their scores are never one task's: `pope` and
`pope@lmms-eval` stand beside each other in a run's folder and in a comparison.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from crossfuse.evaluation.benchmarks import BENCHMARKS, Benchmark, BenchmarkSample, Metric
from crossfuse.fusion import nearest

SUFFIX = "@lmms-eval"
ENGINES = ("auto", "crossfuse", "lmms-eval")
INSTALL = "pip install 'crossfuse[eval]'"
ASKS_A_JUDGE = ("hallusionbench",)
"""Tasks that lmms-eval scores with a paid judge on the network; `auto` leaves them to this package's rule."""


def is_lmms_task(name: str) -> bool:
    """Whether the task is one that lmms-eval asks and scores."""
    return name.endswith(SUFFIX)


def lmms_task(name: str) -> Benchmark:
    """`pope@lmms-eval`, or `NAME@lmms-eval` with any of lmms-eval's own task names.

    Its samples and its scores are lmms-eval's: neither `load` nor `score` works. `ValueError` for a benchmark of this
    package that lmms-eval cannot ask.
    """
    plain = name.removesuffix(SUFFIX)
    known = BENCHMARKS.get(plain)
    if known is not None and known.lmms_task is None:
        raise ValueError(f"lmms-eval has no task that asks {plain}; leave the {SUFFIX} away")
    theirs = known.lmms_task if known is not None and known.lmms_task is not None else plain
    return Benchmark(
        name=plain + SUFFIX,
        rule=f"the rule of lmms-eval's task {theirs}, with its prompt",
        source=f"lmms-eval, task {theirs}",
        samples=known.samples if known is not None else "as its data set has them",
        metric=known.metric if known is not None else "",
        loader=_not_here,
        scorer=_not_scored_here,
        lmms_task=theirs,
        video=known is not None and known.video,
    )


def lmms_eval_is_installed() -> bool:
    """Whether the package is there; it is not imported, which takes long."""
    try:
        return importlib.util.find_spec("lmms_eval") is not None
    except (ImportError, ValueError):
        return False


def with_engine(
    chosen: Sequence[Benchmark], engine: str, *, local: Path | None, split: str | None = None, shuffled: bool = False
) -> list[Benchmark]:
    """The tasks, with those that lmms-eval is to ask as its tasks.

    "auto": lmms-eval asks a published benchmark where it is installed and has the task, and neither files (`local`), a
    split nor exchanged pictures ask for crossfuse. With files on disk nothing needs the network, so crossfuse asks.

    Raises:
        ValueError: an unknown engine, or a task or an option that the named one does not have.
        ImportError: lmms-eval is asked for by name and not installed.
    """
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}{nearest(engine, ENGINES)}; known: {', '.join(ENGINES)}")
    by_name = [each.name for each in chosen if is_lmms_task(each.name)]
    if engine == "crossfuse" and by_name:
        raise ValueError(f"--engine crossfuse does not ask {', '.join(by_name)}; leave the {SUFFIX} away")
    if engine == "lmms-eval" or by_name:
        _refuse_what_lmms_eval_lacks(chosen if engine == "lmms-eval" else [], split, shuffled)
        if not lmms_eval_is_installed():
            raise ImportError(
                f"lmms-eval is not installed: {INSTALL}, or score published files with --engine crossfuse --local DIR"
            )
    if engine == "crossfuse":
        return list(chosen)
    free = local is None and split is None and not shuffled and lmms_eval_is_installed()
    return [
        lmms_task(each.name)
        if engine == "lmms-eval" or (free and each.lmms_task is not None and each.name not in ASKS_A_JUDGE)
        else each
        for each in chosen
    ]


def _refuse_what_lmms_eval_lacks(chosen: Sequence[Benchmark], split: str | None, shuffled: bool) -> None:
    lacking = [each.name for each in chosen if each.lmms_task is None]
    if lacking:
        known = ", ".join(name for name, each in BENCHMARKS.items() if each.lmms_task is not None)
        raise ValueError(f"lmms-eval has no task that asks {', '.join(lacking)}; it has {known}")
    for given, option in ((split is not None, "--split"), (shuffled, "--shuffled-images")):
        if given:
            raise ValueError(f"{option} works with files on disk only: --engine crossfuse --local DIR")


def _not_here(directory: Path, split: str) -> list[BenchmarkSample]:
    raise ValueError("lmms-eval loads the samples of its tasks itself; take --engine crossfuse for files on disk")


def _not_scored_here(answers: Mapping[str, str], samples: Sequence[BenchmarkSample]) -> dict[str, Metric]:
    raise ValueError(f"lmms-eval scores its tasks while it asks; the scores lie in the run's folder (TASK{SUFFIX})")
