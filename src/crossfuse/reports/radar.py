"""Radar chart: one spoke a metric, one line a model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossfuse.reports.palette import line_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def radar_chart(
    scores: Mapping[str, Mapping[str, float]],
    *,
    title: str = "",
    ranges: Mapping[str, tuple[float, float]] | None = None,
) -> Figure:
    """Draw scores as a radar chart (AttAnchor, Figure 4).

    Args:
        scores: model name -> metric name -> score. All models have the same metrics, at least three.
        title: printed above the chart.
        ranges: metric -> (centre, rim) of its spoke, printed under its name: for metrics of different scales. Without
            it, scores lie in [0, 1] and all spokes have that scale.

    Raises:
        ValueError: no model, fewer than three metrics, metrics that differ between models, or a score outside
            [0, 1].
    """
    if not scores:
        raise ValueError("a radar chart needs at least one model; got none")
    metrics = list(next(iter(scores.values())))
    if len(metrics) < 3:
        raise ValueError(f"a radar chart needs at least 3 metrics; got {len(metrics)} ({', '.join(metrics)})")
    for model, values in scores.items():
        if set(values) != set(metrics):
            raise ValueError(
                f"every model needs the same metrics; {model!r} has {sorted(values)}, not {sorted(metrics)}"
            )
        for metric, value in values.items():
            low, high = (0.0, 1.0) if ranges is None else ranges[metric]
            if not low <= value <= high:
                raise ValueError(f"scores lie between {low:g} and {high:g}; {model!r} has {metric} = {value}")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Room for long names with their ranges around the circle.
    figure = Figure(figsize=(6.4, 5.6) if ranges is None else (8.4, 7.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(projection="polar")
    angles = [2 * math.pi * i / len(metrics) for i in range(len(metrics))]
    for index, (model, values) in enumerate(scores.items()):
        style = line_style(index)
        heights = [values[metric] if ranges is None else _height(values[metric], ranges[metric]) for metric in metrics]
        closed = [*heights, heights[0]]
        axes.plot([*angles, angles[0]], closed, label=model, linewidth=2, markersize=5, **style)
        axes.fill([*angles, angles[0]], closed, color=style["color"], alpha=0.06)
    # North first and clockwise, as a reader goes round a clock.
    axes.set_theta_offset(math.pi / 2)  # type: ignore[attr-defined]
    axes.set_theta_direction(-1)  # type: ignore[attr-defined]
    names = metrics if ranges is None else [f"{m}\n{ranges[m][0]:.3g} to {ranges[m][1]:.3g}" for m in metrics]
    axes.set_xticks(angles, names)
    axes.tick_params(axis="x", pad=14 if ranges is None else 22, labelsize=10 if ranges is None else 8.5)
    axes.set_ylim(0, 1)
    ticks = [0.25, 0.5, 0.75, 1.0]
    labels = [f"{tick:.0%}".replace("%", " %") for tick in ticks] if ranges is None else [""] * 4
    axes.set_yticks(ticks, labels, color="#666666", fontsize=8)
    if title:
        axes.set_title(title, pad=24)
    figure.legend(loc="outside lower center", ncols=2 if ranges is None else 4, frameon=False)
    return figure


def _height(value: float, ends: tuple[float, float]) -> float:
    return (value - ends[0]) / (ends[1] - ends[0])
