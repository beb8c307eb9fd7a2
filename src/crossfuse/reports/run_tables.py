"""The tables of a comparison of runs: scores, differences, costs, published numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from crossfuse.evaluation.published import matching_rows
from crossfuse.evaluation.run_comparison import RunComparison, TaskComparison, verdict
from crossfuse.reports.tables import Cell, Table

# Beside a task's main metric: the groups that comparisons are read by.
HEADLINES = {
    "scenes": ("accuracy/existence", "accuracy/attribute", "accuracy/count", "accuracy/relation"),
    "easy-vqa": ("accuracy/attribute", "accuracy/yes or no"),
    "scene-captions": ("exact", "bleu", "meteor", "cider", "bertscore"),
    "mme": ("perception", "cognition"),
    "mmbench": ("vanilla",),
    "scienceqa": ("all",),
    "hallusionbench": ("qAcc", "fAcc"),
}


def headline_keys(task: TaskComparison) -> list[str]:
    """Main metric first, then the groups, as far as they have values."""
    known = task.keys
    return [k for k in (task.task.metric, *HEADLINES.get(task.task.name, ())) if k in known]


def scores_table(comparison: RunComparison) -> Table:
    """Models × main metrics, and how many of the tasks each wins."""
    columns = [f"{t.task.name}: {k}" for t in comparison.tasks for k in headline_keys(t)]
    rows: list[list[Cell]] = []
    for model in comparison.models:
        values: list[Cell] = [t.value(model.name, k) for t in comparison.tasks for k in headline_keys(t)]
        won, judged = comparison.wins(model.name)
        wins = "baseline" if model.name == comparison.baseline else f"{won} of {judged}"
        rows.append([model.name, len(model.folders), *values, wins])
    caption = (
        "Mean over the seeds. Wins: tasks on whose main metric the 95 % interval of the difference to "
        f"{comparison.baseline} lies above zero, of those with an interval."
    )
    return Table("scores", ["model", "seeds", *columns, "wins"], rows, caption)


def task_table(comparison: RunComparison, task: TaskComparison) -> Table:
    """Models × metrics of one task for reading: shares in percent, the control, and the difference to the baseline."""
    keys = headline_keys(task)
    main = task.task.metric
    several = any(len(model.folders) > 1 for model in comparison.models)
    shuffled = any(task.shuffled_value(m.name, main) is not None for m in comparison.models)
    columns = ["model", *(_short(k) for k in keys)]
    columns += (["images shuffled"] if shuffled else []) + (["sd over seeds"] if several else [])
    columns += ["difference [95 %]", "better : worse", "verdict"]
    rows: list[list[Cell]] = []
    for model in comparison.models:
        if model.name not in task.metrics:
            continue
        cells: list[Cell] = [model.name, *(_percent(task.value(model.name, k), task.scale(k)) for k in keys)]
        if shuffled:
            cells.append(_percent(task.shuffled_value(model.name, main), task.scale(main)))
        if several:
            cells.append(_percent(task.spread(model.name, main), task.scale(main)))
        found = task.differences.get(model.name, {}).get(main)
        if found is None:
            cells += [None, None, "baseline" if model.name == comparison.baseline else None]
        else:
            factor = 100 if task.scale(main) == "0-1" else 1
            ends = ""
            if found.low is not None and found.high is not None:
                ends = f" [{factor * found.low:+.1f}, {factor * found.high:+.1f}]"
            counts = None if found.wins is None else f"{found.wins} : {found.losses} of {found.n}"
            cells += [f"{factor * found.value:+.1f}{ends}", counts, verdict(found, main)]
        rows.append(cells)
    caption = (
        f"Shares in percent. Control, spread and difference are those of {_short(main)}, the task's main metric; "
        "better : worse counts samples."
    )
    return Table(
        f"task-{task.task.name}", columns, rows, caption + (f" Over {task.left_out}." if task.left_out else "")
    )


def _short(key: str) -> str:
    return key.partition("/")[2] or key


def _percent(value: float | None, scale: str) -> Cell:
    if value is None:
        return None
    return f"{100 * value:.1f}" if scale == "0-1" else value


def differences_table(comparison: RunComparison, *, everything: bool = False) -> Table:
    """One row a model and metric: value, spread, control, difference to the baseline with its interval, wins."""
    columns = ["model", "task", "metric", "scale", "value", "sd over seeds", "images shuffled", "difference", "low",
               "high", "better on", "worse on", "of", "verdict"]  # fmt: skip
    rows: list[list[Cell]] = []
    notes = [f"{t.task.name}: {t.left_out}" for t in comparison.tasks if t.left_out]
    for task in comparison.tasks:
        for key in task.keys if everything else headline_keys(task):
            for model in comparison.models:
                found = task.differences.get(model.name, {}).get(key)
                head: list[Cell] = [
                    model.name, task.task.name, key, task.scale(key), task.value(model.name, key),
                    task.spread(model.name, key), task.shuffled_value(model.name, key),
                ]  # fmt: skip
                if found is None:
                    what = "baseline" if model.name == comparison.baseline else None
                    rows.append([*head, None, None, None, None, None, task.n(key), what])
                else:
                    rows.append([*head, found.value, found.low, found.high, found.wins, found.losses, found.n,
                                 verdict(found, key)])  # fmt: skip
    caption = (
        f"Difference to {comparison.baseline} with a 95 % paired bootstrap interval over pictures (and over seeds "
        "where there are several). Better on / worse on: samples, over all seeds."
        + "".join(f" {note}." for note in notes)
    )
    return Table("all-metrics" if everything else "differences", columns, rows, caption)


def costs_table(comparison: RunComparison) -> Table | None:
    """What training and memory cost; None where no run was trained here."""
    rows: list[list[Cell]] = []
    for model in comparison.models:
        trainings = [d["training"] for d in model.descriptions if "training" in d]
        if not trainings:
            continue
        first, cost = trainings[0], trainings[0]["step_cost"]
        rows.append(
            [
                model.name,
                model.descriptions[0]["parameters"],
                first["fusion_parameters"],
                first["trained_parameters"],
                round(_mean([t["steps"] for t in trainings])),
                round(_mean([t["samples"] for t in trainings])),
                1000 * _mean([t["step_cost"]["cpu_seconds"] for t in trainings]),
                cost["operations"] / 1e9,
                cost["activation_bytes"] / 2**20,
                first["cache_bytes"]["1"] / 2**10,
                first["cache_bytes"]["4"] / 2**10,
                _mean([t["cpu_seconds"] for t in trainings]),
                -_mean([t["validation_loss"] for t in trainings]),
            ]
        )
    if not rows:
        return None
    columns = ["model", "parameters", "of the fusion", "trained", "steps", "questions", "CPU ms a step", "GFLOP a step",
               "activations MiB", "cache KiB 1 image", "cache KiB 4 images", "train CPU s", "−val loss"]  # fmt: skip
    caption = (
        "CPU time of a step: median of five, measured before the training; operations and activations: of one training "
        "step. Cache: key-value cache after the prefill of one question. Training includes validation and checkpoints."
    )
    return Table("costs", columns, rows, caption)


def published_table(comparison: RunComparison, wanted: str) -> Table | None:
    """The runs' numbers above published ones, for the benchmarks that both have; None where there are none."""
    keys = {f"{t.task.name}.{k}": (t, k) for t in comparison.tasks for k in t.keys}
    found = matching_rows(wanted, keys)
    shared = [k for k in keys if any(k in row.values for row in found)]
    if not shared:
        return None
    rows: list[list[Cell]] = [
        [m.name, str(m.descriptions[0]["fusion"].get("name", "unknown")), "this comparison",
         *(keys[k][0].value(m.name, keys[k][1]) for k in shared)]
        for m in comparison.models
    ]  # fmt: skip
    rows += [[r.model, r.fusion, r.source, *(r.values.get(k) for k in shared)] for r in found]
    caption = "Published numbers as their sources print them; other splits, prompts or rules than here are possible."
    return Table("published", ["model", "fusion", "source", *shared], rows, caption)


def failures_table(folders: list[Path]) -> Table | None:
    """Fusions of a comparison that could not be run, with the reason; None where all could."""
    rows: list[list[Cell]] = []
    for folder in folders:
        for path in sorted(folder.glob("*/seed-*/failure.json")):
            failure: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            rows.append([failure["name"], failure["seed"], failure["reason"]])
    return Table("not-run", ["fusion", "seed", "reason"], rows) if rows else None


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
