"""`crossfuse bench stream`: latency and memory of a frame against the number of frames."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

QUICK_FRAMES, QUICK_ENDLESS = 8, 200


def stream(
    shape: Annotated[
        list[str] | None,
        typer.Option(help="embedded or smollm2-135m; give it twice for both.", show_default="both"),
    ] = None,
    frames: Annotated[int, typer.Option(min=3, help="Frames of each stream.")] = 60,
    every: Annotated[int, typer.Option(min=1, help="Measure each n-th frame and the last ones.")] = 1,
    endless: Annotated[
        int, typer.Option(min=0, help="Also so many rendered frames through one bounded session; 0 leaves it out.")
    ] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch.", show_default="torch's own")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the picture, CSV and JSON.")] = Path("build/bench"),
    quick: Annotated[
        bool, typer.Option("--quick", help=f"{QUICK_FRAMES} frames, {QUICK_ENDLESS} endless ones; no ratio is judged.")
    ] = False,
) -> None:
    """Latency and memory a frame: insertion, pooled image tokens, cross-attention, bounded text.

    Writes stream-SHAPE.png, .csv and .json. Ends with exit code 1 where a target that can be judged (SmolLM2's shape
    from frame 60 on; the endless stream) is missed. Ctrl-C ends a run early and reports what there is.
    """
    import dataclasses

    import torch

    from crossfuse.fusion import nearest
    from crossfuse.reports.files import write_json
    from crossfuse.streaming import benchmark, benchmark_report
    from crossfuse.streaming.endless import endless as run_endless

    shapes = shape or list(benchmark.SHAPES)
    for name in shapes:
        if name not in benchmark.SHAPES:
            raise typer.BadParameter(
                f"shape must be one of {', '.join(benchmark.SHAPES)}; got {name!r}{nearest(name, benchmark.SHAPES)}"
            )
    if threads:
        torch.set_num_threads(threads)
    frames, endless = (QUICK_FRAMES, QUICK_ENDLESS if endless else 0) if quick else (frames, endless)
    found = []
    for name in shapes:
        subject = benchmark.subject_of(name)
        methods = benchmark.measure(subject, frames, every, lambda number: _show(f"frame {number} of {frames}"))
        _show("")
        paths = benchmark_report.write_curves(out, subject, methods)
        benchmark_report.print_curves(subject, methods, paths)
        found += benchmark.verdicts(subject, methods)
    if endless:
        rows = run_endless(endless, progress=_report_endless)
        _show("")
        benchmark_report.print_verdicts(rows, f"{endless} rendered frames in one bounded session")
        written = {
            "frames": endless,
            "bound": benchmark.BOUND,
            "machine": benchmark_report.machine(),
            "targets": [dataclasses.asdict(row) for row in rows],
        }
        write_json(out / "stream-endless.json", written)
        found += rows
    if any(row.met is False for row in found):
        raise typer.Exit(1)


def _report_endless(number: int, resident: int, relative: float) -> None:
    if number % 500 == 0:
        _show("")
        print(
            f"frame {number}: {resident / 2**20:.0f} MB resident, {relative:.2f} x text only",
            file=sys.stderr,
            flush=True,
        )
    elif number % 20 == 0:
        _show(f"frame {number}")


def _show(line: str) -> None:
    """Rewrite one line of a terminal."""
    if sys.stderr.isatty():
        print(f"\r{line:<40}", end="\r" if not line else "", file=sys.stderr, flush=True)
