"""Counts and shares that the scorers have in common."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from crossfuse.evaluation.benchmarks.base import BenchmarkSample, Metric

T = TypeVar("T")
UNPARSED = "answers that the rule could not read; they count as wrong"


def percent(scores: Sequence[float], variant: str, reason: str | None = None) -> Metric:
    """Mean of scores in [0, 1], in per cent; None with a reason where there are none."""
    if not scores:
        return Metric(None, 0, variant, "0-100", reason=reason or "no such samples")
    return Metric(100 * sum(scores) / len(scores), len(scores), variant, "0-100", reason=reason)


def mean_of(parts: Mapping[Any, Metric], variant: str, reason: str | None = None) -> Metric:
    """Unweighted mean of metrics on one scale; `n` is the number of samples of all parts."""
    values = [part.value for part in parts.values() if part.value is not None]
    n = sum(part.n for part in parts.values())
    if not values:
        return Metric(None, n, variant, "0-100", reason=reason or "no part could be computed")
    return Metric(sum(values) / len(values), n, variant, next(iter(parts.values())).scale, reason=reason)


def unparsed(read: Sequence[object | None]) -> Metric:
    """How many answers could not be read (None)."""
    return Metric(float(sum(value is None for value in read)), len(read), UNPARSED, "count")


def grouped(items: Iterable[T], key: Callable[[T], Hashable]) -> dict[Any, list[T]]:
    """Items by key, keys in the order of their first item."""
    groups: dict[Any, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def by_group(scores: Sequence[float], samples: Sequence[BenchmarkSample], key: str, variant: str) -> dict[str, Metric]:
    """A percentage for each value of `reference[key]`, as {value: metric}; samples without one are left out."""
    pairs = [(s, r.reference.get(key)) for s, r in zip(scores, samples, strict=True)]
    groups = grouped([pair for pair in pairs if pair[1] is not None], lambda pair: pair[1])
    return {str(name): percent([score for score, _ in members], variant) for name, members in groups.items()}


def confusion(
    said: Sequence[str | None],
    truth: Sequence[str],
    variant: str,
    positive: str = "yes",
    misses_must_be_said: bool = False,
) -> dict[str, Metric]:
    """Accuracy, precision, recall, F1 and the share of answers that say `positive`, in per cent.

    Unread answers (None) are wrong: they lower accuracy and recall. Where nobody said `positive`, precision is 0.

    Args:
        misses_must_be_said: count a positive as missed only where the other answer was given (lmms-eval's POPE).
    """
    negative = {"yes": "no", "no": "yes"}[positive]
    pairs = list(zip(said, truth, strict=True))
    hits = sum(s == t == positive for s, t in pairs)
    claimed = sum(s == positive for s in said)
    missed = sum(t == positive and s != positive and (s == negative or not misses_must_be_said) for s, t in pairs)
    precision = hits / claimed if claimed else 0.0
    recall = hits / (hits + missed) if hits + missed else 0.0
    shares = {
        "accuracy": sum(s == t for s, t in pairs) / len(pairs),
        "precision": precision,
        "recall": recall,
        "f1": 2 * precision * recall / (precision + recall) if precision + recall else 0.0,
        f"{positive}_ratio": claimed / len(pairs),
    }
    return {name: Metric(100 * value, len(pairs), variant, "0-100") for name, value in shares.items()}


def keyed(metrics: Mapping[str, Metric], group: str = "", rule: str = "") -> dict[str, Metric]:
    """The same metrics under "name/group@rule"."""
    return {f"{name}{'/' if group else ''}{group}{'@' if rule else ''}{rule}": m for name, m in metrics.items()}
