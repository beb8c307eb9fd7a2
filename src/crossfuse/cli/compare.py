"""`crossfuse compare`: evaluated runs side by side, or every fusion trained from one start and then compared."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer


def compare(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Folders of `crossfuse evaluate` (or of a comparison), the baseline first.", show_default=False
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for report.html, tables and charts.")] = Path("crossfuse-compare"),
    baseline: Annotated[
        str | None, typer.Option(help="Name of the row that all others are compared with.", show_default="the first")
    ] = None,
    published: Annotated[
        str, typer.Option(help="Published rows beside the runs: all, none, or part of a model's name.")
    ] = "all",
    resamples: Annotated[int, typer.Option(min=100, help="Draws of the bootstrap.")] = 1000,
    fusions: Annotated[
        str | None,
        typer.Option(help="Train and compare these on the embedded model: all, paper, or names with commas."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each fusion.")] = 3,
    budget_samples: Annotated[
        int | None, typer.Option(min=1, help="Training questions of each fusion.", show_default="9600")
    ] = None,
    budget_seconds: Annotated[
        float | None, typer.Option(help="Processor seconds of training instead of samples.")
    ] = None,
    budget_flops: Annotated[
        float | None, typer.Option(help="Floating-point operations of training instead of samples, as 1e13.")
    ] = None,
    tasks: Annotated[
        str, typer.Option(help="Tasks after training, each with its number of samples.")
    ] = "scenes:500,easy-vqa:300,scene-captions:100",
    batch_size: Annotated[int, typer.Option(min=1, help="Training questions a step.")] = 16,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate of all that is trained.")] = 1.5e-3,
    only: Annotated[
        str | None, typer.Option(help="Work on these of the fusions only; another process may do the others.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that share the work.")] = 1,
) -> None:
    """Compare RUNS, or with --fusions train every fusion from the common start with equal budgets first.

    A comparison that was killed goes on where it stopped when the same line is run again; several processes may work
    in the same folder at once.
    """
    if fusions is None:
        if not runs:
            raise ValueError("nothing to compare: give folders of crossfuse evaluate, or --fusions all")
        _report(runs, out, baseline, published, resamples)
        return
    if runs:
        raise ValueError("RUNS and --fusions exclude each other: evaluate the runs first, then compare the folders")
    from crossfuse.evaluation.contenders import chosen_contenders
    from crossfuse.evaluation.fusion_comparison import begin, jobs
    from crossfuse.evaluation.fusion_runs import Plan

    rows = chosen_contenders(fusions)
    mine = rows if only is None else {n: f for n, f in chosen_contenders(only).items() if n in rows}
    names, limits = _tasks(tasks)
    given = (budget_samples, budget_seconds, budget_flops)
    plan = Plan(
        samples=9600 if given == (None, None, None) else budget_samples,
        seconds=budget_seconds,
        operations=budget_flops,
        batch_size=batch_size,
        learning_rate=learning_rate,
        tasks=names,
        limits=limits,
    )
    begin(out, plan)
    helpers = _start_helpers(workers)
    _set_threads(workers)
    left = _work(jobs(mine, seeds, out), plan)
    for helper in helpers:
        helper.wait()
    left = [job for job in jobs(rows, seeds, out) if job.state(plan) == "open"]
    if left and os.environ.get(_HELPER) is None:
        typer.echo(f"{len(left)} of {len(rows) * seeds} trainings are open or at work elsewhere; the same line goes on")
    if os.environ.get(_HELPER) is None and any(job.state(plan) == "done" for job in jobs(rows, seeds, out)):
        _report([out], out, baseline, published, resamples)


_HELPER = "CROSSFUSE_COMPARE_HELPER"


def _work(todo: list[Any], plan: Any) -> list[Any]:
    from crossfuse.cli.progress import Stages
    from crossfuse.evaluation.fusion_comparison import work
    from crossfuse.loading import quiet_libraries

    quiet_libraries()
    with Stages() as stages, stages.steps() as show:
        return work(
            todo,
            plan,
            progress=lambda job, stage, done, of: show(f"{job.name}, seed {job.seed}: {stage}", done, of),
            say=stages.say,
        )


def _start_helpers(workers: int) -> list[subprocess.Popen[bytes]]:
    """Further processes of this very command line; locks in the folders share the work among them."""
    if workers == 1 or os.environ.get(_HELPER) is not None:
        return []
    command = [sys.executable, "-m", "crossfuse", *sys.argv[1:]]
    environment = os.environ | {_HELPER: str(workers)}
    return [subprocess.Popen(command, env=environment) for _ in range(workers - 1)]


def _set_threads(workers: int) -> None:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers > 1:
        torch.set_num_threads(max(cores // workers, 1))


def _tasks(text: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """ "scenes:500,easy-vqa" -> names and limits. ValueError for an unknown task or a limit that is no number."""
    from crossfuse.evaluation.generated_tasks import GENERATED_TASKS
    from crossfuse.fusion import nearest

    names, limits = [], []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, limit = part.partition(":")
        if name not in GENERATED_TASKS:
            raise ValueError(
                f"a comparison of fusions has no task {name!r}{nearest(name, GENERATED_TASKS)}; "
                f"its tasks: {', '.join(GENERATED_TASKS)}"
            )
        if limit and (not limit.isdecimal() or int(limit) < 1):
            raise ValueError(f"{part!r}: the number of samples must be at least 1; got {limit!r}")
        names.append(name)
        limits.append(int(limit or 500))
    if not names:
        raise ValueError(f"--tasks names no task; known: {', '.join(GENERATED_TASKS)}")
    return tuple(names), tuple(limits)


def _report(runs: list[Path], out: Path, baseline: str | None, published: str, resamples: int) -> None:
    from crossfuse.loading import quiet_libraries
    from crossfuse.reports.run_report import write_report

    quiet_libraries()
    command = "crossfuse " + " ".join(sys.argv[1:] if Path(sys.argv[0]).name.startswith("crossfuse") else ["compare"])
    for line in write_report(runs, out, baseline=baseline, published=published, resamples=resamples, command=command):
        typer.echo(line)
