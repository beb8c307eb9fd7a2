"""Multiple choice over images: MMBench, ScienceQA, AI2D, RealWorldQA."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from crossfuse.evaluation.answers import LETTERS, letter, number, plain_words
from crossfuse.evaluation.benchmarks.base import Benchmark, BenchmarkSample, Metric, Samples
from crossfuse.evaluation.benchmarks.files import document, field, find, find_all, image_of, lettered, question, rows
from crossfuse.evaluation.benchmarks.tally import by_group, grouped, percent, unparsed
from crossfuse.evaluation.foreign_rules import ai2d_letter, mmbench_letter, ranked_letter, scienceqa_letter

LETTER_PROMPT = "\nAnswer with the option's letter from the given choices directly."
RULE = "our letter extraction (crossfuse.evaluation.answers.letter); unread answers count as wrong"
ROTATION = 1_000_000  # a question's rotated copies have its index plus a multiple of this


def read_letters(answers: Mapping[str, str], samples: Samples) -> list[str | None]:
    """The letter that each answer names, by the one rule."""
    return [letter(answers[sample.record.id], sample.reference["options"]) for sample in samples]


def load_mmbench(root: Path, split: str) -> list[BenchmarkSample]:
    """``mmbench_dev*.tsv`` (or the Parquet table); rotated copies are made where the file has none."""
    table = rows(find(root, "*mmbench*dev*.tsv", "*MMBench*DEV*.tsv", "*.tsv", "*dev*.parquet", "*.parquet"))
    rotated_in_file = any(int(row["index"]) >= ROTATION for row in table)
    by_index = {int(row["index"]): row for row in table}
    samples: list[BenchmarkSample] = []
    for row in table:
        index = int(row["index"])
        options = _options(row)
        truth = str(row.get("answer") or "").strip()
        if truth not in LETTERS[: len(options)]:
            raise ValueError(
                f"MMBench question {index} has no answer: the test split's answers are not public; use the dev file"
            )
        if split == "dev-vanilla" and index >= ROTATION:
            continue
        copies = range(len(options)) if split == "dev" and not rotated_in_file else range(1)
        for shift in copies:
            turned = [options[(place + shift) % len(options)] for place in range(len(options))]
            right = LETTERS[(LETTERS.index(truth) - shift) % len(options)]
            reference = {
                "group": index % ROTATION,
                "copy": index // ROTATION + shift,
                "options": turned,
                "answer": right,
                "category": row.get("l2-category") or row.get("L2-category") or row.get("category"),
            }
            image = row.get("image") or ""
            # A copy's image field is the index of the question whose image it shows.
            image = by_index[int(image)]["image"] if str(image).isdigit() else image
            record = question(
                str(index + shift * ROTATION),
                _mmbench_prompt(row, turned),
                [image_of(root, image)],
                kind=str(row.get("category")),
            )
            samples.append(BenchmarkSample(record, reference))
    return samples


def _options(row: Mapping[str, Any]) -> list[str]:
    return [str(row[name]) for name in "ABCDE" if row.get(name) not in (None, "", "nan") and row[name] == row[name]]


def _mmbench_prompt(row: Mapping[str, Any], options: Sequence[str]) -> str:
    hint = row.get("hint")
    context = f"{hint}\n" if hint not in (None, "", "nan") and hint == hint else ""
    return f"{context}{row['question']}\n{lettered(options)}{LETTER_PROMPT}"


def score_mmbench(answers: Mapping[str, str], samples: Samples) -> dict[str, Metric]:
    """Vanilla: every question once. Circular: a question is right only if all its rotated copies are."""
    said = read_letters(answers, samples)
    foreign = [mmbench_letter(answers[s.record.id], s.reference["options"]) for s in samples]
    results: dict[str, Metric] = {}
    for rule, read, words in (("", said, RULE), ("@lmms-eval", foreign, "lmms-eval: MMBench's rule without a judge")):
        right = {id(s): reading == s.reference["answer"] for reading, s in zip(read, samples, strict=True)}
        groups = grouped(samples, lambda s: s.reference["group"])
        whole = [group for group in groups.values() if len(group) >= len(group[0].reference["options"])]
        first = [right[id(s)] for s in samples if s.reference["copy"] == 0]
        cut = len(groups) - len(whole)
        reason = f"{cut} question(s) without all rotated copies left out" if cut else None
        results[f"circular{rule}"] = percent(
            [all(right[id(s)] for s in group) for group in whole], f"all rotated copies right; {words}", reason
        )
        results[f"vanilla{rule}"] = percent(first, f"questions as published; {words}")
        if not rule:
            results["copies"] = percent(list(right.values()), f"every rotated copy on its own; {words}")
            heads = [group[0] for group in whole]
            scores = [float(all(right[id(s)] for s in group)) for group in whole]
            results |= {
                f"circular/{name}": m for name, m in by_group(scores, heads, "category", f"circular; {words}").items()
            }
    return results | {"unparsed": unparsed(said)}


def load_scienceqa(root: Path, split: str) -> list[BenchmarkSample]:
    """``problems.json`` and ``pid_splits.json``; images in ``SPLIT/ID/image.png`` under ``images/`` or the root."""
    problems = document(find(root, "problems.json"))
    ids = document(find(root, "pid_splits.json"))[split.removesuffix("-image")]
    samples: list[BenchmarkSample] = []
    for id in ids:
        row = problems[str(id)]
        part = row.get("split", split)
        if split.endswith("-image") and not row.get("image"):
            continue
        images = [image_of(root, f"{id}/{row['image']}", f"images/{part}", part, "")] if row.get("image") else []
        context = f"Context: {row['hint']}\n" if row.get("hint") else ""
        text = f"{context}{row['question']}\n{lettered(row['choices'])}{LETTER_PROMPT}"
        reference = {
            "options": row["choices"],
            "answer": LETTERS[int(row["answer"])],
            "subject": row.get("subject"),
            "image": bool(images),
        }
        samples.append(BenchmarkSample(question(str(id), text, images, kind=str(row.get("subject"))), reference))
    return samples


def score_scienceqa(answers: Mapping[str, str], samples: Samples) -> dict[str, Metric]:
    """Questions with an image, without one, and all of them: papers quote either."""
    said = read_letters(answers, samples)
    foreign = [scienceqa_letter(answers[sample.record.id]) for sample in samples]
    results = {}
    for rule, read, words in (
        ("", said, RULE),
        ("@lmms-eval", foreign, "LLaVA and lmms-eval: the bare letter, or it leads with a full stop"),
    ):
        right = [reading == s.reference["answer"] for reading, s in zip(read, samples, strict=True)]
        with_image = [r for r, s in zip(right, samples, strict=True) if s.reference["image"]]
        without = [r for r, s in zip(right, samples, strict=True) if not s.reference["image"]]
        results[f"image{rule}"] = percent(with_image, f"questions with an image; {words}")
        results[f"text{rule}"] = percent(without, f"questions without an image; {words}")
        results[f"all{rule}"] = percent(right, f"all questions; {words}")
        if not rule:
            scores = [float(r) for r in right]
            results |= {f"all/{name}": metric for name, metric in by_group(scores, samples, "subject", words).items()}
    return results | {"unparsed": unparsed(said)}


def load_ai2d(root: Path, split: str) -> list[BenchmarkSample]:
    """The Parquet table (question, options, the answer's index), or the original ``questions/*.json``."""
    samples: list[BenchmarkSample] = []
    parquet = find_all(root, "*test*.parquet", "*.parquet")
    if parquet:
        for path in parquet:
            for row in rows(path):
                samples.append(
                    _ai2d(
                        f"{len(samples)}",
                        row["question"],
                        list(row["options"]),
                        int(row["answer"]),
                        image_of(root, row["image"]),
                    )
                )
        return samples
    wanted = {str(name) for path in find_all(root, "ai2d_test_ids.csv") for name in path.read_text().split()}
    found = [path for path in find_all(root, "*.png.json", "*.json") if not wanted or path.name.split(".")[0] in wanted]
    for path in found or [find(root, "*.parquet", "*.png.json")]:
        content = document(path)
        for text, entry in content["questions"].items():
            image = image_of(root, content["imageName"], "images", "ai2d/images", "")
            samples.append(
                _ai2d(str(entry["questionId"]), text, entry["answerTexts"], int(entry["correctAnswer"]), image)
            )
    return samples


def _ai2d(id: str, text: str, options: list[str], answer: int, image: str | bytes) -> BenchmarkSample:
    record = question(id, f"{text}\n{lettered(options)}{LETTER_PROMPT}", [image], kind="diagram")
    return BenchmarkSample(record, {"options": options, "answer": LETTERS[answer]})


def score_ai2d(answers: Mapping[str, str], samples: Samples) -> dict[str, Metric]:
    """Share of right letters."""
    said = read_letters(answers, samples)
    foreign = [ai2d_letter(answers[sample.record.id]) for sample in samples]
    truth = [sample.reference["answer"] for sample in samples]
    return {
        "accuracy": percent([s == t for s, t in zip(said, truth, strict=True)], RULE),
        "accuracy@lmms-eval": percent(
            [s == t for s, t in zip(foreign, truth, strict=True)],
            "lmms-eval: a leading letter with a full stop, else the whole answer",
        ),
        "unparsed": unparsed(said),
    }


def load_realworldqa(root: Path, split: str) -> list[BenchmarkSample]:
    """``annotations.jsonl`` beside the images, or the Parquet table; options stand in the question."""
    samples: list[BenchmarkSample] = []
    for path in find_all(root, "*test*.parquet", "*.parquet", "annotations.jsonl", "*.jsonl", "*.json") or [
        find(root, "*.parquet", "annotations.jsonl")
    ]:
        for row in rows(path):
            text, truth = str(row["question"]).strip(), str(row["answer"]).strip()
            options = [option.strip() for _, option in re.findall(r"(?m)^\s*([A-H])[.)]\s*(.*)$", text)]
            image = image_of(root, field(row, "image", "image_path"), "images", "")
            record = question(str(len(samples)), text, [image], kind="choice" if options else "open")
            samples.append(BenchmarkSample(record, {"options": options, "answer": truth}))
    return samples


def score_realworldqa(answers: Mapping[str, str], samples: Samples) -> dict[str, Metric]:
    """Letters where the right answer is one; words and numbers compared without case and punctuation otherwise."""
    said, right, foreign = [], [], []
    for sample in samples:
        given, truth, options = answers[sample.record.id], sample.reference["answer"], sample.reference["options"]
        choice = bool(options) and truth.upper() in LETTERS[: len(options)]
        reading: object | None = letter(given, options) if choice else plain_words(given) or None
        said.append(reading)
        count = number(given)
        right.append(
            reading == (truth.upper() if choice else plain_words(truth))
            or (not choice and count is not None and count == number(truth))
        )
        if truth.upper() in ("A", "B", "C", "D"):
            foreign.append(ranked_letter(given, "ABCD") == truth.upper())
        else:
            foreign.append(given.lower().strip().rstrip(".") == truth.lower())
    return {
        "accuracy": percent(right, f"{RULE}; open answers as words, or as the one number that they name"),
        "accuracy@lmms-eval": percent(
            foreign, "lmms-eval: ranked letter marks; open answers in lower case without a final full stop"
        ),
        "unparsed": unparsed(said),
    }


MMBENCH = Benchmark(
    name="mmbench",
    rule="vanilla and CircularEval accuracy with a stated letter extraction, no judge",
    source="Liu et al. 2023 (arXiv 2307.06281), VLMEvalKit",
    samples="1,164 questions (English dev); 4,329 rows with the rotated copies of the 2023 release",
    metric="circular",
    loader=load_mmbench,
    scorer=score_mmbench,
    splits=("dev", "dev-vanilla"),
    lmms_task="mmbench_en_dev_static",
    disagreements="the official tool sends unread answers to a GPT judge and guesses where that fails; lmms-eval's "
    "static rule takes any capital letter in the end",
)
SCIENCE_QA = Benchmark(
    name="scienceqa",
    rule="accuracy of questions with an image (what LLaVA's tables quote) and of all questions, both with counts",
    source="Lu et al. 2022 (arXiv 2209.09513); LLaVA's eval_science_qa.py",
    samples="4,241 test questions, 2,017 with an image",
    metric="image",
    loader=load_scienceqa,
    scorer=score_scienceqa,
    splits=("test", "val", "test-image", "val-image", "minitest"),
    lmms_task="scienceqa",
    disagreements="papers quote the image subset or all; LLaVA and lmms-eval read only a bare or leading letter",
)
AI2D = Benchmark(
    name="ai2d",
    rule="accuracy of the option's letter",
    source="Kembhavi et al. 2016 (arXiv 1603.07396); lmms-eval",
    samples="3,088 test questions",
    metric="accuracy",
    loader=load_ai2d,
    scorer=score_ai2d,
    lmms_task="ai2d",
    disagreements="lmms-eval reads a leading letter with a full stop, else wants the bare letter; some mask the images",
)
REAL_WORLD_QA = Benchmark(
    name="realworldqa",
    rule="accuracy of letters and of short open answers",
    source="xAI 2024 (release of Grok-1.5 Vision); lmms-eval",
    samples="765",
    metric="accuracy",
    loader=load_realworldqa,
    scorer=score_realworldqa,
    lmms_task="realworldqa",
    disagreements='lmms-eval takes "A dog" as option A, and open answers must match to the letter',
)
