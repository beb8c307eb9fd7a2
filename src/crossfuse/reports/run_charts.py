"""The charts of a comparison of runs: radar, differences with their intervals, losses."""

from __future__ import annotations

from crossfuse.evaluation.model_runs import ModelRuns, training_logs
from crossfuse.evaluation.run_comparison import RunComparison, TaskComparison, lower_is_better
from crossfuse.reports.curves import Curve, png_bytes, train_and_validation
from crossfuse.reports.forest import forest_chart
from crossfuse.reports.radar import radar_chart
from crossfuse.reports.run_tables import headline_keys

RADAR_MODELS = 7


def comparison_charts(comparison: RunComparison) -> dict[str, bytes]:
    """PNG files by name: radar.png (three metrics or more), loss.png (runs trained here), difference-TASK.png."""
    charts: dict[str, bytes] = {}
    radar = _radar(comparison)
    if radar is not None:
        charts["radar.png"] = radar
    for task in comparison.tasks:
        rows = []
        key = task.task.metric
        percent = key in task.keys and task.scale(key) == "0-1"
        factor = 100 if percent else 1
        for model in comparison.models[1:]:
            found = task.differences.get(model.name, {}).get(key)
            if found is not None:
                ends = [None if end is None else factor * end for end in (found.low, found.high)]
                rows.append((model.name, factor * found.value, ends[0], ends[1]))
        if any(low != high or low is None for _, _, low, high in rows):
            title = f"{task.task.name}, {key}: difference to {comparison.baseline} ({_shown(task, comparison)})"
            unit = "percentage points" if percent else task.scale(key)
            chart = forest_chart(rows, title=title, unit=unit, lower_is_better=lower_is_better(key))
            charts[f"difference-{task.task.name}.png"] = png_bytes(chart)
    training: dict[str, Curve] = {}
    validation: dict[str, Curve] = {}
    for model in comparison.models:
        lines = training_logs(model)
        losses = [(float(x["step"]), float(x["loss"])) for x in lines if x.get("loss") is not None]
        if losses:
            training[model.name] = losses
            validation[model.name] = [
                (float(x["step"]), float(x["validation_loss"])) for x in lines if x.get("validation_loss") is not None
            ]
    if training:
        charts["loss.png"] = png_bytes(train_and_validation(training, validation))
    return charts


def _shown(task: TaskComparison, comparison: RunComparison) -> str:
    value = task.value(comparison.baseline, task.task.metric)
    if value is None:
        return "no value"
    return f"{value:.1%}" if task.scale(task.task.metric) == "0-1" else f"{value:.4g}"


def _radar(comparison: RunComparison) -> bytes | None:
    spokes: dict[str, tuple[TaskComparison, str]] = {}
    for task in comparison.tasks:
        keys = [k for k in headline_keys(task) if not lower_is_better(k)]  # outward is better on every spoke
        # Where there are groups, the mean over them is no spoke of its own.
        groups = [k for k in keys if k.startswith(f"{task.task.metric}/")] or keys
        spokes |= {f"{task.task.name}\n{k.partition('/')[2] or k}": (task, k) for k in groups}
    complete: list[ModelRuns] = [
        m for m in comparison.models if all(t.value(m.name, k) is not None for t, k in spokes.values())
    ]
    if len(spokes) < 3 or len(complete) < 2:
        return None
    if len(complete) > RADAR_MODELS:
        # More lines cannot be told apart: the baseline and the best of the others.
        first, *others = complete
        best = sorted(others, key=lambda m: -sum(t.value(m.name, t.task.metric) or 0 for t, _ in spokes.values()))
        complete = [first, *best[: RADAR_MODELS - 1]]
    # A spoke on which all are equal, such as all zero, shows nothing.
    spokes = {s: (t, k) for s, (t, k) in spokes.items() if len({t.value(m.name, k) for m in complete}) > 1}
    if len(spokes) < 3:
        return None
    values = {m.name: {s: t.value(m.name, k) or 0.0 for s, (t, k) in spokes.items()} for m in complete}
    ranges = {s: _range([v[s] for v in values.values()]) for s in spokes}
    return png_bytes(radar_chart(values, ranges=ranges))


def _range(values: list[float]) -> tuple[float, float]:
    """Ends of a spoke: the values fill its outer three quarters, as in the paper's figure."""
    low, high = min(values), max(values)
    width = max(high - low, 0.05 * max(abs(high), 1e-9))
    return max(low - width / 3, 0.0) if low >= 0 else low - width / 3, high + 0.02 * width
