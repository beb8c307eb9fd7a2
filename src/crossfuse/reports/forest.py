"""Differences to the baseline with their intervals: one row a model, zero marked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BETTER, WORSE, NEITHER = "#00695c", "#b23b1e", "#5b6670"


def forest_chart(
    rows: Sequence[tuple[str, float, float | None, float | None]],
    *,
    title: str,
    unit: str,
    lower_is_better: bool = False,
) -> Figure:
    """Draw (model, difference, low, high); one whose interval holds zero, or without one, is grey.

    Args:
        unit: of the differences, printed below the axis.

    Raises:
        ValueError: no rows.
    """
    if not rows:
        raise ValueError("a chart of differences needs at least one model besides the baseline")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 1.3 + 0.34 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.axvline(0, color="#1c2126", linewidth=1)
    for place, (_, value, low, high) in enumerate(rows):
        color = NEITHER
        if low is not None and high is not None:
            above, below = (WORSE, BETTER) if lower_is_better else (BETTER, WORSE)
            color = above if low > 0 else below if high < 0 else NEITHER
            axes.plot([low, high], [place, place], color=color, linewidth=2.2, solid_capstyle="round")
        axes.plot(value, place, "o", color=color, markersize=6)
    axes.set_yticks(range(len(rows)), [row[0] for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="x", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(unit)
    axes.set_title(title, loc="left", fontsize=11)
    return figure
