"""Line charts: the loss against the step, and bytes of the key-value cache against the number of images."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from crossfuse.reports.palette import line_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curve = Sequence[tuple[float, float]]
"""Points (x, y) in the order of x."""


def loss_curves(curves: Mapping[str, Curve], *, title: str = "Training loss") -> Figure:
    """Draw the loss of several runs against the optimiser step.

    Every logged value is drawn pale; above 20 values an exponential mean (over a tenth of the run) is drawn
    over them.
    """
    figure, axes = _figure(curves, title)
    for index, (name, points) in enumerate(curves.items()):
        steps, losses = [x for x, _ in points], [y for _, y in points]
        color = line_style(index)["color"]
        if len(points) > 20:
            axes.plot(steps, losses, color=color, alpha=0.25, linewidth=1)
            axes.plot(steps, _smoothed(losses, span=len(points) / 10), color=color, linewidth=2, label=name)
        else:
            axes.plot(steps, losses, color=color, linewidth=2, marker="o", markersize=3, label=name)
    axes.set_xlabel("optimiser step")
    axes.set_ylabel("cross-entropy (nats a token)")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return figure


def train_and_validation(
    training: Mapping[str, Curve], validation: Mapping[str, Curve], *, title: str = "Training and validation loss"
) -> Figure:
    """Draw the training loss (its running mean) and the validation loss of several runs side by side.

    Args:
        training, validation: (optimiser step, nats a token) by run. A run keeps its colour in both; one that has no
            validation loss is drawn on the left only. `ValueError` without any training curve.
    """
    from matplotlib.ticker import MaxNLocator

    figure, _ = _figure(training, "")
    figure.set_size_inches(10.5, 4.6)
    figure.clear()
    left, right = figure.subplots(1, 2)
    for panel, heading in ((left, "training (running mean)"), (right, "validation")):
        panel.grid(color="#dddddd", linewidth=0.8)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_title(heading, fontsize=10)
        panel.set_xlabel("optimiser step")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.set_ylabel("cross-entropy (nats a token)")
    seen: list[float] = []
    for index, (name, points) in enumerate(training.items()):
        style = line_style(index)
        steps, losses = [x for x, _ in points], [y for _, y in points]
        smooth = _smoothed(losses, span=max(len(points) / 10, 1))
        left.plot(steps, smooth, color=style["color"], linestyle=style["linestyle"], linewidth=1.6, label=name)
        seen += smooth[len(smooth) // 20 :]
        if validation.get(name):
            xs, ys = [x for x, _ in validation[name]], [y for _, y in validation[name]]
            right.plot(xs, ys, linewidth=1.6, markersize=4, **style)
            seen += ys
    # The first steps of a fresh start can be ten times as high and would flatten all that follows.
    top = 1.05 * sorted(seen)[int(0.98 * (len(seen) - 1))]
    for panel in (left, right):
        panel.set_ylim(0, top)
    figure.suptitle(title)
    figure.legend(loc="outside lower center", ncols=min(6, len(training)), frameon=False, fontsize=8)
    return figure


def cache_bytes(curves: Mapping[str, Curve], *, title: str = "Key-value cache") -> Figure:
    """Draw bytes of the key-value cache against the number of images in the prompt."""
    figure, axes = _figure(curves, title)
    largest = max(y for points in curves.values() for _, y in points)
    unit, divisor = next(
        (u, d) for u, d in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1)) if largest >= d or d == 1
    )
    for index, (name, points) in enumerate(curves.items()):
        axes.plot(
            [x for x, _ in points],
            [y / divisor for _, y in points],
            linewidth=2,
            label=name,
            **line_style(index),
        )
    axes.set_xlabel("images in the prompt")
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return figure


def png_bytes(figure: Figure, *, dpi: int = 120) -> bytes:
    """The figure as a PNG file's bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, facecolor="white")
    return buffer.getvalue()


def _figure(curves: Mapping[str, Curve], title: str) -> tuple[Figure, Axes]:
    if not curves or any(len(points) == 0 for points in curves.values()):
        empty = [name for name, points in curves.items() if len(points) == 0]
        raise ValueError(
            f"every curve needs at least one point; got {'none for ' + ', '.join(empty) if empty else 'no curve'}"
        )
    # Figure without pyplot: nothing global is touched, so that threads and notebooks keep their own state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.grid(color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # steps and images are whole
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title)
    return figure, axes


def _smoothed(values: Sequence[float], *, span: float) -> list[float]:
    weight = 2 / (span + 1)
    mean, total, smoothed = 0.0, 0.0, []
    for value in values:
        # The running weight corrects the start, where a plain exponential mean would lean on the first value.
        mean = (1 - weight) * mean + weight * value
        total = (1 - weight) * total + weight
        smoothed.append(mean / total)
    return smoothed
