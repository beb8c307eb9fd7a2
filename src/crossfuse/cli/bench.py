"""`crossfuse bench`: the commands that measure and predict costs."""

from __future__ import annotations

import typer

from crossfuse.cli.bench_axes import axes
from crossfuse.cli.bench_equal import equal_cost
from crossfuse.cli.bench_events import events
from crossfuse.cli.bench_stream import stream

bench = typer.Typer(help="Measure and predict costs.", no_args_is_help=True)
bench.command()(stream)
bench.command("equal-cost")(equal_cost)
bench.command()(events)
bench.command()(axes)


@bench.callback()
def _group() -> None:
    pass
