"""Tasks of lmms-eval run in this process on a crossfuse model, with its results as our metrics."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from crossfuse.evaluation.benchmarks.base import Metric

ON_DISK = "published files on disk are scored with --engine crossfuse --local DIR"
REMEDY = "pip install 'crossfuse[eval]', or score the published files with --local DIR"


@dataclasses.dataclass(frozen=True)
class LmmsResult:
    """What lmms-eval found for one task.

    metrics: its aggregates. values: by metric each sample's value, where that is a number. targets: the right answers.
    The samples' ids are "TASK/NUMBER" with the task's (or the subtask's) name and the number within its data set.
    """

    metrics: dict[str, Metric]
    values: dict[str, dict[str, float]]
    targets: dict[str, str]


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
        RuntimeError: lmms-eval is not installed, the data cannot be loaded, or it ended without results for a task
            (it reports success then).
    """
    require_lmms_eval()
    from crossfuse.evaluation.lmms_plugin import Crossfuse

    engine = Crossfuse(model=model, processor=processor, batch_size=batch_size)
    manager = task_manager(None if include_path is None else os.fspath(include_path), include_defaults)
    return {name: found.metrics for name, found in evaluate_with(engine, tasks, manager, limit=limit).items()}


def require_lmms_eval() -> None:
    """`RuntimeError` with the remedy where lmms-eval is missing or cannot be imported."""
    try:
        import lmms_eval.evaluator
        import lmms_eval.tasks  # noqa: F401
    except ImportError as error:
        raise RuntimeError(f"lmms-eval cannot be used here ({error}): {REMEDY}") from error


@functools.lru_cache(maxsize=4)
def task_manager(include_path: str | None = None, include_defaults: bool = True) -> Any:
    """lmms-eval's index of tasks; reading all of its own takes seconds, so that it is kept."""
    from lmms_eval.tasks import TaskManager

    return TaskManager("WARNING", include_path=include_path, include_defaults=include_defaults)


def evaluate_with(
    engine: Any, tasks: Sequence[str], manager: Any, *, limit: int | None = None, max_new_tokens: int | None = None
) -> dict[str, LmmsResult]:
    """Let lmms-eval ask the engine (a model of its kind). Raises as `run_lmms_eval`."""
    from lmms_eval import evaluator

    unknown = [name for name in tasks if name not in manager.all_tasks]
    if unknown:
        from crossfuse.fusion import nearest

        raise RuntimeError(f"lmms-eval knows no task {unknown[0]!r}{nearest(unknown[0], manager.all_tasks)}")
    try:
        with _alone(), _quiet():
            found = evaluator.simple_evaluate(
                model=engine,
                tasks=list(tasks),
                batch_size=engine.batch_size,
                limit=limit,
                task_manager=manager,
                log_samples=True,
                bootstrap_iters=0,
                gen_kwargs=None if max_new_tokens is None else f"max_new_tokens={max_new_tokens}",
                verbosity="WARNING",
            )
    except Exception as error:
        raise RuntimeError(f"lmms-eval could not run {', '.join(tasks)} ({_cause(error)}); {ON_DISK}") from error
    found = found or {}
    results = {name: _result(name, found) for name in tasks}
    missing = [name for name, result in results.items() if not result.metrics]
    if missing:
        raise RuntimeError(f"lmms-eval gave no results for {', '.join(missing)}; run lmms_eval on them to see why")
    return results


def _result(name: str, found: dict[str, Any]) -> LmmsResult:
    """A task's result. A group that lmms-eval does not sum up gets the plain mean over its tasks, and each of them."""
    from crossfuse.evaluation.text_metrics import version

    library = version("lmms-eval")
    own = _members(name, found.get("group_subtasks", {})) or [name]
    values: dict[str, dict[str, float]] = {}
    targets: dict[str, str] = {}
    parts: dict[str, dict[str, Metric]] = {}
    for task in own:
        samples = found.get("samples", {}).get(task, [])
        metrics = _numbers(found.get("results", {}).get(task, {}))
        several = len({key.partition(",")[2] for key in metrics}) > 1
        count = found.get("n-samples", {}).get(task, {})
        n = int(count.get("effective", count.get("original", len(samples))))
        parts[task] = {}
        for key, value in metrics.items():
            metric, _, filter_name = key.partition(",")
            label = f"{metric}/{filter_name}" if several and filter_name != "none" else metric
            each = {} if several else _values(task, samples, metric)
            variant = f"lmms-eval task {task}" + (f", filter {filter_name}" if filter_name not in ("", "none") else "")
            parts[task][label] = Metric(value, len(each) or n, variant, "as the task defines it", library)
            values.setdefault(label, {}).update(each)
            if task != name:
                values[f"{label}/{task}"] = each
        targets |= {f"{task}/{s['doc_id']}": str(s.get("target", "")) for s in samples}
    if own == [name]:
        return LmmsResult(parts[name], values, targets)
    summed = _numbers(found.get("results", {}).get(name, {}))
    metrics_of_group = {
        key.partition(",")[0]: Metric(
            value, sum(m.n for part in parts.values() for k, m in part.items() if k == key.partition(",")[0]),
            f"lmms-eval group {name}", "as the group defines it", library,
        )
        for key, value in summed.items()
    }  # fmt: skip
    for label in dict.fromkeys(k for part in parts.values() for k in part) if not summed else ():
        each_part = [part[label] for part in parts.values() if label in part and part[label].value is not None]
        mean = sum(m.value for m in each_part if m.value is not None) / max(len(each_part), 1)
        variant = f"mean over {len(each_part)} tasks of lmms-eval's group {name}, which has no sum of its own"
        metrics_of_group[label] = Metric(
            mean, sum(m.n for m in each_part), variant, "as the tasks define it", library
        )  # fmt: skip
    for task, part in parts.items():
        metrics_of_group |= {f"{label}/{task}": metric for label, metric in part.items()}
    return LmmsResult(metrics_of_group, values, targets)


def _members(name: str, groups: dict[str, list[str]]) -> list[str]:
    """The tasks of a group, those of groups within it too; none for a task."""
    found: list[str] = []
    for member in groups.get(name, []):
        found += _members(member, groups) or [member]
    return found


def _values(task: str, samples: Sequence[dict[str, Any]], metric: str) -> dict[str, float]:
    return {
        f"{task}/{s['doc_id']}": float(s[metric])
        for s in samples
        if isinstance(s.get(metric), int | float) and not isinstance(s.get(metric), str)
    }


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and "stderr" not in name and "," in name
    }


def _cause(error: BaseException) -> str:
    """The fault behind wrappers and retries, in one line."""
    attempt = getattr(error, "last_attempt", None)
    if attempt is not None and attempt.exception() is not None:
        return _cause(attempt.exception())
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One process as lmms-eval sees it: `accelerate launch` shards by sample ids here, and lmms-eval would pad ranks
    with samples that are asked twice."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(before)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Its log of settings and seeds would stand in the middle of our tables; faults arrive as exceptions.

    Bars of downloads stay where somebody watches.
    """
    from loguru import logger  # type: ignore[import-not-found, unused-ignore]

    logger.disable("lmms_eval")
    try:
        with contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.enable("lmms_eval")
