"""Evaluated runs side by side: each metric of each model, and its difference to the baseline with an interval."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from crossfuse.evaluation.benchmarks.base import Benchmark, Metric
from crossfuse.evaluation.bootstrap import (
    MetricDifference,
    SampleValues,
    cluster_of,
    mean_difference,
    sample_values,
    scored_differences,
)
from crossfuse.evaluation.contenders import contenders
from crossfuse.evaluation.generated_tasks import GeneratedTask
from crossfuse.evaluation.runs import RUN, SCORES, read_run, read_scores, run_answers, score_answers
from crossfuse.evaluation.samples import StoredSamples
from crossfuse.evaluation.tasks import task

LOWER_IS_BETTER = ("unparsed", "chair", "hal", "cog")
NEITHER_IS_BETTER = ("yes_ratio",)
SLOW_SECONDS = 0.5
"""A task whose scoring takes longer than this once (judges, Java) is not scored a thousand times."""


@dataclasses.dataclass(frozen=True)
class ModelRuns:
    """One row of a comparison: one run, or one a seed."""

    name: str
    folders: Sequence[Path]

    @property
    def descriptions(self) -> list[dict[str, Any]]:
        """run.json of each folder."""
        return [read_run(folder) for folder in self.folders]


@dataclasses.dataclass(frozen=True)
class TaskComparison:
    """One task over all models that have answered it.

    metrics: by model, one mapping a seed. differences: by model, to the baseline. samples and answers are those that
    every model has.
    """

    task: Benchmark
    samples: StoredSamples
    answers: dict[str, list[dict[str, str]]]
    metrics: dict[str, list[dict[str, Metric]]]
    shuffled: dict[str, list[dict[str, float | None]]]
    differences: dict[str, dict[str, MetricDifference]]
    left_out: str | None = None

    @property
    def keys(self) -> list[str]:
        """Metrics that some model has a value of, in the order of the task."""
        found: dict[str, None] = {}
        for runs in self.metrics.values():
            for run in runs:
                found |= {k: None for k, m in run.items() if m.value is not None}
        return list(found)

    def value(self, model: str, key: str) -> float | None:
        """Mean over the seeds; None where a seed has no value."""
        values = [run[key].value if key in run else None for run in self.metrics.get(model, [])]
        present = [v for v in values if v is not None]
        return sum(present) / len(present) if present and len(present) == len(values) else None

    def spread(self, model: str, key: str) -> float | None:
        """Standard deviation over the seeds (n - 1); None for a single one."""
        values = [run[key].value for run in self.metrics.get(model, []) if key in run]
        present = [v for v in values if v is not None]
        if len(present) < 2:
            return None
        mean = sum(present) / len(present)
        return float((sum((v - mean) ** 2 for v in present) / (len(present) - 1)) ** 0.5)

    def shuffled_value(self, model: str, key: str) -> float | None:
        """Mean over the seeds with exchanged pictures; None where that was not asked."""
        values = [run.get(key) for run in self.shuffled.get(model, [])]
        present = [v for v in values if v is not None]
        return sum(present) / len(present) if present and len(present) == len(values) else None

    def scale(self, key: str) -> str:
        """The metric's scale, as "0-1"."""
        return next(run[key].scale for runs in self.metrics.values() for run in runs if key in run)

    def n(self, key: str) -> int:
        """Number of samples behind the metric."""
        return next(run[key].n for runs in self.metrics.values() for run in runs if key in run)


@dataclasses.dataclass(frozen=True)
class RunComparison:
    """Models and tasks; the first model is the baseline of every difference."""

    models: Sequence[ModelRuns]
    tasks: Sequence[TaskComparison]

    @property
    def baseline(self) -> str:
        return self.models[0].name

    def wins(self, model: str) -> tuple[int, int]:
        """(main metrics on which the model is distinguishably better, main metrics with an interval)."""
        found = [t.differences.get(model, {}).get(t.task.metric) for t in self.tasks]
        judged = [d for d in found if d is not None and d.low is not None]
        return sum(d.verdict() == "better" for d in judged), len(judged)


def find_runs(paths: Sequence[Path]) -> list[ModelRuns]:
    """Runs of the given folders: runs themselves, folders of runs, and comparisons of fusions (one run a seed).

    Runs of one name with different seeds are one model. `ValueError` where a folder holds none, or two runs share a
    name.
    """
    grouped: dict[str, list[tuple[Any, Path]]] = {}
    for path in paths:
        if not path.is_dir():
            raise ValueError(f"no such folder: {path}; give folders that crossfuse evaluate wrote")
        own = [path] if (path / RUN).is_file() else sorted(p.parent for p in path.glob(f"*/{RUN}"))
        own = own or sorted(p.parent for p in path.glob(f"*/seed-*/{RUN}"))
        finished = [folder for folder in own if (folder / SCORES).is_file()]
        if not finished:
            raise ValueError(f"{path} holds no finished run ({RUN} and {SCORES}); run crossfuse evaluate first")
        for folder in finished:
            description = read_run(folder)
            grouped.setdefault(str(description["name"]), []).append((description.get("seed"), folder))
    for name, runs in grouped.items():
        seeds = [seed for seed, _ in runs]
        if len(runs) > 1 and (None in seeds or len(set(seeds)) < len(seeds)):
            places = ", ".join(str(folder) for _, folder in runs)
            raise ValueError(f"{len(runs)} runs are called {name!r} ({places}); evaluate them as NAME=MODEL")
    # The usual order of fusions, and behind them the others as they were given.
    known = list(contenders())
    order = sorted(grouped, key=lambda name: known.index(name) if name in known else len(known))
    return [ModelRuns(name, [folder for _, folder in sorted(grouped[name], key=_seed)]) for name in order]


def _seed(item: tuple[Any, Path]) -> int:
    return -1 if item[0] is None else int(item[0])


def with_baseline(models: Sequence[ModelRuns], name: str | None) -> list[ModelRuns]:
    """The models with the baseline first: the one of that name, else the first. `ValueError` with the nearest name."""
    from crossfuse.fusion import nearest

    if name is None:
        plain = next((m for m in models if m.name == "insertion"), models[0])
        return [plain, *(m for m in models if m is not plain)]
    known = {m.name: m for m in models}
    if name not in known:
        raise ValueError(f"no run is called {name!r}{nearest(name, known)}; runs: {', '.join(known)}")
    return [known[name], *(m for m in models if m.name != name)]


def compare_runs(models: Sequence[ModelRuns], *, resamples: int = 1000) -> RunComparison:
    """Every task that at least one model has finished. Pure: reads the folders only."""
    names: dict[str, None] = {}
    for model in models:
        for folder in model.folders:
            names |= {n: None for n, found in read_scores(folder).items() if "error" not in found}
    compared = [_compare_task(task(name), models, resamples) for name in names]
    return RunComparison(models, compared)


def _compare_task(chosen: Benchmark, models: Sequence[ModelRuns], resamples: int) -> TaskComparison:
    name = chosen.name
    with_task = [m for m in models if all(name in read_scores(folder) for folder in m.folders)]
    stored = [StoredSamples(folder / f"{name}.samples.jsonl") for m in with_task for folder in m.folders]
    given = {
        m.name: [run_answers(folder, name, StoredSamples(folder / f"{name}.samples.jsonl")) for folder in m.folders]
        for m in with_task
    }
    # Only what every run was asked is compared: a run over 100 samples beside one over 1,000 is no fair row.
    shared = set.intersection(*(set(answers) for runs in given.values() for answers in runs))
    samples = stored[0].only(shared)
    everything = max(len(s) for s in stored)
    left_out = (
        f"{len(samples)} samples that all runs have; some have {everything}" if len(samples) < everything else None
    )
    whole, shuffled = {}, {}
    for model in with_task:
        whole[model.name] = [
            _metrics(folder, chosen, answers, samples, recompute=left_out is not None)
            for folder, answers in zip(model.folders, given[model.name], strict=True)
        ]
        shuffled[model.name] = [_shuffled(folder, name) for folder in model.folders]
    differences = _differences(chosen, samples, given, whole, resamples)
    return TaskComparison(chosen, samples, given, whole, shuffled, differences, left_out)


def _metrics(
    folder: Path, chosen: Benchmark, answers: Mapping[str, str], samples: StoredSamples, *, recompute: bool
) -> dict[str, Metric]:
    """From scores.json, unless other samples are compared than were scored."""
    if recompute:
        return score_answers(chosen, answers, samples)
    return {k: Metric(**m) for k, m in read_scores(folder)[chosen.name]["metrics"].items()}


def _shuffled(folder: Path, name: str) -> dict[str, float | None]:
    found = read_scores(folder)[name].get("shuffled_images") or {}
    return {key: metric["value"] for key, metric in found.items()}


def _differences(
    chosen: Benchmark,
    samples: StoredSamples,
    answers: Mapping[str, Sequence[Mapping[str, str]]],
    whole: Mapping[str, Sequence[Mapping[str, Metric]]],
    resamples: int,
) -> dict[str, dict[str, MetricDifference]]:
    base, *others = list(answers)
    quick = chosen.quick if isinstance(chosen, GeneratedTask) and chosen.quick is not None else chosen
    quick.scorer(answers[base][0], samples)  # the first call also imports
    started = time.perf_counter()
    quick.scorer(answers[base][0], samples)
    if time.perf_counter() - started > SLOW_SECONDS + 2e-4 * len(samples):
        return {name: _plain_differences(whole[base], whole[name]) for name in others}
    clusters = [cluster_of(chosen.name, s, p) for s, p in zip(samples, samples.pictures, strict=True)]
    values: dict[str, list[dict[str, SampleValues]]] = {
        name: [sample_values(quick, a, samples, quick.scorer(a, samples)) for a in runs]
        for name, runs in answers.items()
    }
    found = {}
    for name in others:
        result = _plain_differences(whole[base], whole[name])
        means = [k for k in result if all(k in run for run in (*values[base], *values[name]))]
        for key in means:
            result[key] = mean_difference(
                [run[key] for run in values[name]], [run[key] for run in values[base]], clusters, resamples=resamples
            )
        known = quick.scorer(answers[base][0], samples)
        rest = [k for k in result if k not in means and k in known]
        if rest:
            result |= scored_differences(
                quick, answers[name], answers[base], samples, clusters, rest, resamples=resamples
            )
        found[name] = result
    return found


def _plain_differences(
    base: Sequence[Mapping[str, Metric]], model: Sequence[Mapping[str, Metric]]
) -> dict[str, MetricDifference]:
    """Differences without an interval."""
    result = {}
    for key in base[0]:
        ours, theirs = ([run[key].value if key in run else None for run in runs] for runs in (model, base))
        if None in ours or None in theirs:
            continue
        value = sum(v for v in ours if v is not None) / len(ours) - sum(v for v in theirs if v is not None) / len(
            theirs
        )
        result[key] = MetricDifference(
            value, None, None, None, None, base[0][key].n, 0, "this rule is too slow to redraw"
        )
    return result


def verdict(difference: MetricDifference, key: str) -> str:
    """ "better", "worse", "not distinguishable", "differs" where neither direction is better, or "no interval"."""
    name = key.rpartition("/")[0] or key
    if name.partition("@")[0] in NEITHER_IS_BETTER:
        return "differs" if difference.verdict() in ("better", "worse") else difference.verdict()
    return difference.verdict(lower_is_better=name.partition("@")[0] in LOWER_IS_BETTER)


def training_logs(model: ModelRuns) -> list[dict[str, Any]]:
    """Lines of the first seed's training log, where the run was trained here."""
    path = model.folders[0] / "training" / "log.jsonl"
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
