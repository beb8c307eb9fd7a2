"""The report of a comparison of runs: report.html, its charts, and every table in four formats."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from crossfuse.evaluation.model_runs import find_runs, with_baseline
from crossfuse.evaluation.run_comparison import RunComparison, compare_runs, verdict
from crossfuse.reports.examples import Example, differing_examples
from crossfuse.reports.files import write_bytes
from crossfuse.reports.html import ReportPage
from crossfuse.reports.run_charts import comparison_charts
from crossfuse.reports.run_tables import (
    costs_table,
    differences_table,
    failures_table,
    published_table,
    scores_table,
    task_table,
)
from crossfuse.reports.run_thresholds import thresholds_table
from crossfuse.reports.tables import Table, write_all


def write_report(
    paths: Sequence[Path], out: Path, *, baseline: str | None, published: str, resamples: int, command: str
) -> list[str]:
    """Compare the runs of these folders and write everything to `out`; returns lines for the user.

    Raises `ValueError` where a folder holds no run, or there is no model besides the baseline.
    """
    models = with_baseline(find_runs(paths), baseline)
    if len(models) < 2:
        raise ValueError(f"a comparison needs two models; these folders hold {models[0].name!r} alone")
    comparison = compare_runs(models, resamples=resamples)
    tables = {
        "scores": scores_table(comparison),
        "differences": differences_table(comparison),
        "costs": costs_table(comparison),
        "thresholds": thresholds_table(comparison),
        "published": published_table(comparison, published),
        "not-run": failures_table(list(paths)),
        "all-metrics": differences_table(comparison, everything=True),
    }
    present = {name: table for name, table in tables.items() if table is not None}
    readable = [task_table(comparison, task) for task in comparison.tasks]
    charts = comparison_charts(comparison)
    for table in (*present.values(), *readable):
        write_all(table, out / "tables")
    for name, png in charts.items():
        write_bytes(out / name, png)
    sentences = verdict_sentences(comparison)
    page = _page(comparison, present, charts, differing_examples(comparison), sentences, command)
    page.write(out / "report.html")
    shown = [
        line
        for table in readable
        for line in (f"{table.name.removeprefix('task-')}:", table.to_markdown().rstrip(), "")
    ]
    if "thresholds" in present:
        shown += ["thresholds:", present["thresholds"].to_markdown().rstrip(), ""]
    return [*shown, *sentences, f"written: {out / 'report.html'}, {out / 'tables'}"]


def verdict_sentences(comparison: RunComparison) -> list[str]:
    """For each task who is better and who is worse than the baseline, and how many cannot be told apart from it."""
    sentences = []
    for task in comparison.tasks:
        key = task.task.metric
        said: dict[str, list[str]] = {"better": [], "worse": [], "not distinguishable": [], "no interval": []}
        for model in comparison.models[1:]:
            found = task.differences.get(model.name, {}).get(key)
            if found is None:
                continue
            factor, unit = (100, " points") if task.scale(key) == "0-1" else (1, "")
            what = verdict(found, key)
            said.setdefault(what, []).append(
                f"{model.name} ({factor * found.value:+.1f}{unit})" if what in ("better", "worse") else model.name
            )
        parts = [
            f"{what} than {comparison.baseline}: {', '.join(said[what])}" for what in ("better", "worse") if said[what]
        ]
        same, unknown = said["not distinguishable"], said["no interval"]
        if same:
            which = "the others" if parts and len(same) > 4 else "all others" if len(same) > 4 else ", ".join(same)
            parts.append(f"not distinguishable from {comparison.baseline}: {which}")
        if unknown:
            parts.append(f"without an interval: {', '.join(unknown)}")
        if parts:
            sentences.append(f"{task.task.name}, {key} ({len(task.samples)} samples): {'; '.join(parts)}.")
    return sentences


def _page(
    comparison: RunComparison,
    tables: dict[str, Table],
    charts: dict[str, bytes],
    examples: list[Example],
    sentences: list[str],
    command: str,
) -> ReportPage:
    page = ReportPage(f"Comparison of {len(comparison.models)} models on {len(comparison.tasks)} tasks")
    page.bullets(sentences)
    for task in comparison.tasks:
        page.heading(f"Task {task.task.name}")
        _table(page, task_table(comparison, task))
        name = f"difference-{task.task.name}.png"
        if name in charts:
            page.figure(charts[name], caption=f"{task.task.name}: {task.task.rule}. Lines: 95 % interval.")
    page.heading("All tasks")
    if "radar.png" in charts:
        page.figure(
            charts["radar.png"],
            caption="Each spoke has its own scale, printed under its name (AttAnchor, Figure 4).",
        )
    headings = {
        "thresholds": "Thresholds",
        "published": "Beside published numbers",
        "costs": "Parameters, time and memory",
        "not-run": "Not run",
    }
    for name, heading in headings.items():
        if name in tables:
            page.heading(heading)
            _table(page, tables[name])
    if "loss.png" in charts:
        page.heading("Training")
        page.figure(
            charts["loss.png"], caption="First seed of each run. Validation: questions that are never trained on."
        )
    if examples:
        page.heading("Where the models differ")
        for example in examples:
            right = [name for name, _, ok in example.answers if ok]
            page.example(
                example.png,
                f"{example.task}: {example.prompt}",
                f"Reference: {example.reference}. Right: {len(right)} of {len(example.answers)}.",
                [(name, answer, ok) for name, answer, ok in example.answers],
            )
    page.heading("How this was measured")
    page.bullets(_method(comparison))
    page.paragraph("Every number, in tables/ as Markdown, CSV, JSON and LaTeX. Made by:", note=True)
    page.code(command)
    return page


def _method(comparison: RunComparison) -> list[str]:
    lines = [f"{t.task.name}: {t.task.rule} ({t.task.source}); {len(t.samples)} samples." for t in comparison.tasks]
    trained = [d for m in comparison.models for d in m.descriptions if "training" in d]
    if trained:
        plan = trained[0]["training"]["plan"]
        budget = next(f"{plan[n]:g} {n}" for n in ("samples", "seconds", "operations") if plan[n] is not None)
        lines.append(
            "Every fusion was trained from the same start, the embedded model before it saw a question with its "
            f"picture, with a budget of {budget} (batch {plan['batch_size']}, AdamW, peak rate "
            f"{plan['learning_rate']:g}, cosine); language model, projector and the fusion's own layers in full, the "
            "vision tower frozen; the seeds change "
            "the order and choice of training questions and the fresh weights."
        )
        lines.append(
            "What this does not show: the ranking on photographs, with large models or long trainings. Differences "
            "within their interval are not distinguishable, whatever their sign."
        )
    lines.append(
        "Intervals: paired bootstrap over pictures, 2.5 to 97.5 percent of the draws; not corrected for the number of "
        "models, so one in twenty differences of nothing looks like one."
    )
    return lines


def _table(page: ReportPage, table: Table) -> None:
    page.table(list(table.columns), table.texts(), caption=table.caption, compact=len(table.columns) > 5)
