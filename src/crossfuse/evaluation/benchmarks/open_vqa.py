"""Open questions with ten people's answers, and GQA: VQAv2, VizWiz, TextVQA, GQA."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from crossfuse.evaluation.benchmarks.base import Benchmark, BenchmarkSample, Metric, Samples
from crossfuse.evaluation.benchmarks.files import document, find, image_of, question, records_of, rows
from crossfuse.evaluation.benchmarks.tally import by_group, percent
from crossfuse.evaluation.benchmarks.yes_no import WORD_OR_PHRASE
from crossfuse.evaluation.foreign_rules import bare
from crossfuse.evaluation.vqa_accuracy import evalai, normalised_accuracy, official_accuracy, short_accuracy

NORMALISED = "VQA accuracy, leave one out; answers and references always processed (VQA v2 processing)"
OFFICIAL = "VQA v2 script, leave one out; both sides processed only where the references differ"
SHORT = "min(matches / 3, 1) over all references; both sides processed"
EVAL_AI = "VQA accuracy, leave one out; answers and references processed as EvalAI does"
UNANSWERABLE = "When the provided information is insufficient, respond with 'Unanswerable'."


def load_vqav2(root: Path, split: str) -> list[BenchmarkSample]:
    """``v2_OpenEnded_mscoco_SPLIT2014_questions.json`` with ``v2_mscoco_SPLIT2014_annotations.json``."""
    questions = records_of(find(root, f"*OpenEnded_mscoco_{split}*_questions.json", "*questions.json"), "questions")
    path = find(root, f"*mscoco_{split}*_annotations.json", "*annotations.json")
    truths = {entry["question_id"]: entry for entry in records_of(path, "annotations")}
    samples: list[BenchmarkSample] = []
    for row in questions:
        truth = truths.get(row["question_id"])
        if truth is None:
            raise ValueError(f"VQAv2 question {row['question_id']} is not in {path.name}; are both files of one split?")
        name = f"COCO_{split}2014_{int(row['image_id']):012d}.jpg"
        record = question(
            str(row["question_id"]),
            row["question"] + WORD_OR_PHRASE,
            [image_of(root, name, f"{split}2014", "images", "")],
            kind=truth["answer_type"],
        )
        reference = {"answers": [entry["answer"] for entry in truth["answers"]], "answer_type": truth["answer_type"]}
        samples.append(BenchmarkSample(record, reference))
    return samples


def score_vqav2(answers: Mapping[str, str], samples: Samples) -> dict[str, Metric]:
    """The normalised rule, by answer type too, beside the official script's and the short one."""
    rules: dict[str, tuple[Callable[[str, list[str]], float], str]] = {
        "": (normalised_accuracy, NORMALISED),
        "@official": (official_accuracy, OFFICIAL),
        "@short": (short_accuracy, SHORT),
    }
    return _vqa(answers, samples, rules)


def _vqa(
    answers: Mapping[str, str], samples: Samples, rules: Mapping[str, tuple[Callable[[str, list[str]], float], str]]
) -> dict[str, Metric]:
    results: dict[str, Metric] = {}
    for suffix, (rule, words) in rules.items():
        scores = [rule(answers[sample.record.id], sample.reference["answers"]) for sample in samples]
        results[f"accuracy{suffix}"] = percent(scores, words)
        if not suffix:
            groups = by_group(scores, samples, "answer_type", words)
            results |= {f"accuracy/{name}": metric for name, metric in groups.items()}
    return results


def load_vizwiz(root: Path, split: str) -> list[BenchmarkSample]:
    """``Annotations/SPLIT.json``: a list of image, question, answers, answer_type, answerable."""
    samples: list[BenchmarkSample] = []
    for row in rows(find(root, f"{split}.json", f"*{split}*.json", f"*{split}*.parquet")):
        if "answers" not in row:
            raise ValueError("VizWiz's test answers are not public; use the val split")
        given = [entry["answer"] if isinstance(entry, dict) else entry for entry in row["answers"]]
        text = f"{str(row['question']).capitalize()}\n{UNANSWERABLE}{WORD_OR_PHRASE}"
        image = image_of(root, row["image"], split, "images", "")
        id = str(row.get("question_id") or Path(str(row["image"])).stem)
        reference = {"answers": given, "answer_type": row.get("answer_type", row.get("category"))}
        samples.append(BenchmarkSample(question(id, text, [image], kind=str(reference["answer_type"])), reference))
    return samples


def score_vizwiz(answers: Mapping[str, str], samples: Samples) -> dict[str, Metric]:
    """EvalAI's rule (lmms-eval's), by answer type too, beside the VQA v2 script that the challenge uses."""
    return _vqa(answers, samples, {"": (_eval_ai, EVAL_AI), "@official": (official_accuracy, OFFICIAL)})


def _eval_ai(answer: str, references: list[str]) -> float:
    return normalised_accuracy(answer, references, evalai)


def load_textvqa(root: Path, split: str) -> list[BenchmarkSample]:
    """``TextVQA_0.5.1_SPLIT.json``: data of question_id, image_id, question, answers; images in ``train_images/``."""
    samples: list[BenchmarkSample] = []
    for row in records_of(find(root, f"TextVQA_*_{split}.json", f"*{split}*.json"), "data"):
        if "answers" not in row:
            raise ValueError("TextVQA's test answers are not public; use the val split")
        image = image_of(root, f"{row['image_id']}.jpg", "train_images", "train_val_images/train_images", "images", "")
        text = str(row["question"]).capitalize() + WORD_OR_PHRASE
        samples.append(
            BenchmarkSample(
                question(str(row["question_id"]), text, [image], kind="text"), {"answers": list(row["answers"])}
            )
        )
    return samples


def score_textvqa(answers: Mapping[str, str], samples: Samples) -> dict[str, Metric]:
    """EvalAI's rule."""
    return _vqa(answers, samples, {"": (_eval_ai, EVAL_AI)})


def load_gqa(root: Path, split: str) -> list[BenchmarkSample]:
    """``testdev_balanced_questions.json`` (or val): an object of questions by id; images in ``images/``."""
    table = document(find(root, f"{split}_balanced_questions.json", f"{split}*questions.json"))
    samples: list[BenchmarkSample] = []
    for id, row in table.items():
        image = image_of(root, f"{row['imageId']}.jpg", "images", "")
        types = row.get("types") or {}
        reference = {"answer": row["answer"], "structural": types.get("structural"), "semantic": types.get("semantic")}
        samples.append(
            BenchmarkSample(
                question(str(id), row["question"] + WORD_OR_PHRASE, [image], kind=str(types.get("semantic"))), reference
            )
        )
    return samples


def score_gqa(answers: Mapping[str, str], samples: Samples) -> dict[str, Metric]:
    """Exact match without case and punctuation, by question type too, beside the official equality."""
    given = [answers[sample.record.id] for sample in samples]
    truth = [str(sample.reference["answer"]) for sample in samples]
    scores = [float(bare(a) == bare(t)) for a, t in zip(given, truth, strict=True)]
    words = "exact match in lower case without punctuation"
    results = {
        "accuracy": percent(scores, words),
        "accuracy@official": percent(
            [a == t for a, t in zip(given, truth, strict=True)], "official script: equal strings"
        ),
    }
    for key in ("structural", "semantic"):
        results |= {f"accuracy/{name}": metric for name, metric in by_group(scores, samples, key, words).items()}
    return results


VQA_V2 = Benchmark(
    name="vqav2",
    rule="VQA accuracy against ten people's answers",
    source="Goyal et al. 2017 (arXiv 1612.00837), vqaEval.py of its repository",
    samples="214,354 (val)",
    metric="accuracy",
    loader=load_vqav2,
    scorer=score_vqav2,
    splits=("val", "train"),
    lmms_task="vqav2_val",
    disagreements='the official script processes answers only where the references differ ("Black." against ten times '
    '"black" scores 0), maps "none" to 0 and scores 0 against a single reference; an earlier version processes the '
    "answer always, and of the references their punctuation alone; papers print the short form",
)
VIZ_WIZ = Benchmark(
    name="vizwiz",
    rule="VQA accuracy against ten people's answers, unanswerable questions included",
    source="Gurari et al. 2018 (arXiv 1802.08218), the challenge's vqa evaluation code",
    samples="4,319 (val)",
    metric="accuracy",
    loader=load_vizwiz,
    scorer=score_vizwiz,
    splits=("val", "train"),
    lmms_task="vizwiz_vqa_val",
    disagreements="the challenge runs the VQA v2 script, lmms-eval EvalAI's processing; papers quote test-dev or val",
)
TEXT_VQA = Benchmark(
    name="textvqa",
    rule="VQA accuracy against ten people's answers",
    source="Singh et al. 2019 (arXiv 1904.08920), EvalAI's processing in Pythia (MMF)",
    samples="5,000 (val)",
    metric="accuracy",
    loader=load_textvqa,
    scorer=score_textvqa,
    splits=("val", "train"),
    lmms_task="textvqa_val",
    disagreements="LLaVA's own script puts OCR words into the prompt, which raises the score; we and lmms-eval do not",
)
GQA = Benchmark(
    name="gqa",
    rule="exact match of the one-word answer",
    source="Hudson and Manning 2019 (arXiv 1902.09506), eval.py of its release; lmms-eval",
    samples="12,578 (testdev balanced; count not confirmed)",
    metric="accuracy",
    loader=load_gqa,
    scorer=score_gqa,
    splits=("testdev", "val"),
    lmms_task="gqa",
    disagreements='the official script wants equal strings ("Yes" is not "yes")',
)
