"""What a streaming benchmark leaves behind: a picture of two curves, CSV, JSON, and a table of verdicts."""

from __future__ import annotations

import csv
import dataclasses
import io
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from crossfuse.reports.files import write_bytes, write_json
from crossfuse.streaming.benchmark import BOUND, LAST, NEW_TOKENS, Method, Subject, Verdict, verdicts


def write_curves(folder: Path, subject: Subject, methods: Sequence[Method]) -> list[Path]:
    """``stream-SHAPE.png``, ``.csv`` and ``.json`` in ``folder``; returns their paths."""
    target = folder / f"stream-{subject.name}"
    tokens = len(subject.frames[0])
    title = f"{subject.name}: {tokens} image tokens, 1 delimiter and {NEW_TOKENS} new tokens a frame"
    settings = {
        "shape": subject.name,
        "image_tokens": tokens,
        "frames": methods[0].frames[-1],
        "new_tokens": NEW_TOKENS,
        "bound": BOUND,
        "machine": machine(),
    }
    content = {
        "settings": settings,
        "methods": summary(methods),
        "targets": [dataclasses.asdict(row) for row in verdicts(subject, methods)],
    }
    return [
        write_bytes(target.with_suffix(".png"), picture(methods, title)),
        write_bytes(target.with_suffix(".csv"), table(methods)),
        write_json(target.with_suffix(".json"), content),
    ]


def machine() -> dict[str, Any]:
    return {
        "cpu": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def summary(methods: Sequence[Method]) -> list[dict[str, Any]]:
    """Medians of the first and of the last frames, and the cache at the end, by method."""
    return [
        {
            "method": method.name,
            "first_seconds": round(statistics.median(method.seconds[:LAST]), 4),
            "last_seconds": round(statistics.median(method.seconds[-LAST:]), 4),
            "cache_megabytes": round(method.megabytes[-1], 3),
        }
        for method in methods
    ]


def table(methods: Sequence[Method]) -> bytes:
    """CSV with one row a frame and method."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["frame", "method", "seconds", "cache_megabytes"])
    for method in methods:
        for number, seconds, megabytes in zip(method.frames, method.seconds, method.megabytes, strict=True):
            writer.writerow([number, method.name, f"{seconds:.4f}", f"{megabytes:.3f}"])
    return text.getvalue().encode()


def picture(methods: Sequence[Method], title: str) -> bytes:
    """PNG with two panels, latency and memory against frames."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    from crossfuse.reports.curves import png_bytes
    from crossfuse.reports.palette import line_style

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    latency, memory = figure.subplots(1, 2)
    for number, method in enumerate(methods):
        style: dict[str, Any] = {"color": "#777777", "linestyle": ":"} if not method.sees else line_style(number - 1)
        if str(BOUND) in method.name:  # lies on the unbounded one until the bound is reached
            style["linestyle"] = "--"
        style |= {"linewidth": 2, "markersize": 5, "markevery": max(1, len(method.frames) // 8)}
        latency.plot(method.frames, [1000 * s for s in _smoothed(method.seconds)], label=method.name, **style)
        memory.plot(method.frames, method.megabytes, **style)
    latency.set_ylabel("milliseconds a frame (median of 5)")
    memory.set_ylabel("cache in MB, log scale")
    memory.set_yscale("log")
    memory.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    latency.set_ylim(bottom=0)
    for axes in (latency, memory):
        axes.set_xlabel("frames so far")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return png_bytes(figure)


def _smoothed(values: Sequence[float]) -> list[float]:
    """Medians of five neighbours: single frames meet other work on the machine."""
    return [statistics.median(values[max(0, i - 2) : i + 3]) for i in range(len(values))]


def print_curves(subject: Subject, methods: Sequence[Method], paths: Sequence[Path]) -> None:
    from rich.console import Console
    from rich.table import Table

    frames = methods[0].frames[-1]
    shown = Table(title=f"{subject.name}: {frames} frames, {torch.get_num_threads()} threads")
    for column in ("method", "first frames", "last frames", "cache"):
        shown.add_column(column, justify="left" if column == "method" else "right")
    for row in summary(methods):
        shown.add_row(
            row["method"],
            f"{1000 * row['first_seconds']:.0f} ms",
            f"{1000 * row['last_seconds']:.0f} ms",
            f"{row['cache_megabytes']:.1f} MB",
        )
    console = Console()
    console.print(shown)
    print_verdicts(verdicts(subject, methods), f"{subject.name}: targets at frame {frames}")
    console.print("written: " + ", ".join(map(str, paths)), soft_wrap=True)


def print_verdicts(rows: Sequence[Verdict], title: str) -> None:
    """The table of what was wanted and what was measured."""
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=title)
    for column in ("what", "measured", "target", "verdict"):
        shown.add_column(column, justify="right" if column == "measured" else "left")
    for row in rows:
        verdict = "not judged" if row.met is None else "met" if row.met else "MISSED"
        shown.add_row(row.what, f"{row.measured:g}", row.target, verdict)
    Console().print(shown)
