"""Tasks of lmms-eval run in this process on a crossfuse model, with its results as our metrics."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from crossfuse.evaluation.benchmarks.base import Metric

REMEDY = "pip install 'crossfuse[eval]', or score the published files with --local DIR"


def run_lmms_eval(
    model: Any,
    processor: Any,
    tasks: Sequence[str],
    *,
    batch_size: int = 1,
    limit: int | None = None,
    include_path: str | os.PathLike[str] | None = None,
    include_defaults: bool = True,
) -> dict[str, dict[str, Metric]]:
    """Metrics by task. lmms-eval loads the data (from the hub, unless a task's YAML names local files).

    Args:
        tasks: names of lmms-eval, as `Benchmark.lmms_task` has them, or of YAML files in `include_path`.
        include_defaults: False reads the tasks of `include_path` only, which is faster.

    Raises:
        RuntimeError: lmms-eval is not installed, or it ended without results for a task (it reports success then).
    """
    try:
        from lmms_eval import evaluator
        from lmms_eval.tasks import TaskManager
    except ImportError as error:
        raise RuntimeError(f"lmms-eval cannot be used here ({error}): {REMEDY}") from error
    from crossfuse.evaluation.lmms_plugin import Crossfuse
    from crossfuse.evaluation.text_metrics import version

    extra = None if include_path is None else os.fspath(include_path)
    manager = TaskManager("WARNING", include_path=extra, include_defaults=include_defaults)
    engine = Crossfuse(model=model, processor=processor, batch_size=batch_size)
    found = evaluator.simple_evaluate(
        model=engine,
        tasks=list(tasks),
        batch_size=batch_size,
        limit=limit,
        task_manager=manager,
        log_samples=False,
        bootstrap_iters=0,
    )
    results = (found or {}).get("results", {})
    counts = (found or {}).get("n-samples", {})
    missing = [task for task in tasks if not _numbers(results.get(task, {}))]
    if missing:
        raise RuntimeError(f"lmms-eval gave no results for {', '.join(missing)}; run lmms_eval on them to see why")
    library = version("lmms-eval")
    return {task: _metrics(task, results[task], counts.get(task, {}), library) for task in tasks}


def _metrics(task: str, values: dict[str, Any], counts: dict[str, Any], library: str) -> dict[str, Metric]:
    n = int(counts.get("effective", counts.get("original", 0)))
    metrics = {}
    for name, value in _numbers(values).items():
        metric, _, filter_name = name.partition(",")
        variant = f"lmms-eval task {task}" + (f", filter {filter_name}" if filter_name not in ("", "none") else "")
        metrics[metric] = Metric(float(value), n, variant, "as the task defines it", library)
    return metrics


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and "stderr" not in name and "," in name
    }
