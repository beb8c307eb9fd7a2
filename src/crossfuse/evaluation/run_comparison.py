"""Evaluated runs side by side: each metric of each model, and its difference to the baseline with an interval."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from crossfuse.evaluation import lmms_comparison
from crossfuse.evaluation.benchmarks.base import Benchmark, Metric
from crossfuse.evaluation.bootstrap import (
    MetricDifference,
    SampleValues,
    cluster_of,
    mean_difference,
    sample_values,
    scored_differences,
)
from crossfuse.evaluation.generated_tasks import GeneratedTask
from crossfuse.evaluation.lmms_runs import read_scored
from crossfuse.evaluation.lmms_tasks import is_lmms_task
from crossfuse.evaluation.model_runs import ModelRuns
from crossfuse.evaluation.runs import read_run, read_scores, run_answers, score_answers
from crossfuse.evaluation.samples import StoredSamples
from crossfuse.evaluation.tasks import task, with_bertscore

LOWER_IS_BETTER = ("unparsed", "chair", "hal", "cog")
NEITHER_IS_BETTER = ("yes_ratio", "pope_yes_ratio")
SLOW_SECONDS = 0.5
"""A task whose scoring takes longer than this once (judges, Java) is not scored a thousand times."""


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
        found = [(t.differences.get(model, {}).get(t.task.metric), t.task.metric) for t in self.tasks]
        judged = [verdict(d, key) for d, key in found if d is not None and d.low is not None]
        return judged.count("better"), len(judged)


def compare_runs(models: Sequence[ModelRuns], *, resamples: int = 1000) -> RunComparison:
    """Every task that at least one model has finished. Pure: reads the folders only."""
    names: dict[str, None] = {}
    for model in models:
        for folder in model.folders:
            names |= {n: None for n, found in read_scores(folder).items() if "error" not in found}
    compared = [_compare_task(task(name), models, resamples) for name in names]
    return RunComparison(models, compared)


def _compare_task(chosen: Benchmark, models: Sequence[ModelRuns], resamples: int) -> TaskComparison:
    name, of_lmms_eval = chosen.name, is_lmms_task(chosen.name)
    with_task = [m for m in models if all("metrics" in read_scores(f).get(name, {}) for f in m.folders)]
    by_folder = {folder: StoredSamples(folder / f"{name}.samples.jsonl") for m in with_task for folder in m.folders}
    stored = list(by_folder.values())
    given = {m.name: [run_answers(folder, name, by_folder[folder]) for folder in m.folders] for m in with_task}
    # Only what every run was asked is compared: a run over 100 samples beside one over 1,000 is no fair row.
    answered = [set(answers) for runs in given.values() for answers in runs]
    shared = set.intersection(*(answered if any(answered) else ({s.record.id for s in each} for each in stored)))
    samples = stored[0].only(shared)
    everything = max(len(s) for s in stored)
    left_out = (
        f"{len(samples)} samples that all runs have; some have {everything}" if len(samples) < everything else None
    )
    whole, shuffled = {}, {m.name: [_shuffled(folder, name) for folder in m.folders] for m in with_task}
    if of_lmms_eval:
        scored = {m.name: [read_scored(folder, name) for folder in m.folders] for m in with_task}
        whole = {
            m: [lmms_comparison.restricted(run, samples, left_out is None) for run in runs]
            for m, runs in scored.items()
        }
        differences = lmms_comparison.differences(scored, whole, samples, resamples=resamples)
        # What the task file names first is what its table shows.
        chosen = dataclasses.replace(chosen, metric=next(iter(whole[with_task[0].name][0])))
    else:
        for model in with_task:
            whole[model.name] = [
                _metrics(folder, chosen, answers, samples, recompute=left_out is not None)
                for folder, answers in zip(model.folders, given[model.name], strict=True)
            ]
        differences = _differences(chosen, samples, given, whole, resamples)
    if with_task[0] is not models[0]:
        differences = {}  # the baseline was not asked this task
    return TaskComparison(chosen, samples, given, whole, shuffled, differences, left_out)


def _metrics(
    folder: Path, chosen: Benchmark, answers: Mapping[str, str], samples: StoredSamples, *, recompute: bool
) -> dict[str, Metric]:
    """From scores.json, unless other samples are compared than were scored."""
    if recompute:
        return score_answers(with_bertscore(chosen, read_run(folder).get("bertscore")), answers, samples)
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
    known = quick.scorer(answers[base][0], samples)
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
    if base_name(key) in NEITHER_IS_BETTER:
        return "differs" if difference.verdict() in ("better", "worse") else difference.verdict()
    return difference.verdict(lower_is_better=lower_is_better(key))


def lower_is_better(key: str) -> bool:
    """Whether less of the metric is better, as of hallucinations."""
    return base_name(key) in LOWER_IS_BETTER


def base_name(key: str) -> str:
    """A metric without its group and its rule: "chair" of "chair@exact-words", "accuracy" of "accuracy/count"."""
    return (key.rpartition("/")[0] or key).partition("@")[0]
