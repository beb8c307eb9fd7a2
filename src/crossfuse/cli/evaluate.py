"""`crossfuse evaluate`: models on tasks, every answer on disk at once, resumed after any interruption."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from crossfuse.cli.fusion_options import chosen_fusion


def evaluate(
    context: typer.Context,
    models: Annotated[
        list[str],
        typer.Argument(
            help="Directories, hub ids, `embedded` or `embedded:start`; NAME=MODEL gives a name.", metavar="MODEL..."
        ),
    ],
    tasks: Annotated[str, typer.Option(help="Tasks, separated by commas; `list` shows them all.")] = "scenes",
    local: Annotated[
        Path | None, typer.Option(help="Folder of the benchmarks' published files (or with a folder for each task).")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder that gets a folder for each model.")] = Path("crossfuse-evaluate"),
    fusion: Annotated[
        str | None,
        typer.Option(help="Fuse every model with this; its fields are options too.", show_default="as saved"),
    ] = None,
    split: Annotated[str | None, typer.Option(help="Split of the tasks.", show_default="each task's own")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="The first so many samples of each task.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples asked at once.")] = 32,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer.", show_default="each task's own")
    ] = None,
    shuffled_images: Annotated[
        bool, typer.Option("--shuffled-images", help="Ask again with another sample's image: the control.")
    ] = False,
) -> None:
    """Ask MODELs the questions of the tasks and score the answers.

    A run that was killed goes on where it stopped. Under `accelerate launch` the processes share the samples by id.
    """
    if tasks.strip() == "list":
        _list_tasks()
        return
    from crossfuse.evaluation.processes import Processes
    from crossfuse.evaluation.runs import folder_name
    from crossfuse.evaluation.tasks import parse_tasks

    chosen = parse_tasks(tasks)
    named = [_named(text) for text in models]
    folders = [folder_name(name) for name, _ in named]
    twice = next((f for f in folders if folders.count(f) > 1), None)
    if twice is not None:
        raise ValueError(f"two models would share the folder {out / twice}; name them: first={named[0][1]} second=…")
    wanted = chosen_fusion(context, fusion)
    processes = Processes()
    failed = False
    try:
        for (name, source), folder in zip(named, folders, strict=True):
            options = {
                "split": split, "limit": limit, "batch_size": batch_size, "max_new_tokens": max_new_tokens,
                "shuffled": shuffled_images,
            }  # fmt: skip
            failed |= _evaluate_model(name, source, wanted, chosen, local, out / folder, processes, options)
    finally:
        processes.close()
    if failed:
        raise typer.Exit(1)


def _evaluate_model(
    name: str, source: str, fusion: Any, chosen: list[Any], local: Path | None, directory: Path, processes: Any,
    options: dict[str, Any],
) -> bool:  # fmt: skip
    """Ask and score one model; True where a task failed. Every task's files are whole before the next begins."""
    from crossfuse.cli.progress import Stages
    from crossfuse.evaluation.runs import SCORES, ask, describe_run, load_samples, read_scores, score_task
    from crossfuse.reports.files import write_json

    model, processor = _load(source, fusion)
    model.to(processes.device())
    if processes.main:
        describe_run(
            directory, model, name, source=source, local=None if local is None else str(local), split=options["split"]
        )
    failures: dict[str, str] = {}
    scores = read_scores(directory)
    split, limit = options.pop("split"), options.pop("limit")
    with Stages() as stages:
        for each in chosen:
            error = None
            try:
                samples = load_samples(each, local, split, limit)
                total = (1 + options["shuffled"]) * len(samples) // processes.count
                with stages.stage(f"{name}: {each.name}", total) as progress:
                    ask(
                        model, processor, name, each, samples, directory,
                        shard=(processes.index, processes.count), progress=progress, **options,
                    )  # fmt: skip
            except Exception as raised:  # one task's fault must not cost the others' answers
                error = f"{type(raised).__name__}: {' '.join(str(raised).split())}"
            errors = [e for e in processes.gather(error) if e is not None]
            if not processes.main:
                continue
            if not errors:
                try:
                    scores[each.name] = score_task(directory, each.name).to_json()
                except Exception as raised:
                    errors = [f"{type(raised).__name__}: {' '.join(str(raised).split())}"]
            if errors:
                failures[each.name] = errors[0]
                scores[each.name] = {"error": errors[0]}
                stages.say(f"{name}: {each.name} failed: {errors[0]}")
            write_json(directory / SCORES, scores)
    if processes.main:
        _show(name, directory, {each.name: scores[each.name] for each in chosen if each.name not in failures})
    return any(processes.gather(bool(failures)))


def _show(name: str, directory: Path, scores: dict[str, Any]) -> None:
    from crossfuse.reports.tables import Table

    rows: list[list[Any]] = []
    for task, found in scores.items():
        exchanged = found["shuffled_images"] or {}
        for key, metric in found["metrics"].items():
            rows.append([task, key, metric["value"], exchanged.get(key, {}).get("value"), metric["n"], metric["scale"]])
    if rows:
        columns = ["task", f"{name}: metric", "value", "images shuffled", "n", "scale"]
        if all(row[3] is None for row in rows):
            columns, rows = columns[:3] + columns[4:], [row[:3] + row[4:] for row in rows]
        typer.echo(Table("scores", columns, rows).to_markdown().rstrip())
    typer.echo(f"written: {directory}; rules and notes of every metric: crossfuse score {directory}")


def _named(text: str) -> tuple[str, str]:
    """ "name=model" or a model, whose name is its last part."""
    name, sign, source = text.partition("=")
    if sign and name and source:
        return name, source
    path = Path(text)
    return (path.resolve().name if path.exists() else text), text


def _load(source: str, fusion: Any) -> tuple[Any, Any]:
    import crossfuse as xf
    from crossfuse.cli.loading import load_model, quiet_libraries

    quiet_libraries()
    if source in ("embedded", "embedded:start"):
        model, processor = xf.load_embedded("start" if source.endswith("start") else "model")
    else:
        model, processor = load_model(source)
    if fusion is not None:
        if xf.fusion_of(model) is not None:
            xf.unfuse(model)
        xf.fuse(model, fusion)
    return model.eval(), processor


def _list_tasks() -> None:
    from crossfuse.evaluation.tasks import needs_directory, tasks
    from crossfuse.reports.tables import Table

    rows = [
        [name, task.metric, task.samples, "--local" if needs_directory(task) else "made here", task.rule]
        for name, task in tasks().items()
    ]
    typer.echo(Table("tasks", ["task", "main metric", "samples", "files", "rule"], rows).to_markdown().rstrip())
