"""Progress bars with rate and time left; silent where nobody watches (pipes, files, CI)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text


class RateColumn(ProgressColumn):
    """Items a second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:.1f}/s", style="progress.data.speed")


class Stages:
    """One bar for each stage of a command, and one plain line for what each stage found."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), RateColumn())
        self._progress = Progress(
            *columns, TimeRemainingColumn(), console=self.console, transient=True, disable=not self.console.is_terminal
        )

    def __enter__(self) -> Stages:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    @contextlib.contextmanager
    def stage(self, description: str, total: int) -> Iterator[Callable[[int], None]]:
        """A bar for the block; the function that it gives is called with the number of items just done."""
        task = self._progress.add_task(description, total=total)
        try:
            yield lambda done: self._progress.advance(task, done)
            self._progress.refresh()
        finally:
            self._progress.remove_task(task)

    @contextlib.contextmanager
    def steps(self) -> Iterator[Callable[[str, int, int], None]]:
        """A bar whose description and total change: the function that it gives takes (description, done, total)."""
        task = self._progress.add_task("", total=None)

        def show(description: str, done: int, total: int) -> None:
            if self._progress.tasks[self._progress.task_ids.index(task)].description != description:
                self._progress.reset(task, description=description, total=total)
            self._progress.update(task, completed=done, total=total)

        try:
            yield show
        finally:
            self._progress.remove_task(task)

    def say(self, line: str) -> None:
        """Print a line above the bars."""
        self.console.print(line, markup=False, highlight=False)
