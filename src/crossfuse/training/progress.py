"""The progress bar of a run: steps, loss, tokens of text and images a second, memory. Silent where nobody watches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from crossfuse.training.logs import StepInfo


def describe(info: StepInfo) -> str:
    """One line: "loss 1.234 · 5.6k text/s · 12k image/s · 1.2 GB"."""
    parts = [] if info.loss is None else [f"loss {info.loss:.3f}"]
    if info.validation_loss is not None:
        parts.append(f"validation {info.validation_loss:.3f}")
    parts += [f"{_short(info.text_rate)} text/s", f"{_short(info.image_rate)} image/s", f"{info.memory / 1e9:.1f} GB"]
    return " · ".join(parts)


def _short(value: float) -> str:
    return f"{value:.0f}" if value < 1000 else f"{value / 1000:.1f}k"


@contextlib.contextmanager
def training_bar(console: Console | None = None) -> Iterator[Callable[[StepInfo], None]]:
    """A bar for the block; the function that it gives takes each step's `StepInfo`."""
    console = console or Console(stderr=True)
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task("", total=None)
    with bar:
        yield lambda info: bar.update(task, total=info.steps, completed=info.step, description=describe(info))
