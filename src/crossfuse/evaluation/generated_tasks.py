"""Tasks without files of their own: questions and captions of rendered scenes, and the easy-VQA package's test set."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from crossfuse.data.formats.scenes import SCENE_KINDS
from crossfuse.data.questions import SceneQuestions
from crossfuse.data.records import Record
from crossfuse.evaluation.benchmarks.base import Benchmark, BenchmarkSample, Metric, Samples
from crossfuse.evaluation.scoring import is_right, yes_no
from crossfuse.evaluation.text_metrics import TEXT_METRICS, text_metrics

# Groups of the comparison tables; the kinds "colour" and "shape" are attributes.
TASK_GROUPS = {"existence": "existence", "colour": "attribute", "shape": "attribute", "count": "count"}
GENERATED = Path("generated")


@dataclasses.dataclass(frozen=True)
class GeneratedTask(Benchmark):
    """A benchmark whose samples are made on the spot; a directory is ignored, and ids do not depend on the limit.

    quick: the same task with the metrics that can be computed a thousand times (without Java), for the bootstrap.
    """

    default_limit: int | None = None
    quick: Benchmark | None = None

    def load(
        self, directory: str | os.PathLike[str] | None = None, split: str | None = None, limit: int | None = None
    ) -> list[BenchmarkSample]:
        """The first `limit` samples (`default_limit` where it is None)."""
        if split is not None and split not in self.splits:
            raise ValueError(f"{self.name} has no split {split!r}; its splits: {', '.join(self.splits)}")
        if limit is not None and limit < 1:
            raise ValueError(f"limit must be at least 1; got {limit}")
        wanted = self.default_limit if limit is None else limit
        return self.loader(GENERATED / str(wanted or ""), split or self.splits[0])


def _wanted(directory: Path) -> int | None:
    return int(directory.name) if directory.name.isdigit() else None


def _scenes(directory: Path, split: str | None) -> list[BenchmarkSample]:
    return _scene_samples("scenes", split, _wanted(directory) or 0, SCENE_KINDS)


def _captions(directory: Path, split: str | None) -> list[BenchmarkSample]:
    return _scene_samples("captions", split, _wanted(directory) or 0, ("caption",))


def _scene_samples(prefix: str, split: str | None, count: int, kinds: Sequence[str]) -> list[BenchmarkSample]:
    questions = SceneQuestions("validation" if split == "validation" else "test", count, kinds=kinds)
    samples = []
    for index in range(count):
        image, question, _ = questions[index]
        group = TASK_GROUPS.get(question.kind, question.kind)
        reference = {"answer": question.answer, "kind": question.kind, "group": group, "choice": question.choice}
        record = Record.of_question(
            f"{prefix}-{questions.split}-{index}", question.text, question.answer, [image], kind=question.kind
        )
        samples.append(BenchmarkSample(record, reference))
    return samples


def _easy_vqa(directory: Path, split: str | None) -> list[BenchmarkSample]:
    from crossfuse.data.easy_vqa import EasyVQA

    data = EasyVQA("test")
    # Shuffled once with a fixed seed: any limit then holds a fair mix of pictures and kinds.
    order = random.Random("easy-vqa").sample(range(len(data)), len(data))
    samples = []
    for index in order[: _wanted(directory)]:
        item = data[index]
        reference = {
            "answer": item.answer,
            "kind": item.kind.replace("/", " or "),
            "group": _easy_group(item.kind),
            "choice": None,
        }
        # The path is the picture's identity: questions about one picture are resampled together.
        record = Record.of_question(
            f"easy-vqa-test-{index}", item.question, item.answer, [data.paths[item.image_id]], kind=item.kind
        )
        samples.append(BenchmarkSample(record, reference))
    return samples


def _easy_group(kind: str) -> str:
    return "yes or no" if kind == "yes/no" else "attribute"


def _question_metrics(answers: Mapping[str, str], samples: Samples) -> dict[str, Metric]:
    judged = [is_right(answers[s.record.id], str(s.reference["answer"])) for s in samples]
    metrics = {"accuracy": _share(judged, "all questions")}
    for field in ("group", "kind"):
        for name in dict.fromkeys(str(s.reference[field]) for s in samples):
            chosen = [j for j, s in zip(judged, samples, strict=True) if s.reference[field] == name]
            metrics.setdefault(f"accuracy/{name}", _share(chosen, f"questions of the {field} {name}"))
    metrics |= _existence_metrics(answers, samples)
    unread = sum(j is None for j in judged)
    metrics["unparsed"] = Metric(
        float(unread), len(judged), "answers without the yes or no that was asked for", "count"
    )
    return metrics


def _existence_metrics(answers: Mapping[str, str], samples: Samples) -> dict[str, Metric]:
    """POPE's numbers (Li et al. 2023) on existence questions: an unread answer is wrong and not a yes."""
    asked = [s for s in samples if s.reference["choice"] is not None]
    if not asked:
        return {}
    present = [s for s in asked if s.reference["choice"] == "present"]
    metrics = {}
    for choice in ("random", "popular", "adversarial"):
        absent = [s for s in asked if s.reference["choice"] == choice]
        if absent:
            judged = [is_right(answers[s.record.id], str(s.reference["answer"])) for s in absent]
            metrics[f"absent/{choice}"] = _share(judged, f"objects that are absent, chosen as POPE's {choice}")
    said = [yes_no(answers[s.record.id]) == "yes" for s in asked]
    truth = [s.reference["answer"] == "yes" for s in asked]
    hits = sum(a and b for a, b in zip(said, truth, strict=True))
    total = sum(said) + sum(truth)
    metrics["f1"] = Metric(2 * hits / total if total else None, len(asked), "F1 of yes on existence questions", "0-1",
                           reason=None if total else "no yes among answers and references")  # fmt: skip
    metrics["yes_ratio"] = Metric(
        sum(said) / len(said), len(said), f"answers yes; the truth is {sum(truth) / len(truth):.3f}", "0-1"
    )
    if present:
        judged = [is_right(answers[s.record.id], str(s.reference["answer"])) for s in present]
        metrics["present"] = _share(judged, "objects that are there")
    return metrics


def _share(judged: Sequence[bool | None], variant: str) -> Metric:
    value = sum(1 for j in judged if j) / len(judged)
    return Metric(value, len(judged), f"share of right answers, {variant}", "0-1")


def _quick_caption_metrics(answers: Mapping[str, str], samples: Samples) -> dict[str, Metric]:
    return _caption_metrics(answers, samples, ("rouge_l",))


def _caption_metrics(
    answers: Mapping[str, str],
    samples: Samples,
    names: Sequence[str] = TEXT_METRICS,
    *,
    bertscore_model: str | None = None,
    bertscore_layers: int | None = None,
) -> dict[str, Metric]:
    ids = [s.record.id for s in samples]
    exact = [answers[s.record.id].strip().lower() == str(s.reference["answer"]) for s in samples]
    metrics = {"exact": _share(exact, "captions that are the reference word for word")}
    references = [[str(s.reference["answer"])] for s in samples]
    said = [answers[i] for i in ids]
    return metrics | text_metrics(
        said, references, metrics=names, bertscore_model=bertscore_model, bertscore_layers=bertscore_layers
    )


_RULE = "equal to the one right answer after lower-casing and stripping; yes/no by the first yes or no as a whole word"

GENERATED_TASKS: dict[str, Benchmark] = {
    "scenes": GeneratedTask(
        name="scenes",
        rule=_RULE,
        source="rendered scenes of this package; absent objects chosen as in POPE (Li et al. 2023)",
        samples="any number; 1,000 by default",
        metric="accuracy",
        loader=_scenes,
        scorer=_question_metrics,
        splits=("test", "validation"),
        max_new_tokens=4,
        default_limit=1000,
    ),
    "scene-captions": GeneratedTask(
        name="scene-captions",
        rule="captions of scenes, the shapes from left to right: ROUGE-L and the other text metrics, exact match",
        source="rendered scenes of this package",
        samples="any number; 200 by default",
        metric="rouge_l",
        loader=_captions,
        scorer=_caption_metrics,
        splits=("test", "validation"),
        max_new_tokens=64,
        captions=True,
        default_limit=200,
        quick=Benchmark("scene-captions", _RULE, "", "", "rouge_l", _captions, _quick_caption_metrics),
    ),
    "easy-vqa": GeneratedTask(
        name="easy-vqa",
        rule=_RULE,
        source="https://github.com/vzhou842/easy-VQA",
        samples="9,673 test questions on 1,000 pictures",
        metric="accuracy",
        loader=_easy_vqa,
        scorer=_question_metrics,
        max_new_tokens=4,
    ),
}
