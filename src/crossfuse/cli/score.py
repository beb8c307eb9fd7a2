"""`crossfuse score`: scores of answers on disk. Pure: no model, no network, no data set asked again."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crossfuse.cli.scoring_options import BertscoreLayers, BertscoreModel

if TYPE_CHECKING:
    from crossfuse.reports.tables import Table


def score(
    predictions: Annotated[
        list[Path], typer.Argument(help="Folders of `crossfuse evaluate`, or prediction files (JSON lines).")
    ],
    task: Annotated[
        str | None, typer.Option(help="Task of the prediction files.", show_default="from the files' names")
    ] = None,
    local: Annotated[
        Path | None, typer.Option(help="Published files to score against, where no samples file lies beside.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Split of the published files.")] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Score the answered samples where some are missing.")
    ] = False,
    bertscore_model: BertscoreModel = None,
    bertscore_layers: BertscoreLayers = None,
    out: Annotated[Path | None, typer.Option(help="File for the scores: .json, .csv, .md or .tex.")] = None,
) -> None:
    """Score PREDICTIONS again: every metric with its rule, scale, number of samples and unread answers."""
    from crossfuse.reports.tables import write_table

    folders = {_label(path, predictions): path for path in predictions if path.is_dir()}
    files = [path for path in predictions if not path.is_dir()]
    missing = next((path for path in files if not path.is_file()), None)
    if missing is not None:
        raise ValueError(f"no such file or folder: {missing}; give what crossfuse evaluate wrote")
    encoder = _encoder(bertscore_model, bertscore_layers, folders, files, task)
    names = None if task is None else [task]
    tables = [score_table(folders, names, partial=partial, bertscore=encoder)] if folders else []
    if files:
        tables.append(_file_table(files, task, local, split, partial, encoder))
    table = tables[0] if len(tables) == 1 else tables[0].joined(tables[1])
    typer.echo(table.to_markdown().rstrip())
    if out is not None:
        write_table(table, out)
        typer.echo(f"written: {out}")


def _encoder(
    model: str | None, layers: int | None, folders: Mapping[str, Path], files: Sequence[Path], task: str | None
) -> dict[str, Any] | None:
    """The encoder of the options; None where there is none, so that each run's own is used."""
    if model is None and layers is None:
        return None
    from crossfuse.evaluation.runs import run_tasks
    from crossfuse.evaluation.tasks import bertscore_encoder
    from crossfuse.evaluation.tasks import task as task_of

    names = [task] if task is not None else [n for folder in folders.values() for n in run_tasks(folder)]
    names += [_task_of_file(path, task)[0] for path in files]
    return bertscore_encoder(model, layers, [task_of(name) for name in names])


def score_table(
    folders: Mapping[str, Path],
    names: Sequence[str] | None = None,
    *,
    partial: bool = False,
    bertscore: Mapping[str, Any] | None = None,
) -> Table:
    """Scores of run folders; tasks `names`, or all that are in the folders; `bertscore` in place of a run's encoder."""
    from crossfuse.evaluation.runs import read_run, run_tasks, score_task

    rows = []
    for label, folder in folders.items():
        for name in names or run_tasks(folder):
            encoder = bertscore if bertscore is not None else read_run(folder).get("bertscore")
            scores = score_task(folder, name, partial=partial, bertscore=encoder)
            rows += metric_rows(label, name, scores.metrics)
            if scores.shuffled is not None:
                rows += metric_rows(label, f"{name}, images shuffled", scores.shuffled)
    return _table(rows)


def metric_rows(label: str, name: str, metrics: Mapping[str, Any]) -> list[list[Any]]:
    """Rows of one task of one run."""
    return [
        [label, name, key, metric.value, metric.n, metric.scale, metric.variant, metric.library, metric.reason]
        for key, metric in metrics.items()
    ]


def _table(rows: list[list[Any]]) -> Table:
    from crossfuse.reports.tables import Table

    columns = ["run", "task", "metric", "value", "n", "scale", "rule", "library", "note"]
    return Table("scores", columns, rows)


def _file_table(
    files: list[Path],
    task: str | None,
    local: Path | None,
    split: str | None,
    partial: bool,
    bertscore: Mapping[str, Any] | None,
) -> Table:
    """Files of one task count as one run (such as the parts of several processes), those of different tasks do not."""
    from crossfuse.evaluation.predictions import prompt_hash, read_predictions
    from crossfuse.evaluation.runs import load_samples, score_answers
    from crossfuse.evaluation.samples import StoredSamples
    from crossfuse.evaluation.tasks import task as task_of
    from crossfuse.evaluation.tasks import with_bertscore

    groups: dict[tuple[Path, str, bool], list[Path]] = {}
    for path in files:
        name, shuffled = _task_of_file(path, task)
        groups.setdefault((path.parent, name, shuffled), []).append(path)
    rows = []
    for (folder, name, shuffled), paths in groups.items():
        predictions, settings = read_predictions(paths)
        chosen = with_bertscore(task_of(name), bertscore)
        beside = folder / f"{name}.samples.jsonl"
        if local is None and beside.is_file():
            stored = StoredSamples(beside)
            samples: Sequence[Any] = stored
            prompts = dict(zip((s.record.id for s in stored), stored.prompts, strict=True))
            answers = {
                i: p.answer for i, p in predictions.items() if i in prompts and p.prompt_hash == prompt_hash(prompts[i])
            }
        else:
            samples = load_samples(chosen, local, split, None)
            answers = {i: p.answer for i, p in predictions.items()}
        metrics = score_answers(chosen, answers, samples, partial=partial)
        label = str(settings[0].get("model", folder.name)) if settings else folder.name
        rows += metric_rows(label, name + (", images shuffled" if shuffled else ""), metrics)
    return _table(rows)


def _task_of_file(path: Path, task: str | None) -> tuple[str, bool]:
    found = re.fullmatch(r"(.+?)(\.shuffled)?\.predictions(-\d+-of-\d+)?\.jsonl", path.name)
    if task is not None:
        return task, bool(found and found.group(2))
    if found is None:
        raise ValueError(f"{path} does not say its task (TASK.predictions.jsonl); give it with --task")
    return found.group(1), found.group(2) is not None


def _label(path: Path, among: Sequence[Path]) -> str:
    names = [p.resolve().name for p in among]
    own = path.resolve().name
    return own if names.count(own) == 1 else str(path)
