"""Reading text in pictures: DocVQA, InfoVQA (ANLS), ChartQA (relaxed accuracy), OCRBench."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from crossfuse.evaluation.answers import number
from crossfuse.evaluation.benchmarks.base import Benchmark, BenchmarkSample, Metric, Samples
from crossfuse.evaluation.benchmarks.files import field, find, find_all, image_of, question, records_of, rows
from crossfuse.evaluation.benchmarks.tally import by_group, grouped, percent
from crossfuse.evaluation.benchmarks.yes_no import WORD_OR_PHRASE

RECOGNITION = tuple(
    f"{kind} Recognition"
    for kind in ("Regular Text", "Irregular Text", "Artistic Text", "Handwriting", "Digit String", "Non-Semantic Text")
)
_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {0x3000: 0x20}


def edit_distance(a: str, b: str) -> int:
    """Levenshtein distance: insertions, deletions and replacements that turn one string into the other."""
    if len(a) < len(b):
        a, b = b, a
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, right in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (left != right))
    return row[-1]


def anls(answer: str, references: Sequence[str], threshold: float = 0.5) -> float:
    """Average normalised Levenshtein similarity of one answer (Biten et al. 2019), against the nearest reference.

    1 - distance / length in lower case with single blanks; 0 below the threshold. As in the official script the
    length is that of the longer string *before* blanks are removed.
    """
    distances = []
    for reference in references:
        length = max(len(reference.upper()), len(answer.upper()))
        distances.append(edit_distance(_squeezed(reference), _squeezed(answer)) / length if length else 0.0)
    similarity = 1 - min(distances, default=1.0)
    return similarity if similarity >= threshold else 0.0


def _squeezed(text: str) -> str:
    return " ".join(text.strip().lower().split())


def relaxed_match(answer: str, reference: str, tolerance: float = 0.05) -> bool:
    """Relaxed accuracy (Methani et al. 2020; Masry et al. 2022): numbers within 5 %, all else equal in lower case.

    The whole answer must be the number; "40%" is 0.4. Against a reference of 0 the strings are compared.
    """
    said, truth = _number(answer), _number(reference)
    if said is not None and truth:
        return abs(said - truth) / abs(truth) <= tolerance
    return answer.lower() == reference.lower()


def _number(text: str) -> float | None:
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None


def load_docvqa(root: Path, split: str) -> list[BenchmarkSample]:
    """``SPLIT_v1.0*.json``: data of questionId, question, image, answers; images in ``documents/``."""
    return _load_anls(root, [f"{split}_v1.0*.json", f"*docvqa*{split}*.json"], ["", "spdocvqa_images", "images"])


def load_infovqa(root: Path, split: str) -> list[BenchmarkSample]:
    """``infographicsVQA_SPLIT_v1.0*.json``: data of questionId, question, image_local_name, answers."""
    names = [f"infographicsVQA_{split}_v1.0*.json", f"*info*{split}*.json"]
    return _load_anls(root, names, ["infographicsvqa_images", "images", ""])


def _load_anls(root: Path, names: list[str], folders: list[str]) -> list[BenchmarkSample]:
    samples: list[BenchmarkSample] = []
    for row in records_of(find(root, *names), "data"):
        if not row.get("answers"):
            raise ValueError(f"question {row['questionId']} has no answers: the test split's are not public; use val")
        image = image_of(root, field(row, "image_local_name", "image"), *folders)
        kinds = row.get("question_types") or row.get("answer_type") or ["all"]
        kind = kinds if isinstance(kinds, str) else str(kinds[0])
        record = question(str(row["questionId"]), row["question"] + WORD_OR_PHRASE, [image], kind=kind)
        samples.append(BenchmarkSample(record, {"answers": [str(a) for a in row["answers"]], "kind": kind}))
    return samples


def score_anls(answers: Mapping[str, str], samples: Samples) -> dict[str, Metric]:
    """Mean ANLS with the threshold 0.5, by the questions' first type too; and the share of exact answers."""
    scores = [anls(answers[s.record.id], s.reference["answers"]) for s in samples]
    words = "ANLS, threshold 0.5, nearest reference, lower case"
    return {
        "anls": percent(scores, words),
        "exact": percent([score == 1.0 for score in scores], "answers equal to a reference in lower case"),
        **{f"anls/{name}": metric for name, metric in by_group(scores, samples, "kind", words).items()},
    }


def load_chartqa(root: Path, split: str) -> list[BenchmarkSample]:
    """``test_human.json`` and ``test_augmented.json``: lists of imgname, query, label; images in ``SPLIT/png/``."""
    parts = [(part, path) for part in ("human", "augmented") for path in find_all(root, f"{split}_{part}.json")[:1]]
    samples: list[BenchmarkSample] = []
    for part, path in parts or [("", find(root, f"{split}_human.json", f"{split}_augmented.json"))]:
        for number_, row in enumerate(rows(path)):
            image = image_of(root, row["imgname"], f"{split}/png", "png", "images", "")
            text = str(row["query"]) + "\nAnswer the question with a single word."
            record = question(f"{part}/{number_}", text, [image], kind=part)
            samples.append(BenchmarkSample(record, {"answer": str(row["label"]), "part": part}))
    return samples


def score_chartqa(answers: Mapping[str, str], samples: Samples) -> dict[str, Metric]:
    """Relaxed accuracy over all questions and by part; under the name @number the number is read from a sentence."""
    scores, read = [], []
    for sample in samples:
        given, truth = answers[sample.record.id], sample.reference["answer"]
        scores.append(float(relaxed_match(given, truth)))
        named, wanted = number(given), _number(truth)
        read.append(
            scores[-1] == 1.0 or (named is not None and wanted is not None and relaxed_match(f"{named}", f"{wanted}"))
        )
    words = "relaxed accuracy: the whole answer is a number within 5 %, or equal in lower case"
    return {
        "relaxed": percent(scores, words),
        **{f"relaxed/{name}": metric for name, metric in by_group(scores, samples, "part", words).items()},
        "relaxed@number": percent(read, "as relaxed, or the one number that the answer names is within 5 %"),
    }


def load_ocrbench(root: Path, split: str) -> list[BenchmarkSample]:
    """``OCRBench.json``: a list of dataset_name, type, image_path, question, answers; or the Parquet table."""
    samples: list[BenchmarkSample] = []
    for path in find_all(root, "OCRBench.json", "*.parquet") or [find(root, "OCRBench.json", "*.parquet")]:
        for row in rows(path):
            given = field(row, "answers", "answer")
            image = image_of(root, field(row, "image", "image_path"), "OCRBench_Images", "images", "")
            kind = str(field(row, "type", "question_type"))
            record = question(str(row.get("id", len(samples))), str(row["question"]).strip(), [image], kind=kind)
            found = [given] if isinstance(given, str) else [str(a) for a in given]
            samples.append(
                BenchmarkSample(
                    record, {"answers": found, "type": kind, "dataset": field(row, "dataset_name", "dataset")}
                )
            )
    return samples


def score_ocrbench(answers: Mapping[str, str], samples: Samples) -> dict[str, Metric]:
    """Number of questions whose answer holds a reference; of 1,000 in the full set."""
    right = [_holds(answers[s.record.id], s.reference["answers"], s.reference["dataset"]) for s in samples]
    words = "a reference occurs in the answer (lower case; HME100k without blanks, with case)"
    results = {
        "score": Metric(float(sum(right)), len(right), words, f"0-{len(right)}"),
        "accuracy": percent(right, words),
    }
    groups = grouped(zip(right, samples, strict=True), lambda pair: pair[1].reference["type"])
    for name, members in groups.items():
        results[f"score/{name}"] = Metric(float(sum(ok for ok, _ in members)), len(members), words, f"0-{len(members)}")
    recognised = [ok for ok, s in zip(right, samples, strict=True) if s.reference["type"] in RECOGNITION]
    results["score/Text Recognition"] = Metric(float(sum(recognised)), len(recognised), words, f"0-{len(recognised)}")
    return results


def _holds(answer: str, references: Sequence[str], dataset: str) -> bool:
    if dataset == "HME100k":
        said = answer.strip().replace("\n", " ").replace(" ", "")
        return any(reference.strip().replace("\n", " ").replace(" ", "") in said for reference in references)
    said = _folded(answer)
    return any(_folded(reference) in said for reference in references)


def _folded(text: str) -> str:
    return text.translate(_FULL_WIDTH).lower().strip().replace("\n", " ")


def _anls_benchmark(name: str, source: str, samples: str, info: bool) -> Benchmark:
    return Benchmark(
        name=name,
        rule="average normalised Levenshtein similarity, threshold 0.5",
        source=source,
        samples=samples,
        metric="anls",
        loader=load_infovqa if info else load_docvqa,
        scorer=score_anls,
        splits=("val", "train"),
        max_new_tokens=32,
        lmms_task=f"{name}_val",
        disagreements="the official script divides by the length before blanks are removed, as here and in lmms-eval; "
        "published test scores come from a server",
    )


DOC_VQA = _anls_benchmark("docvqa", "Mathew et al. 2021 (arXiv 2007.00398), RRC evaluation", "5,349 (val)", False)
INFO_VQA = _anls_benchmark("infovqa", "Mathew et al. 2022 (arXiv 2104.12756), RRC evaluation", "2,801 (val)", True)
CHART_QA = Benchmark(
    name="chartqa",
    rule="relaxed accuracy (5 %) over human and augmented questions",
    source="Masry et al. 2022 (arXiv 2203.10244), end of section 5.1",
    samples="2,500 (test: 1,250 human, 1,250 augmented)",
    metric="relaxed",
    loader=load_chartqa,
    scorer=score_chartqa,
    splits=("test", "val"),
    lmms_task="chartqa",
    disagreements="tools differ on sentences around the number: the official rule and lmms-eval count them wrong",
)
OCR_BENCH = Benchmark(
    name="ocrbench",
    rule="number of answers that hold a reference, of 1,000",
    source="Liu et al. 2023 (arXiv 2305.07895), example.py of its repository",
    samples="1,000",
    metric="score",
    loader=load_ocrbench,
    scorer=score_ocrbench,
    max_new_tokens=128,
    lmms_task="ocrbench",
    disagreements="lmms-eval divides by 1,000 and adds a second call's points to the first; it folds full-width "
    "letters, the original does not",
)
