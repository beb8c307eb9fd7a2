"""Differences between models with paired bootstrap intervals, for any benchmark's metrics.

Samples about one picture are drawn together (cluster bootstrap): two questions on one image are not two images. With
several trainings of a model (seeds) these are drawn too, so that the interval covers both.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from crossfuse.data.records import Record
from crossfuse.evaluation.benchmarks.base import Benchmark, BenchmarkSample, Metric

Floats = NDArray[np.float64]
SCORINGS = 1_000_000
"""Samples scored in all draws of a metric which is no mean over samples: some seconds. No time limit, so that intervals
are the same on every machine."""
FEWEST = 100
SECONDS = 10.0
"""Longest that `FEWEST` draws may take; slower rules get no interval."""


@dataclasses.dataclass(frozen=True)
class SampleValues:
    """A metric as a weighted mean over samples: values and weights (n,); weight 0 where a sample does not count."""

    values: Floats
    weights: Floats

    @property
    def mean(self) -> float:
        return float((self.values * self.weights).sum() / self.weights.sum())


@dataclasses.dataclass(frozen=True)
class MetricDifference:
    """Model minus baseline. low, high: 95 % interval, None with the reason where none could be drawn.

    wins, losses: samples (times seeds) on which the model's value is higher or lower; None for metrics that are no mean
    over samples. n: samples (times seeds) that the metric concerns.
    """

    value: float
    low: float | None
    high: float | None
    wins: int | None
    losses: int | None
    n: int
    resamples: int
    reason: str | None = None

    def verdict(self, *, lower_is_better: bool = False) -> str:
        """ "better", "worse", "not distinguishable" where the interval holds zero, "no interval" without one."""
        if self.low is None or self.high is None:
            return "no interval"
        if self.low <= 0 <= self.high:
            return "not distinguishable"
        return "better" if (self.low > 0) != lower_is_better else "worse"


def sample_values(
    scorer: Benchmark, answers: Mapping[str, str], samples: Sequence[BenchmarkSample], whole: Mapping[str, Metric]
) -> dict[str, SampleValues]:
    """Each sample scored alone, for those metrics of `whole` (all samples scored at once) that are their mean.

    Metrics over pairs, groups or a corpus (F1, circular evaluation, BLEU, totals) are left out.
    """
    columns: dict[str, tuple[Floats, Floats]] = {k: (np.zeros(len(samples)), np.zeros(len(samples))) for k in whole}
    for index, sample in enumerate(samples):
        try:
            alone = scorer.scorer({sample.record.id: answers[sample.record.id]}, [sample])
        except (ValueError, ZeroDivisionError, KeyError, IndexError):
            continue  # this rule needs more than one sample; the check below leaves it out
        for key, metric in alone.items():
            if key in columns and metric.value is not None:
                columns[key][0][index], columns[key][1][index] = metric.value, metric.n
    found = {}
    for key, (values, weights) in columns.items():
        value = whole[key].value
        if value is None or weights.sum() != whole[key].n:
            continue
        candidate = SampleValues(values, weights)
        if abs(candidate.mean - value) <= 1e-9 * max(abs(value), 1.0):
            found[key] = candidate
    return found


def mean_difference(
    model: Sequence[SampleValues],
    base: Sequence[SampleValues],
    clusters: Sequence[str],
    *,
    resamples: int,
    seed: int = 0,
) -> MetricDifference:
    """Difference of two means over the same samples, with its percentile interval (Efron 1979; Field and Welsh 2007).

    Args:
        model, base: one a seed. Equal numbers are paired seed by seed, and drawn together.
        clusters: what is drawn together, one name a sample.
    """
    rng = np.random.default_rng(seed)
    _, labels = np.unique(np.asarray(clusters, dtype=object).astype(str), return_inverse=True)
    size = int(labels.max()) + 1
    draws = rng.multinomial(size, np.full(size, 1 / size), size=resamples).astype(np.float64)
    paired = len(model) == len(base)
    seeds_model = rng.integers(len(model), size=(resamples, len(model)))
    seeds_base = seeds_model if paired else rng.integers(len(base), size=(resamples, len(base)))
    drawn = _drawn_means(model, labels, size, draws, seeds_model) - _drawn_means(base, labels, size, draws, seeds_base)
    drawn = drawn[np.isfinite(drawn)]
    value = float(np.mean([m.mean for m in model]) - np.mean([b.mean for b in base]))
    pairs = list(zip(model, base, strict=True)) if paired else [(m, b) for m in model for b in base]
    concerned = [m.weights > 0 for m, _ in pairs]
    wins = sum(int((m.values > b.values)[c].sum()) for (m, b), c in zip(pairs, concerned, strict=True))
    losses = sum(int((m.values < b.values)[c].sum()) for (m, b), c in zip(pairs, concerned, strict=True))
    n = sum(int(c.sum()) for c in concerned)
    if size < 2:
        return MetricDifference(value, None, None, wins, losses, n, 0, "all samples are about one picture")
    low, high = np.percentile(drawn, [2.5, 97.5])
    return MetricDifference(value, float(low), float(high), wins, losses, n, len(drawn))


def _drawn_means(
    runs: Sequence[SampleValues], labels: NDArray[np.intp], size: int, draws: Floats, seeds: NDArray[np.int64]
) -> Floats:
    means = np.empty((len(draws), len(runs)))
    for index, run in enumerate(runs):
        top = np.bincount(labels, run.values * run.weights, size)
        bottom = np.bincount(labels, run.weights, size)
        with np.errstate(invalid="ignore", divide="ignore"):
            means[:, index] = (draws @ top) / (draws @ bottom)
    result: Floats = np.take_along_axis(means, seeds, axis=1).mean(axis=1)
    return result


def scored_differences(
    scorer: Benchmark,
    model: Sequence[Mapping[str, str]],
    base: Sequence[Mapping[str, str]],
    samples: Sequence[BenchmarkSample],
    clusters: Sequence[str],
    keys: Sequence[str],
    *,
    resamples: int,
    seed: int = 0,
) -> dict[str, MetricDifference]:
    """Differences of metrics that are no mean over samples: every draw is scored by the benchmark itself.

    Args:
        model, base: answers by sample id, one mapping a seed.
        keys: the metrics that are wanted.
    """
    started = time.perf_counter()
    whole_model = [scorer.scorer(answers, samples) for answers in model]
    whole_base = [scorer.scorer(answers, samples) for answers in base]
    each = time.perf_counter() - started
    values = {k: _mean([w.get(k) for w in whole_model]) - _mean([w.get(k) for w in whole_base]) for k in keys}
    fewest = min(resamples, FEWEST)
    count = min(resamples, max(FEWEST, SCORINGS // (len(samples) * (len(model) + len(base)))))
    n = len(samples) * len(model)
    if fewest * each > SECONDS:
        reason = f"scoring once takes {each:.1f} s, too long for {fewest} draws"
        return {k: MetricDifference(v, None, None, None, None, n, 0, reason) for k, v in values.items() if v == v}
    rng = np.random.default_rng(seed)
    groups: dict[str, list[int]] = {}
    for index, cluster in enumerate(clusters):
        groups.setdefault(cluster, []).append(index)
    names = list(groups)
    drawn: dict[str, list[float]] = {k: [] for k in keys}
    paired = len(model) == len(base)
    for _ in range(count):
        order = rng.integers(len(names), size=len(names))
        chosen = [(i, turn) for turn, name in enumerate(order) for i in groups[names[name]]]
        copies = [_copy(scorer.name, samples[i], turn) for i, turn in chosen]
        seeds = rng.integers(len(model), size=len(model))
        others = seeds if paired else rng.integers(len(base), size=len(base))
        try:
            ours = [scorer.scorer(_copied(model[s], samples, chosen), copies) for s in seeds]
            theirs = [scorer.scorer(_copied(base[s], samples, chosen), copies) for s in others]
        except (ValueError, ZeroDivisionError, KeyError, IndexError):
            continue
        for key in keys:
            difference = _mean([w.get(key) for w in ours]) - _mean([w.get(key) for w in theirs])
            if difference == difference:
                drawn[key].append(difference)
    result = {}
    for key, value in values.items():
        if value != value:
            continue
        if len(drawn[key]) < fewest:
            reason = "most draws cannot be scored by this rule"
            result[key] = MetricDifference(value, None, None, None, None, n, len(drawn[key]), reason)
        else:
            low, high = np.percentile(drawn[key], [2.5, 97.5])
            result[key] = MetricDifference(value, float(low), float(high), None, None, n, len(drawn[key]))
    return result


def _mean(metrics: Sequence[Metric | None]) -> float:
    values = [m.value for m in metrics if m is not None and m.value is not None]
    return sum(values) / len(values) if len(values) == len(metrics) else float("nan")


# Fields of the reference by which a rule pairs samples up: drawn together, and told apart from their other draws.
PAIRED_BY = {
    "mmbench": ("group",),
    "mme": ("task", "image"),
    "hallusionbench": ("category", "subcategory", "set_id"),
}


def cluster_of(name: str, sample: BenchmarkSample, pictures: str) -> str:
    """What a sample of the benchmark `name` is drawn together with: its group, its pictures, or nothing but itself."""
    fields = PAIRED_BY.get(name, ())
    if fields:
        return "|".join(str(sample.reference[field]) for field in fields)
    return pictures or sample.record.id


def _copy(name: str, sample: BenchmarkSample, turn: int) -> BenchmarkSample:
    fields = PAIRED_BY.get(name, ())
    reference = dict(sample.reference)
    if fields:
        reference[fields[-1]] = f"{reference[fields[-1]]}#{turn}"
    record: Record = sample.record.model_copy(update={"id": f"{sample.record.id}#{turn}"})
    return BenchmarkSample(record, reference)


def _copied(
    answers: Mapping[str, str], samples: Sequence[BenchmarkSample], chosen: Sequence[tuple[int, int]]
) -> dict[str, str]:
    return {f"{samples[i].record.id}#{turn}": answers[samples[i].record.id] for i, turn in chosen}
