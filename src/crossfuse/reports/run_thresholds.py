"""The threshold table of a comparison: metrics by the threshold of the anchors, the best one named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from crossfuse.evaluation.model_runs import ModelRuns
from crossfuse.evaluation.published import published_thresholds
from crossfuse.evaluation.run_comparison import NEITHER_IS_BETTER, RunComparison, base_name, lower_is_better
from crossfuse.reports.run_tables import headline_keys
from crossfuse.reports.tables import Cell, Table

PUBLISHED = "AttAnchor, TinyLLaVA-1B"
OFF = 1.0


def thresholds_table(comparison: RunComparison) -> Table | None:
    """AttAnchor's threshold table: a row a metric, a column a threshold, published rows below; None without two."""
    series = _series(comparison.models)
    if not series:
        return None
    order = sorted({value for runs in series.values() for value in runs}, reverse=True)
    rows: list[list[Cell]] = []
    for task in comparison.tasks:
        for key in headline_keys(task):
            for name, runs in series.items():
                values = [task.value(runs[t].name, key) if t in runs else None for t in order]
                if any(value is not None for value in values):
                    rows.append([task.task.name, key, name, *values, _best(key, order, values)])
            found = published_thresholds().get(f"{task.task.name}.{key}")
            if found is not None:
                printed = [found.get(f"{t:g}", found.get(f"{t:.2f}")) for t in order]
                if any(value is not None for value in printed):
                    rows.append([task.task.name, key, PUBLISHED, *printed, _best(key, order, printed)])
    caption = (
        "Threshold 1 copies nothing: the baseline. Best: the threshold of the best value of the row; whether it is "
        "distinguishable from the baseline stands in the table of differences."
    )
    return Table("thresholds", ["task", "metric", "source", *(f"{t:.4g}" for t in order), "best"], rows, caption)


def _series(models: Sequence[ModelRuns]) -> dict[str, dict[float, ModelRuns]]:
    """Models that differ in their threshold alone, by the name of their row, each with two thresholds or more."""
    groups: dict[str, dict[float, ModelRuns]] = {}
    names: dict[str, str] = {}
    plain = None
    for model in models:
        description = model.descriptions[0]
        fusion, swept = description["fusion"], description.get("swept")
        value = _threshold(fusion)
        if fusion.get("name") in ("insertion", "none") and plain is None:
            plain = model
        if value is None:
            continue
        key = json.dumps([description.get("source"), swept and swept["of"], _rest(fusion)], sort_keys=True)
        names[key] = f"{swept['of']}, {fusion['name']}" if swept else str(fusion["name"])
        groups.setdefault(key, {}).setdefault(min(value, OFF), model)
    kept = {key: runs for key, runs in groups.items() if len(runs) > 1}
    if len(kept) == 1 and plain is not None:
        next(iter(kept.values())).setdefault(OFF, plain)
    labels = ["this comparison"] if len(kept) == 1 else [names[key] for key in kept]
    return dict(zip(labels if len(set(labels)) == len(kept) else map(str, kept), kept.values(), strict=True))


def _threshold(fusion: dict[str, Any]) -> float | None:
    """The threshold of a stored fusion's anchors, its own or those within cross-attention."""
    anchors = fusion.get("anchors")
    value = fusion.get("threshold", anchors.get("threshold") if isinstance(anchors, dict) else None)
    return None if value is None else float(value)


def _rest(fusion: Any) -> Any:
    """A fusion's fields without its thresholds and what these were calibrated to."""
    if not isinstance(fusion, dict):
        return fusion
    return {name: _rest(value) for name, value in fusion.items() if name not in ("threshold", "share")}


def _best(key: str, order: Sequence[float], values: Sequence[float | None]) -> Cell:
    """The thresholds of the best value, ties included; none where neither direction is better."""
    present = [value for value in values if value is not None]
    if len(present) < 2 or base_name(key) in NEITHER_IS_BETTER:
        return None
    target = min(present) if lower_is_better(key) else max(present)
    return ", ".join(f"{t:.4g}" for t, value in zip(order, values, strict=True) if value == target)
