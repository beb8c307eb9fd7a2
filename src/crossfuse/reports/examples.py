"""Questions on which the models of a comparison differ most, with picture, reference and every answer."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

from PIL import Image

from crossfuse.data.images import open_image
from crossfuse.data.records import Record
from crossfuse.evaluation.bootstrap import sample_values
from crossfuse.evaluation.lmms_tasks import is_lmms_task
from crossfuse.evaluation.run_comparison import RunComparison, TaskComparison, lower_is_better
from crossfuse.evaluation.runs import load_samples, read_run

SIDE = 224


@dataclasses.dataclass(frozen=True)
class Example:
    """One question. answers: (model, its answer, whether it is right) of the first seed; png: None where the picture
    cannot be found any more."""

    task: str
    prompt: str
    reference: str
    answers: list[tuple[str, str, bool]]
    png: bytes | None


def differing_examples(comparison: RunComparison, *, count: int = 8) -> list[Example]:
    """The questions whose models are nearest to half right, half wrong; tasks and kinds of question take turns."""
    ranked: list[tuple[int, float, TaskComparison, int, dict[str, float]]] = []
    for task in comparison.tasks:
        # A metric that judges every sample alone; others have no answer that is right or wrong.
        right: dict[str, list[float]] = {}
        for model, runs in task.answers.items():
            key = task.task.metric
            unfit = task.task.captions or is_lmms_task(task.task.name) or lower_is_better(key)
            if unfit or task.metrics[model][0].get(key) is None:
                continue
            whole = {key: task.metrics[model][0][key]}
            values = sample_values(task.task, runs[0], task.samples, whole)
            if key in values:
                right[model] = list(values[key].values)
        if len(right) < 2:
            continue
        top = max(max(values) for values in right.values()) or 1.0
        turn: dict[str, int] = {}
        shares = []
        for index in range(len(task.samples)):
            share = sum(values[index] >= top / 2 for values in right.values()) / len(right)
            if 0 < share < 1:
                shares.append((abs(share - 0.5), index))
        for distance, index in sorted(shares):
            kind = str(task.samples[index].record.meta.get("kind", ""))
            turn[kind] = turn.get(kind, 0) + 1
            judged = {model: values[index] / top for model, values in right.items()}
            ranked.append((turn[kind], distance, task, index, judged))
    chosen = sorted(ranked, key=lambda item: item[:2])[:count]
    wanted: dict[str, set[str]] = {}
    for _, _, task, index, _ in chosen:
        wanted.setdefault(task.task.name, set()).add(task.samples[index].record.id)
    folder = comparison.models[0].folders[0]
    pictures = {
        t.task.name: _pictures(folder, t, wanted[t.task.name]) for t in comparison.tasks if t.task.name in wanted
    }
    return [_example(comparison, task, index, judged, pictures[task.task.name]) for _, _, task, index, judged in chosen]


def _example(
    comparison: RunComparison, task: TaskComparison, index: int, judged: dict[str, float], pictures: dict[str, bytes]
) -> Example:
    sample = task.samples[index]
    answers = [
        (m.name, task.answers[m.name][0][sample.record.id], judged[m.name] >= 0.5)
        for m in comparison.models
        if m.name in judged
    ]
    reference = sample.reference.get("answer", sample.reference.get("answers", ""))
    shown = ", ".join(dict.fromkeys(map(str, reference))) if isinstance(reference, list) else str(reference)
    return Example(task.task.name, task.samples.prompts[index], shown, answers, pictures.get(sample.record.id))


def _pictures(folder: Path, task: TaskComparison, wanted: set[str]) -> dict[str, bytes]:
    """Pictures of these samples by id, from the task's files as they were given; without those that are gone."""
    run = read_run(folder)
    local = run.get("local")
    found: dict[str, bytes] = {}
    try:
        limit = len(task.samples) if local is None else None
        samples = load_samples(task.task, None if local is None else Path(local), run.get("split"), limit)
        for record in (sample.record for sample in samples):  # read or drawn one by one: each once, no more than needed
            if record.id in wanted and (png := _png(record)) is not None:
                found[record.id] = png
                if len(found) == len(wanted):
                    break
    except (OSError, ValueError):
        pass
    return found


def _png(record: Record) -> bytes | None:
    """The first picture, small; None where there is none or it cannot be read."""
    try:
        image = open_image(record.images[0])
    except (OSError, ValueError, IndexError):
        return None
    factor = SIDE / max(image.size)
    size = (max(round(image.width * factor), 1), max(round(image.height * factor), 1))
    buffer = io.BytesIO()
    image.resize(size, Image.Resampling.LANCZOS).save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()
