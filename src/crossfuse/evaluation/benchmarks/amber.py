"""AMBER: existence, attribute and relation hallucination by yes/no questions. Descriptions: `amber_generative`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from crossfuse.evaluation.answers import yes_no
from crossfuse.evaluation.benchmarks.base import Benchmark, BenchmarkSample, Metric, Samples
from crossfuse.evaluation.benchmarks.files import document, find, image_of, question, rows
from crossfuse.evaluation.benchmarks.tally import confusion, grouped, keyed, unparsed

# Positive is "no": the questions answered with no are those about what is not in the image.
FIRST_WORD = "first whole word yes or no, neither is wrong; precision and recall of the answer no"
OFFICIAL = "AMBER's script: the answer is exactly Yes or No; counts start at 0.001, values rounded to one decimal"
DIMENSIONS = ("existence", "attribute", "relation")


def load_amber(root: Path, split: str) -> list[BenchmarkSample]:
    """``query_all.json`` (or the query file of the split) with ``annotations.json``; images in ``image/``."""
    truths = {int(entry["id"]): entry for entry in document(find(root, "annotations.json"))}
    suffix = "discriminative" if split == "discriminative" else f"discriminative-{split}"
    try:
        queries = rows(find(root, f"query_{suffix}.json", "query_all.json"))
    except ValueError:
        queries = rows(find(root, "query_*.json"))
    samples: list[BenchmarkSample] = []
    for query in queries:
        truth = truths.get(int(query["id"]))
        if truth is None:
            raise ValueError(f"AMBER query {query['id']} is not in annotations.json; are both files of one release?")
        kind = dimension(str(truth["type"]))
        if kind == "generative" or split not in ("discriminative", kind):
            continue
        text = str(query["query"]) + "\nAnswer the question with Yes or No."
        record = question(str(query["id"]), text, [image_of(root, query["image"], "image", "images", "")], kind=kind)
        reference = {"kind": kind, "type": truth["type"], "truth": truth["truth"], "hallu": truth.get("hallu")}
        samples.append(BenchmarkSample(record, reference))
    return samples


def dimension(kind: str) -> str:
    """AMBER's dimension of an annotation type; its script takes every other discriminative type as a relation."""
    if kind == "generative":
        return "generative"
    if kind == "discriminative-hallucination":
        return "existence"
    return "attribute" if kind.startswith("discriminative-attribute") else "relation"


def score_amber(answers: Mapping[str, str], samples: Samples) -> dict[str, Metric]:
    """Accuracy, precision, recall and F1 of the yes/no questions, all and by dimension, under both rules."""
    results: dict[str, Metric] = {}
    for group, members in ({"": list(samples)} | grouped(samples, lambda sample: sample.reference["kind"])).items():
        given = [answers[sample.record.id] for sample in members]
        truth = [str(sample.reference["truth"]).lower() for sample in members]
        results |= keyed(confusion([yes_no(answer) for answer in given], truth, FIRST_WORD, "no"), group)
        results |= keyed(_official(given, truth, smooth=0.001 if group == "existence" else 0.0001), group, "official")
    results["unparsed"] = unparsed([yes_no(answers[sample.record.id]) for sample in samples])
    return results


def _official(given: Sequence[str], truth: Sequence[str], smooth: float) -> dict[str, Metric]:
    """The script's numbers with all their rounding, so that they can be put beside published ones."""
    said = [{"Yes": "yes", "No": "no"}.get(answer) for answer in given]
    right_no = sum(s == t == "no" for s, t in zip(said, truth, strict=True))
    accuracy = _rounded(sum(s == t for s, t in zip(said, truth, strict=True)), len(truth))
    precision = _rounded(right_no, said.count("no"))
    recall = _rounded(right_no, list(truth).count("no"))
    p, r = precision / 100, recall / 100
    values = {
        "accuracy": accuracy,
        "precision": precision,
        "recall": recall,
        "f1": round(2 * p * r / (p + r + smooth) * 100, 1),
    }
    return {name: Metric(value, len(truth), OFFICIAL, "0-100") for name, value in values.items()}


def _rounded(count: int, of: int) -> float:
    return round(count / (of + 0.001) * 100, 1)


AMBER = Benchmark(
    name="amber",
    rule="accuracy, precision, recall and F1 (of the answer no) of the discriminative part, all and by dimension",
    source="Wang et al. 2023 (arXiv 2311.07397), inference.py of its repository",
    samples="14,216 questions",
    metric="accuracy",
    loader=load_amber,
    scorer=score_amber,
    splits=("discriminative", "existence", "attribute", "relation"),
    disagreements="the script takes only the bare words Yes and No, and rounds before it computes F1; lmms-eval's "
    "amber_g is the generative part; papers quote accuracy, F1 or (100 - CHAIR + F1) / 2",
)
