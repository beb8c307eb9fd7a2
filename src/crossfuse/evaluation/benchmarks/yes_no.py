"""Yes/no benchmarks of hallucination and perception: POPE, AMBER, HallusionBench, MME."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from crossfuse.evaluation.answers import yes_no
from crossfuse.evaluation.benchmarks.base import Benchmark, BenchmarkSample, Metric, Samples
from crossfuse.evaluation.benchmarks.files import field, find, find_all, image_of, question, rows
from crossfuse.evaluation.benchmarks.tally import confusion, grouped, keyed, mean_of, percent, unparsed
from crossfuse.evaluation.foreign_rules import mme_yes_no, pope_yes_no

WORD_OR_PHRASE = "\nAnswer the question using a single word or phrase."
FIRST_WORD = "first whole word yes or no; answers with neither count as wrong"
POPE_SETS = ("random", "popular", "adversarial")
_PERCEPTION = "existence count position color posters celebrity scene landmark artwork OCR"
PERCEPTION = tuple(_PERCEPTION.split())
COGNITION = ("commonsense_reasoning", "numerical_calculation", "text_translation", "code_reasoning")


def load_pope(root: Path, split: str) -> list[BenchmarkSample]:
    """``coco_pope_{random,popular,adversarial}.json`` (JSON lines) or the Parquet table with a ``category`` column."""
    sets = POPE_SETS if split == "all" else (split,)
    files = {name: find_all(root, f"*pope_{name}.json", f"*pope_{name}.jsonl") for name in sets}
    if any(files.values()):
        table = [(name, row) for name in sets for path in files[name][:1] for row in rows(path)]
    else:
        parquet = [row for path in find_all(root, "*.parquet") for row in rows(path)]
        table = [(str(row["category"]), row) for row in parquet if row.get("category") in sets]
        if not table:
            find(root, *(f"*pope_{name}.json" for name in sets), "*.parquet")
    samples: list[BenchmarkSample] = []
    for name, row in table:
        image = image_of(root, field(row, "image"), "val2014", "images", "")
        id = f"{name}/{field(row, 'question_id')}"
        text = str(field(row, "text", "question")).strip() + WORD_OR_PHRASE
        truth = str(field(row, "label", "answer")).strip().lower()
        samples.append(BenchmarkSample(question(id, text, [image], kind=name), {"answer": truth, "set": name}))
    return samples


def score_pope(answers: Mapping[str, str], samples: Samples) -> dict[str, Metric]:
    """Each set on its own, the mean over the sets, and the two other published readings of the answers."""
    results: dict[str, Metric] = {}
    sets = grouped(samples, lambda sample: sample.reference["set"])
    per_rule: dict[str, dict[str, dict[str, Metric]]] = {}
    for name, members in sets.items():
        given = [answers[sample.record.id] for sample in members]
        truth = [sample.reference["answer"] for sample in members]
        said = [yes_no(answer) for answer in given]
        rules = {
            "": confusion(said, truth, FIRST_WORD),
            "pope": confusion([pope_yes_no(a) for a in given], truth, "POPE's script: yes unless no or not is said"),
        }
        for rule, metrics in rules.items():
            for metric, value in metrics.items():
                per_rule.setdefault(rule, {}).setdefault(metric, {})[name] = value
        results |= keyed(rules[""], name)
    missing = [name for name in POPE_SETS if name not in sets]
    reason = f"without the sets {', '.join(missing)}" if missing else None
    means = {
        f"{metric}{'@' if rule else ''}{rule}": mean_of(parts, f"mean over the sets; {_variant(parts)}", reason)
        for rule, metrics in per_rule.items()
        for metric, parts in metrics.items()
    }
    truth = [sample.reference["answer"] for sample in samples]
    exact = [answers[sample.record.id].lower().strip() for sample in samples]
    pooled = confusion(
        exact, truth, "lmms-eval: the whole answer is yes or no; all sets pooled", misses_must_be_said=True
    )
    yes = [t == "yes" for t in truth]
    pooled["yes_ratio"] = percent(yes, "lmms-eval: share of questions whose *right* answer is yes")
    results = means | results | keyed(pooled, rule="lmms-eval")
    results["unparsed"] = unparsed([yes_no(answers[sample.record.id]) for sample in samples])
    return results


def _variant(parts: Mapping[str, Metric]) -> str:
    return next(iter(parts.values())).variant


def load_hallusion(root: Path, split: str) -> list[BenchmarkSample]:
    """``HallusionBench.json``; the image is ``filename``, none for questions without a visual."""
    samples: list[BenchmarkSample] = []
    for row in rows(find(root, "HallusionBench.json", "*.parquet", "*.jsonl")):
        visual = str(row["visual_input"]) != "0"
        if split == "image" and not visual:
            continue
        keys = ("category", "subcategory", "set_id", "figure_id", "question_id")
        id = "_".join(str(row[key]) for key in keys)
        picture = row.get("image") or row.get("filename")
        images = [image_of(root, picture, "", "hallusion_bench", "images")] if visual and picture else []
        reference = {key: str(row[key]) for key in keys} | {"answer": "yes" if str(row["gt_answer"]) == "1" else "no"}
        samples.append(BenchmarkSample(question(id, row["question"], images, kind=row["category"]), reference))
    return samples


def score_hallusion(answers: Mapping[str, str], samples: Samples) -> dict[str, Metric]:
    """Accuracy over questions (aAcc), over question pairs (qAcc) and over figures (fAcc)."""
    said = [yes_no(answers[sample.record.id]) for sample in samples]
    right = []
    for reading, sample in zip(said, samples, strict=True):
        unseen = sample.reference["category"] == "VS" and sample.reference["figure_id"] == "0"
        right.append(reading == sample.reference["answer"] or (reading is None and unseen))
    rule = "first whole word yes or no; without the visual supplement, an answer with neither (unsure) is right"
    anywhere = ["yes" if "yes" in answers[sample.record.id].lower() else "no" for sample in samples]
    found = [a == sample.reference["answer"] for a, sample in zip(anywhere, samples, strict=True)]
    results = _hallusion_levels(right, samples, rule, skip_unseen=True)
    results |= keyed(
        _hallusion_levels(found, samples, 'lmms-eval: yes where "yes" occurs, else no', False), rule="lmms-eval"
    )
    return results | {"unparsed": unparsed(said)}


def _hallusion_levels(right: list[bool], samples: Samples, rule: str, skip_unseen: bool) -> dict[str, Metric]:
    pairs: dict[tuple[str, ...], list[bool]] = {}
    figures: dict[tuple[str, ...], list[bool]] = {}
    for ok, sample in zip(right, samples, strict=True):
        r = sample.reference
        place = (r["category"], r["subcategory"], r["set_id"])
        pairs.setdefault((*place, r["question_id"]), []).append(ok)
        if not (skip_unseen and r["category"] == "VS" and r["figure_id"] == "0"):
            figures.setdefault((*place, r["figure_id"]), []).append(ok)
    return {
        "aAcc": percent(right, f"questions; {rule}"),
        "qAcc": percent([all(group) for group in pairs.values()], f"question pairs, all right; {rule}"),
        "fAcc": percent([all(group) for group in figures.values()], f"figures, all right; {rule}"),
    }


def load_mme(root: Path, split: str) -> list[BenchmarkSample]:
    """A folder a subtask with ``NAME.txt`` ("question<tab>answer" lines) and images, or the Parquet table."""
    parquet = find_all(root, "*.parquet")
    table = [
        (
            str(row["category"]),
            str(row["question_id"]),
            str(row["question"]),
            str(row["answer"]),
            image_of(root, row["image"]),
        )
        for path in parquet
        for row in rows(path)
    ]
    if not parquet:
        table = [entry for task in (*PERCEPTION, *COGNITION) for entry in _mme_folder(root, task)]
    if not table:
        raise ValueError(f"{root} has no folders named after MME's subtasks ({PERCEPTION[0]}, ...) and no Parquet file")
    seen: dict[str, int] = {}
    samples: list[BenchmarkSample] = []
    for task, name, text, truth, image in table:
        turn = seen[name] = seen.get(name, 0) + 1
        text = text.strip().replace(" Please answer yes or no.", "") + WORD_OR_PHRASE
        reference = {"answer": truth.strip().lower().replace(".", ""), "task": task, "image": name}
        samples.append(BenchmarkSample(question(f"{name}#{turn}", text, [image], kind=task), reference))
    return samples


def _mme_folder(root: Path, task: str) -> Iterator[tuple[str, str, str, str, str | bytes]]:
    """Subtask, image name, question, answer and image of every line; texts and images lie together or apart."""
    folders = [path for path in sorted(root.rglob(task)) if path.is_dir()]
    for path in sorted(folders[0].rglob("*.txt")) if folders else []:
        beside = [p for p in sorted(folders[0].rglob(f"{path.stem}.*")) if p.suffix != ".txt"]
        image = str(beside[0]) if beside else str(path.with_suffix(".jpg"))
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.strip():
                text, _, truth = line.rpartition("\t")
                yield task, f"{task}/{path.stem}", text, truth, image


def score_mme(answers: Mapping[str, str], samples: Samples) -> dict[str, Metric]:
    """Per subtask accuracy + accuracy of whole images (0-200), summed into perception, cognition and the total."""
    given = [answers[sample.record.id] for sample in samples]
    said = [yes_no(answer) for answer in given]
    results = _mme_sums(said, samples, FIRST_WORD)
    prefix = [mme_yes_no(answer) for answer in given]
    sums = _mme_sums(prefix, samples, "official script: yes or no within the first four characters")
    results |= keyed({name: sums[name] for name in ("perception", "cognition", "total")}, rule="official")
    return results | {"unparsed": unparsed(said)}


def _mme_sums(said: list[str | None], samples: Samples, rule: str) -> dict[str, Metric]:
    images: dict[str, dict[str, list[bool]]] = {}
    for reading, sample in zip(said, samples, strict=True):
        r = sample.reference
        images.setdefault(r["task"], {}).setdefault(r["image"], []).append(reading == r["answer"])
    tasks: dict[str, Metric] = {}
    for task, pairs in images.items():
        whole = [pair for pair in pairs.values() if len(pair) == 2]
        left = (
            f"{len(pairs) - len(whole)} image(s) without both questions left out" if len(whole) < len(pairs) else None
        )
        points = sum(50 * sum(pair) + 100 * all(pair) for pair in whole)
        value = points / len(whole) if whole else None
        tasks[task] = Metric(
            value, 2 * len(whole), f"accuracy + accuracy of both questions; {rule}", "0-200", reason=left
        )
    results = {}
    for name, members in (("perception", PERCEPTION), ("cognition", COGNITION)):
        there = [tasks[task] for task in members if task in tasks]
        lack = [task for task in members if task not in tasks]
        values = [metric.value for metric in there if metric.value is not None]
        reason = f"without {', '.join(lack)}" if lack else None
        top = f"0-{200 * len(members)}"
        n = sum(metric.n for metric in there)
        results[name] = Metric(
            sum(values) if values else None, n, f"sum over {len(values)} subtasks; {rule}", top, None, reason
        )
    parts = [results[name] for name in ("perception", "cognition")]
    known = [part.value for part in parts if part.value is not None]
    reason = next((part.reason for part in parts if part.reason), None)
    total = sum(known) if known else None
    results["total"] = Metric(total, sum(p.n for p in parts), f"perception + cognition; {rule}", "0-2800", None, reason)
    return results | {f"score/{task}": metric for task, metric in tasks.items()}


POPE = Benchmark(
    name="pope",
    rule="accuracy, precision, recall, F1 and yes-ratio of each set, and their mean over the three sets",
    source="Li et al. 2023 (arXiv 2305.10355), evaluate.py of its repository",
    samples="9,000 (3 x 3,000, MSCOCO)",
    metric="accuracy",
    loader=load_pope,
    scorer=score_pope,
    splits=("all", *POPE_SETS),
    lmms_task="pope",
    disagreements='POPE\'s script takes every answer without no or not as yes; lmms-eval wants the bare word ("Yes." '
    "is wrong there), pools the sets, and its yes-ratio is the ground truth's",
)
HALLUSION_BENCH = Benchmark(
    name="hallusionbench",
    rule="accuracy of questions, of question pairs and of figures",
    source="Guan et al. 2024 (arXiv 2310.14566), utils.py of its repository; yes/no read from the text, no GPT-4 judge",
    samples="1,129 (951 with an image)",
    metric="aAcc",
    loader=load_hallusion,
    scorer=score_hallusion,
    splits=("all", "image"),
    max_new_tokens=32,
    lmms_task="hallusion_bench_image",
    disagreements="the authors' script asks GPT-4 whether the answer agrees; lmms-eval's offline rule reads every "
    'answer without "yes" as no, counts figures without a visual too, and has no unsure answer',
)
MME = Benchmark(
    name="mme",
    rule="per subtask accuracy + accuracy of images with both questions right; perception and cognition",
    source="Fu et al. 2023 (arXiv 2306.13394), calculation.py of its repository",
    samples="2,374 (14 subtasks)",
    metric="total",
    loader=load_mme,
    scorer=score_mme,
    lmms_task="mme",
    disagreements="the official script and lmms-eval read yes or no within the first four characters only",
)
