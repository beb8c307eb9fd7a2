"""Tasks of lmms-eval in an evaluation run's folder, beside those of this package.

::

    RUN/TASK@lmms-eval.predictions.jsonl      one answer a line, written at once; a killed run goes on from it
        TASK@lmms-eval.samples.jsonl          prompts and right answers
        TASK@lmms-eval.scored.json            lmms-eval's metrics, and its value of each sample
        scores.json                           the same metrics
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crossfuse.evaluation.benchmarks.base import Benchmark, Metric
from crossfuse.evaluation.processes import Processes
from crossfuse.reports.files import write_json


def ask_with_lmms_eval(
    model: Any,
    processor: Any,
    name: str,
    chosen: Benchmark,
    directory: Path,
    *,
    batch_size: int,
    processes: Processes,
    limit: int | None = None,
    max_new_tokens: int | None = None,
    include_path: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Ask and score one task with lmms-eval; the answers are on disk as they come, the scores at the end.

    Args:
        chosen: a task of `lmms_tasks.lmms_task`.
        include_path: folder of task files (YAML) that go before lmms-eval's own of the same name.
        progress: called with (samples done, all samples of this process).

    Raises:
        RuntimeError: see `lmms_engine.run_lmms_eval`.
    """
    from crossfuse.evaluation.lmms_engine import evaluate_with, require_lmms_eval, task_manager

    require_lmms_eval()
    from crossfuse.evaluation.lmms_recorded import RecordedCrossfuse

    theirs = str(chosen.lmms_task)
    engine = RecordedCrossfuse(
        model, processor, name=name, task=chosen.name, directory=directory, batch_size=batch_size,
        processes=processes, progress=progress,
    )  # fmt: skip
    manager = None if include_path is None else task_manager(os.fspath(include_path), False)
    if manager is None or theirs not in manager.all_tasks:
        manager = task_manager()
    found = evaluate_with(engine, [theirs], manager, limit=limit, max_new_tokens=max_new_tokens)[theirs]
    if not processes.main:
        return
    from crossfuse.evaluation.samples import write_asked

    # Tasks that rank options by likelihood ask no question that has an answer of its own.
    asked = engine.asked or dict.fromkeys(found.targets, ("(options ranked by likelihood)", ""))
    write_asked(
        directory / f"{chosen.name}.samples.jsonl",
        ((id, prompt, {"answer": found.targets.get(id, "")}, {}, key) for id, (prompt, key) in asked.items()),
    )
    scored = {"metrics": {k: m.to_json() for k, m in found.metrics.items()}, "values": found.values}
    write_json(scored_path(directory, chosen.name), scored)


def scored_path(directory: Path, name: str) -> Path:
    """The file with lmms-eval's scores of a task."""
    return directory / f"{name}.scored.json"


def read_scored(directory: Path, name: str) -> tuple[dict[str, Metric], dict[str, dict[str, float]]]:
    """(metrics, each sample's values by metric). `ValueError` where the task was not finished."""
    path = scored_path(directory, name)
    if not path.is_file():
        raise ValueError(f"{path} is not there: lmms-eval has not finished {name}; run crossfuse evaluate again")
    stored = json.loads(path.read_text(encoding="utf-8"))
    return {k: Metric(**m) for k, m in stored["metrics"].items()}, stored["values"]
