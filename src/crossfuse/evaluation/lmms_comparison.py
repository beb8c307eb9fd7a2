"""lmms-eval's tasks in a comparison of runs: its scores, and intervals where a score is a mean over samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from crossfuse.evaluation.benchmarks.base import Metric
from crossfuse.evaluation.bootstrap import MetricDifference, SampleValues, mean_difference
from crossfuse.evaluation.samples import StoredSamples

Scored = tuple[dict[str, Metric], dict[str, dict[str, float]]]
OTHER_SAMPLES = "lmms-eval scored other samples than are compared here, and this score cannot be computed anew"
NO_MEAN = "lmms-eval's score is no mean over samples, and is not redrawn"


def restricted(scored: Scored, samples: StoredSamples, everything: bool) -> dict[str, Metric]:
    """The metrics over the compared samples: as lmms-eval found them where these are all that it scored."""
    metrics, values = scored
    if everything:
        return metrics
    ids = {sample.record.id for sample in samples}
    result = {}
    for key, metric in metrics.items():
        means = _as_mean(metric, values.get(key, {}), list(values.get(key, {})))
        kept = [value for id, value in values.get(key, {}).items() if id in ids]
        if means is None or not kept:
            result[key] = Metric(None, 0, metric.variant, metric.scale, metric.library, OTHER_SAMPLES)
        else:
            factor = _factor(metric, list(values[key].values()))
            value = factor * sum(kept) / len(kept)
            result[key] = Metric(value, len(kept), metric.variant, metric.scale, metric.library)
    return result


def differences(
    runs: Mapping[str, Sequence[Scored]],
    whole: Mapping[str, Sequence[Mapping[str, Metric]]],
    samples: StoredSamples,
    *,
    resamples: int,
) -> dict[str, dict[str, MetricDifference]]:
    """By model and metric the difference to the first model; an interval where the score is a mean over samples."""
    base, *others = list(runs)
    ids = [sample.record.id for sample in samples]
    clusters = [picture or id for picture, id in zip(samples.pictures, ids, strict=True)]
    found: dict[str, dict[str, MetricDifference]] = {}
    for name in others:
        found[name] = {}
        for key in whole[base][0]:
            ours = [run.get(key) for run in whole[name]]
            theirs = [run.get(key) for run in whole[base]]
            if any(m is None or m.value is None for m in (*ours, *theirs)):
                continue
            model = [_as_mean(m, run[1].get(key, {}), ids) for m, run in zip(ours, runs[name], strict=True) if m]
            start = [_as_mean(m, run[1].get(key, {}), ids) for m, run in zip(theirs, runs[base], strict=True) if m]
            kept, kept_base = [m for m in model if m is not None], [m for m in start if m is not None]
            if len(kept) == len(model) and len(kept_base) == len(start):
                found[name][key] = mean_difference(kept, kept_base, clusters, resamples=resamples)
            else:
                value = _mean([m.value for m in ours if m]) - _mean([m.value for m in theirs if m])
                n = max(m.n for m in ours if m)
                found[name][key] = MetricDifference(value, None, None, None, None, n, 0, NO_MEAN)
    return found


def _as_mean(metric: Metric, values: Mapping[str, float], ids: Sequence[str]) -> SampleValues | None:
    """The metric as the mean of its samples' values (or a hundred times it); None where it is none."""
    chosen = np.array([values.get(id, 0.0) for id in ids])
    weights = np.array([float(id in values) for id in ids])
    if metric.value is None or not weights.sum():
        return None
    factor = _factor(metric, list((chosen * weights)[weights > 0]))
    return None if factor == 0 else SampleValues(chosen * factor, weights)


def _factor(metric: Metric, values: Sequence[float]) -> float:
    """1, 100 (per cent), or 0 where the metric is no mean of these values."""
    mean = float(np.mean(values))
    for factor in (1.0, 100.0):
        if metric.value is not None and abs(factor * mean - metric.value) <= 1e-6 * max(abs(metric.value), 1.0):
            return factor
    return 0.0


def _mean(values: Sequence[float | None]) -> float:
    present = [value for value in values if value is not None]
    return sum(present) / len(present)
