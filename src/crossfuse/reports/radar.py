"""Radar chart: one spoke a metric, one line a model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossfuse.reports.palette import line_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def radar_chart(scores: Mapping[str, Mapping[str, float]], *, title: str = "") -> Figure:
    """Draw scores in [0, 1] as a radar chart (AttAnchor, Figure 4).

    Args:
        scores: model name -> metric name -> score. All models have the same metrics, at least three.
        title: printed above the chart.

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
            if not 0 <= value <= 1:
                raise ValueError(f"scores lie between 0 and 1; {model!r} has {metric} = {value}")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(projection="polar")
    angles = [2 * math.pi * i / len(metrics) for i in range(len(metrics))]
    for index, (model, values) in enumerate(scores.items()):
        style = line_style(index)
        closed = [values[metric] for metric in metrics] + [values[metrics[0]]]
        axes.plot([*angles, angles[0]], closed, label=model, linewidth=2, markersize=5, **style)
        axes.fill([*angles, angles[0]], closed, color=style["color"], alpha=0.06)
    # North first and clockwise, as a reader goes round a clock.
    axes.set_theta_offset(math.pi / 2)  # type: ignore[attr-defined]
    axes.set_theta_direction(-1)  # type: ignore[attr-defined]
    axes.set_xticks(angles, metrics)
    axes.tick_params(axis="x", pad=14)
    axes.set_ylim(0, 1)
    axes.set_yticks([0.25, 0.5, 0.75, 1.0], ["25 %", "50 %", "75 %", "100 %"], color="#666666", fontsize=8)
    if title:
        axes.set_title(title, pad=24)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure
