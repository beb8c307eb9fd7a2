"""Evaluation runs on disk: one folder a model, predictions first, scores as a separate pure step.

::

    RUN/run.json                              model, fusion, parameters, versions
        TASK.samples.jsonl                    prompts and references, without pictures
        TASK.predictions.jsonl                one answer a line, appended at once
        TASK.predictions-0-of-2.jsonl         the same of one of several processes
        TASK.shuffled.predictions.jsonl       answers with another sample's picture
        TASK@lmms-eval.scored.json            what lmms-eval found, where it was the engine (`lmms_runs`)
        scores.json                           metrics by task
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from crossfuse.devices import input_device
from crossfuse.evaluation.benchmarks.base import Benchmark, BenchmarkSample, Metric
from crossfuse.evaluation.generation import predict, run_settings
from crossfuse.evaluation.lmms_runs import read_scored
from crossfuse.evaluation.lmms_tasks import INSTALL, is_lmms_task, lmms_eval_is_installed
from crossfuse.evaluation.predictions import PredictionFile, RunSettings, of_shard, read_predictions
from crossfuse.evaluation.samples import StoredSamples, answers_to, with_other_pictures, write_samples
from crossfuse.evaluation.tasks import needs_directory, task, with_bertscore
from crossfuse.reports.files import write_json

RUN, SCORES = "run.json", "scores.json"


@dataclasses.dataclass(frozen=True)
class TaskScores:
    """What one task gave: metrics with the samples' own pictures, and with exchanged ones where that was asked for."""

    metrics: dict[str, Metric]
    shuffled: dict[str, Metric] | None = None

    def to_json(self) -> dict[str, Any]:
        shuffled = None if self.shuffled is None else {k: m.to_json() for k, m in self.shuffled.items()}
        return {"metrics": {k: m.to_json() for k, m in self.metrics.items()}, "shuffled_images": shuffled}


def folder_name(name: str) -> str:
    """A model's name as the name of its folder."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", name).strip("-.") or "model"


def describe_run(directory: Path, model: Any, name: str, **more: Any) -> None:
    """Write run.json: what was evaluated. `more` is kept beside it."""
    from crossfuse import fusion_of, fusion_parameters

    fusion = fusion_of(model)
    write_json(
        directory / RUN,
        {
            "name": name,
            "fusion": {"name": "none"} if fusion is None else fusion.to_dict(),
            "parameters": sum(p.numel() for p in model.parameters()),
            "fusion_parameters": 0 if fusion is None else sum(p.numel() for p in fusion_parameters(model).values()),
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
            "device": input_device(model).type,
            "versions": {p: importlib.metadata.version(p) for p in ("crossfuse", "torch", "transformers")},
            **more,
        },
    )


def load_samples(chosen: Benchmark, local: Path | None, split: str | None, limit: int | None) -> list[BenchmarkSample]:
    """The task's samples; published files lie in `local` or in its folder of the task's name.

    Raises `ValueError` where they are needed and there is no such folder.
    """
    if not needs_directory(chosen):
        return chosen.load(Path(), split, limit)
    if local is None:
        raise ValueError(
            f"{chosen.name} needs its published files; give their folder with --local DIR{_or_lmms(chosen)}"
        )
    own = local / chosen.name
    return chosen.load(own if own.is_dir() else local, split, limit)


def _or_lmms(chosen: Benchmark) -> str:
    if chosen.lmms_task is None or lmms_eval_is_installed():
        return ""
    return f", or install lmms-eval, which fetches them ({INSTALL})"


def ask(
    model: Any,
    processor: Any,
    name: str,
    chosen: Benchmark,
    samples: Sequence[BenchmarkSample],
    directory: Path,
    *,
    batch_size: int = 32,
    max_new_tokens: int | None = None,
    shuffled: bool = False,
    shard: tuple[int, int] = (0, 1),
    progress: Callable[[int], None] | None = None,
) -> None:
    """Ask what is missing of one task; every finished batch is on disk before the next starts.

    Answers that are there already, by this process or others (another number of processes too), are not asked again.

    Args:
        shard: (index, count) of this process among those that share the samples by their ids.
        progress: called with the number of samples done, in both passes where `shuffled`.
    """
    if shard[0] == 0:
        write_samples(directory / f"{chosen.name}.samples.jsonl", samples)
    settings = run_settings(model, name, batch_size=batch_size, max_new_tokens=max_new_tokens or chosen.max_new_tokens)
    passes = [(False, samples)] + ([(True, with_other_pictures(samples))] if shuffled else [])
    for exchanged, asked in passes:
        file = prediction_file(directory, chosen.name, settings, shuffled=exchanged, shard=shard)
        mine = [s.record for s in asked if of_shard(s.record.id, *shard)]
        predict(model, processor, mine, file, progress=progress)


def prediction_file(
    directory: Path,
    name: str,
    settings: RunSettings,
    *,
    decoding: dict[str, Any] | None = None,
    shuffled: bool = False,
    shard: tuple[int, int] = (0, 1),
) -> PredictionFile:
    """This process's prediction file of a task, which knows the answers of the others; `decoding` replaces that of the
    settings."""
    if decoding is not None:
        settings = dataclasses.replace(settings, decoding=decoding)
    own = f"-{shard[0]}-of-{shard[1]}" if shard[1] > 1 else ""
    others = prediction_files(directory, name, shuffled)
    return PredictionFile(directory / f"{_kind(name, shuffled)}{own}.jsonl", settings, others)


def prediction_files(directory: Path, name: str, shuffled: bool = False) -> list[Path]:
    """Prediction files of one task, those of all processes."""
    stem = re.escape(_kind(name, shuffled))
    return sorted(p for p in directory.glob("*.jsonl") if re.fullmatch(rf"{stem}(-\d+-of-\d+)?\.jsonl", p.name))


def _kind(name: str, shuffled: bool) -> str:
    return f"{name}.shuffled.predictions" if shuffled else f"{name}.predictions"


def run_tasks(directory: Path) -> list[str]:
    """Tasks of a run, those of scores.json in its order first. `ValueError` where the folder holds no run."""
    found = sorted(p.name.removesuffix(".samples.jsonl") for p in directory.glob("*.samples.jsonl"))
    if not found:
        raise ValueError(
            f"{directory} holds no evaluation run (no *.samples.jsonl); give a folder of crossfuse evaluate"
        )
    return found


def score_task(
    directory: Path, name: str, *, partial: bool = False, bertscore: Mapping[str, Any] | None = None
) -> TaskScores:
    """Score the answers that lie in a run's folder. Pure: no model, no network, nothing is written.

    Args:
        bertscore: the encoder that captions are compared with (`tasks.with_bertscore`).
        partial: score the answered samples only, where some are missing (`ValueError` otherwise).
    """
    if is_lmms_task(name):
        return TaskScores(read_scored(directory, name)[0])
    samples = StoredSamples(directory / f"{name}.samples.jsonl")
    chosen = with_bertscore(task(name), bertscore)
    plain = _score_pass(directory, chosen, samples, shuffled=False, partial=partial)
    shuffled = None
    if prediction_files(directory, name, True):
        shuffled = _score_pass(directory, chosen, samples, shuffled=True, partial=partial)
    return TaskScores(plain, shuffled)


def run_answers(directory: Path, name: str, samples: StoredSamples, *, shuffled: bool = False) -> dict[str, str]:
    """Answers of a run to these samples by id, each once however many files hold it."""
    predictions, _ = read_predictions(prediction_files(directory, name, shuffled))
    return answers_to(samples, predictions)


def _score_pass(
    directory: Path, chosen: Benchmark, samples: StoredSamples, *, shuffled: bool, partial: bool
) -> dict[str, Metric]:
    answers = run_answers(directory, chosen.name, samples, shuffled=shuffled)
    return score_answers(chosen, answers, samples, partial=partial)


def score_answers(
    chosen: Benchmark, answers: Mapping[str, str], samples: Sequence[BenchmarkSample], *, partial: bool = False
) -> dict[str, Metric]:
    """Metrics of a task; with `partial` over the answered samples only."""
    if partial:
        samples = [sample for sample in samples if sample.record.id in answers]
    return chosen.score(answers, samples)


def write_scores(directory: Path, scores: Mapping[str, TaskScores]) -> None:
    """Write scores.json with what is scored so far."""
    write_json(directory / SCORES, {name: value.to_json() for name, value in scores.items()})


def read_scores(directory: Path) -> dict[str, Any]:
    """scores.json; empty where there is none yet."""
    path = directory / SCORES
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def read_run(directory: Path) -> dict[str, Any]:
    """run.json; an empty description with the folder's name where there is none."""
    path = directory / RUN
    if not path.is_file():
        return {"name": directory.name, "fusion": {"name": "unknown"}}
    description: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return description
