"""`crossfuse evaluate`: models on tasks, every answer on disk at once, resumed after any interruption."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from crossfuse.cli.fusion_options import chosen_fusion
from crossfuse.cli.model_options import DeviceOption
from crossfuse.cli.scoring_options import BertscoreLayers, BertscoreModel


def evaluate(
    context: typer.Context,
    models: Annotated[
        list[str],
        typer.Argument(
            help="Directories, hub ids, `embedded` or `embedded:start`; NAME=MODEL gives a name.", metavar="MODEL..."
        ),
    ],
    tasks: Annotated[
        str,
        typer.Option(
            help="Tasks, separated by commas; `list` shows them all, NAME@lmms-eval is any task of lmms-eval."
        ),
    ] = "scenes",
    local: Annotated[
        Path | None, typer.Option(help="Folder of the benchmarks' published files (or with a folder for each task).")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder that gets a folder for each model.")] = Path("crossfuse-evaluate"),
    fusion: Annotated[
        str | None,
        typer.Option(help="Fuse every model with this; its fields are options too.", show_default="as saved"),
    ] = None,
    threshold: Annotated[
        str | None,
        typer.Option(
            help="Threshold of the anchors; several with commas, as 1,0.16,0.12 (1: off), make a run each.",
            show_default="as saved",
        ),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            help="Who asks: crossfuse, lmms-eval, or auto: lmms-eval for benchmarks that it has, where it is installed "
            "and there is no --local."
        ),
    ] = "auto",
    lmms_tasks: Annotated[
        Path | None, typer.Option(help="Folder of task files (YAML) of your own for lmms-eval, as of local data.")
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
    bertscore_model: BertscoreModel = None,
    bertscore_layers: BertscoreLayers = None,
    device: DeviceOption = "auto",
) -> None:
    """Ask MODELs the questions of the tasks and score the answers.

    A run that was killed goes on where it stopped. Under `accelerate launch` the processes share the samples by id.
    """
    if tasks.strip() == "list":
        _list_tasks()
        return
    from crossfuse.evaluation.lmms_tasks import with_engine
    from crossfuse.evaluation.processes import Processes
    from crossfuse.evaluation.tasks import bertscore_encoder, parse_tasks

    chosen = with_engine(parse_tasks(tasks), engine, local=local, split=split, shuffled=shuffled_images)
    if lmms_tasks is not None and not lmms_tasks.is_dir():
        raise ValueError(f"no such folder: {lmms_tasks}; give one with task files (YAML) of lmms-eval")
    encoder = bertscore_encoder(bertscore_model, bertscore_layers, chosen)
    named = [_named(text) for text in models]
    wanted = chosen_fusion(context, fusion)
    values = _thresholds(threshold)
    _refuse_shared_folders(named, values, out)
    options = {
        "local": local, "split": split, "limit": limit, "batch_size": batch_size, "max_new_tokens": max_new_tokens,
        "shuffled": shuffled_images, "bertscore": encoder, "lmms_tasks": lmms_tasks,
    }  # fmt: skip
    processes = Processes()
    failed = False
    try:
        for name, source in named:
            own = str(processes.device()) if device == "auto" else device
            model, processor = _load(source, wanted, own)
            for run, value in _runs(name, model, values):
                swept = None if value is None else {"of": name, "threshold": value}
                failed |= _evaluate_model(run, source, model, processor, chosen, out, processes, options, swept)
    finally:
        processes.close()
    if failed:
        raise typer.Exit(1)


def _thresholds(text: str | None) -> list[float]:
    from crossfuse.evaluation.thresholds import parse_thresholds

    return [] if text is None else parse_thresholds(text)


def _run_names(name: str, values: list[float]) -> list[str]:
    return [name] if len(values) < 2 else [f"{name} threshold {value:g}" for value in values]


def _runs(name: str, model: Any, values: list[float]) -> Any:
    """(name of the run, its threshold) with the model fused for it; no threshold: the model as it is."""
    if not values:
        yield name, None
        return
    import crossfuse as xf
    from crossfuse.evaluation.thresholds import change_fusion, with_threshold

    base = xf.fusion_of(model) or xf.TextAnchors()
    for run, value in zip(_run_names(name, values), values, strict=True):
        change_fusion(model, with_threshold(base, value))
        yield run, value


def _refuse_shared_folders(named: list[tuple[str, str]], values: list[float], out: Path) -> None:
    from crossfuse.evaluation.runs import folder_name

    folders = [folder_name(run) for name, _ in named for run in _run_names(name, values)]
    twice = next((f for f in folders if folders.count(f) > 1), None)
    if twice is not None:
        raise ValueError(f"two models would share the folder {out / twice}; name them: first={named[0][1]} second=…")


def _evaluate_model(
    name: str, source: str, model: Any, processor: Any, chosen: list[Any], out: Path, processes: Any,
    options: dict[str, Any], swept: dict[str, Any] | None,
) -> bool:  # fmt: skip
    """Ask and score one model; True where a task failed. Every task's files are whole before the next begins."""
    from crossfuse.cli.progress import Stages
    from crossfuse.evaluation.runs import SCORES, describe_run, folder_name, read_scores, score_task
    from crossfuse.reports.files import write_json

    directory = out / folder_name(name)
    if processes.main:
        local = options["local"]
        describe_run(
            directory, model, name, source=source, local=None if local is None else str(local), split=options["split"],
            bertscore=options["bertscore"], swept=swept,
        )  # fmt: skip
    failures: dict[str, str] = {}
    scores = read_scores(directory)
    with Stages() as stages:
        for each in chosen:
            error = None
            try:
                _ask(model, processor, name, each, directory, processes, stages, options)
            except Exception as raised:  # one task's fault must not cost the others' answers
                error = f"{type(raised).__name__}: {' '.join(str(raised).split())}"
            errors = [e for e in processes.gather(error) if e is not None]
            if not processes.main:
                continue
            if not errors:
                try:
                    scores[each.name] = score_task(directory, each.name, bertscore=options["bertscore"]).to_json()
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


def _ask(
    model: Any, processor: Any, name: str, each: Any, directory: Path, processes: Any, stages: Any,
    options: dict[str, Any],
) -> None:  # fmt: skip
    """Ask one task with its engine."""
    from crossfuse.evaluation.lmms_runs import ask_with_lmms_eval
    from crossfuse.evaluation.lmms_tasks import is_lmms_task
    from crossfuse.evaluation.runs import ask, load_samples

    asking = {"batch_size": options["batch_size"], "max_new_tokens": options["max_new_tokens"]}
    if is_lmms_task(each.name):
        with stages.steps() as show:
            ask_with_lmms_eval(
                model, processor, name, each, directory, processes=processes, limit=options["limit"],
                include_path=options["lmms_tasks"], progress=lambda done, of: show(f"{name}: {each.name}", done, of),
                **asking,
            )  # fmt: skip
        return
    samples = load_samples(each, options["local"], options["split"], options["limit"])
    total = (1 + options["shuffled"]) * len(samples) // processes.count
    with stages.stage(f"{name}: {each.name}", total) as progress:
        ask(
            model, processor, name, each, samples, directory, shuffled=options["shuffled"],
            shard=(processes.index, processes.count), progress=progress, **asking,
        )  # fmt: skip


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


def _load(source: str, fusion: Any, device: str) -> tuple[Any, Any]:
    from crossfuse.evaluation.thresholds import change_fusion
    from crossfuse.loading import load_model

    model, processor = load_model(source, device)
    if fusion is not None:
        change_fusion(model, fusion)
    return model.eval(), processor


def _list_tasks() -> None:
    from crossfuse.evaluation.tasks import needs_directory, tasks
    from crossfuse.reports.tables import Table

    rows = [
        [
            name, task.metric, task.samples, "--local" if needs_directory(task) else "made here", task.lmms_task,
            task.rule,
        ]
        for name, task in tasks().items()
    ]  # fmt: skip
    columns = ["task", "main metric", "samples", "files", "task of lmms-eval", "rule"]
    typer.echo(Table("tasks", columns, rows).to_markdown().rstrip())
