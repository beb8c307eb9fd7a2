"""Every fusion of a comparison with every seed: worked off by any number of processes, killed and gone on with."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from crossfuse.evaluation.fusion_runs import FAILURE, Plan, run_fusion
from crossfuse.evaluation.runs import SCORES, folder_name
from crossfuse.evaluation.tasks import task
from crossfuse.reports.files import write_json

PLAN, LOCK = "plan.json", ".lock"


@dataclasses.dataclass(frozen=True)
class Job:
    """One fusion with one seed."""

    name: str
    fields: dict[str, Any]
    seed: int
    directory: Path

    def state(self, plan: Plan) -> str:
        """ "done", "failed" or "open" (not begun, begun, or at work in another process)."""
        if (self.directory / FAILURE).is_file():
            return "failed"
        try:
            scores = json.loads((self.directory / SCORES).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return "open"
        return "done" if set(plan.tasks) <= set(scores) else "open"


def jobs(rows: Mapping[str, dict[str, Any]], seeds: int, out: Path) -> list[Job]:
    """Seed by seed, so that what is there at any time compares all fusions. `ValueError` for fewer than one seed."""
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1; got {seeds}")
    return [
        Job(name, fields, seed, out / folder_name(name) / f"seed-{seed}")
        for seed in range(seeds)
        for name, fields in rows.items()
    ]


def begin(out: Path, plan: Plan) -> None:
    """Write plan.json, or check that the folder's comparison has the same plan (`ValueError` naming the field)."""
    path = out / PLAN
    own = json.loads(json.dumps(dataclasses.asdict(plan)))
    if not path.is_file():
        out.mkdir(parents=True, exist_ok=True)
        write_json(path, own)
        return
    stored = json.loads(path.read_text(encoding="utf-8"))
    for name, value in own.items():
        if stored.get(name) != value:
            raise ValueError(
                f"{out} holds a comparison with {name} = {stored.get(name)!r}, this one has {value!r}; "
                "give this one another --out"
            )


def work(
    todo: list[Job],
    plan: Plan,
    *,
    progress: Callable[[Job, str, int, int], None],
    say: Callable[[str], None],
) -> list[Job]:
    """Do every open job that no other process is at; returns those still open at the end (others' work).

    A fusion that fails is noted in its folder with the reason, and the others go on. A job that a killed process
    left is taken up where it stopped, as the system has dropped the lock.
    """
    for job in todo:
        if job.state(plan) != "open":
            continue
        with _claimed(job) as mine:
            # Another process may have finished it between the look and the lock.
            if not mine or job.state(plan) != "open":
                continue
            say(f"{job.name}, seed {job.seed}: begins")
            try:
                scores = run_fusion(
                    job.name, job.fields, job.seed, plan, job.directory,
                    lambda stage, done, of, job=job: progress(job, stage, done, of),  # type: ignore[misc]
                )  # fmt: skip
            except (ValueError, NotImplementedError, RuntimeError, ArithmeticError) as error:
                reason = " ".join(str(error).split()) or type(error).__name__
                write_json(job.directory / FAILURE, {"name": job.name, "seed": job.seed, "reason": reason})
                say(f"{job.name}, seed {job.seed}: failed: {reason}")
                continue
            found = {name: value.metrics.get(task(name).metric) for name, value in scores.items()}
            shown = ", ".join(
                f"{name} {m.value:.1%}" for name, m in found.items() if m is not None and m.value is not None
            )
            say(f"{job.name}, seed {job.seed}: {shown}")
    return [job for job in todo if job.state(plan) == "open"]


@contextlib.contextmanager
def _claimed(job: Job) -> Iterator[bool]:
    """Whether this process may work in the job's folder; the claim ends with the block or with the process."""
    job.directory.mkdir(parents=True, exist_ok=True)
    with (job.directory / LOCK).open("a") as file:
        try:
            import fcntl
        except ImportError:  # Windows: start one process only.
            yield True
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True
