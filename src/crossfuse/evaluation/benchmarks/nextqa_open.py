"""NExT-QA's open-ended questions: WUPS of short answers, and exact match for yes/no and counting questions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from crossfuse.data.records import Video
from crossfuse.evaluation.benchmarks.base import Benchmark, BenchmarkSample, Metric, Samples
from crossfuse.evaluation.benchmarks.files import document, find_all, place, question, rows
from crossfuse.evaluation.benchmarks.tally import by_group, percent
from crossfuse.evaluation.benchmarks.video import nextqa_folders
from crossfuse.evaluation.benchmarks.wordnet import REMEDY, lemma, wordnet, wordnet_directory, wups

PROMPT = "\nAnswer a question using a short phrase or sentence."
EXACT_TYPES = ("DB", "DC")  # yes/no and counting
KINDS = {"C": "causal", "T": "temporal", "D": "descriptive"}
# NExT-QA's own list: the usual English stop words, without those that say where, when, how many, or no.
_STOP_WORDS = """
    i me my myself we our ours ourselves you you're you've you'll you'd your yours yourself yourselves he him his
    himself she she's her hers herself it it's its itself they them their theirs themselves what which who whom this
    that that'll these those am is are was were be been being have has had having do does did doing a an the and but
    if or because as until while to from of at for with about into through during again further then here there when
    where why how all any each most other some such only own so than too very s t can will just don don't should
    should've now d ll m o re ve y ain aren aren't couldn couldn't didn didn't doesn doesn't hadn hadn't hasn hasn't
    haven haven't isn isn't ma mightn mightn't mustn mustn't needn needn't shan shan't shouldn shouldn't wasn wasn't
    weren weren't won won't wouldn wouldn't
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())


def load(root: Path, split: str) -> list[BenchmarkSample]:
    """``SPLIT.csv`` (question, answer, qid, type) and, where given, ``add_reference_answer_SPLIT.json``."""
    files = find_all(root, f"{split}.csv", f"*{split}*.csv")
    path = next((p for p in files if "a0" not in p.read_text(encoding="utf-8").splitlines()[0].split(",")), None)
    if path is None:
        raise ValueError(f"{root} has no {split}.csv with free answers (columns video, question, answer, qid, type)")
    more = find_all(root, f"add_reference_answer_{split}.json")
    added = document(more[0]) if more else {}
    folders = nextqa_folders(root)
    samples: list[BenchmarkSample] = []
    for row in rows(path):
        second = row.get("additional_ref_answer") or added.get(row["video"], {}).get(row["qid"])
        kind = "TN" if row["type"] in ("TN", "TP") else row["type"]
        clip = Video(path=str(place(root, f"{folders.get(row['video'], row['video'])}.mp4", "NExTVideo", "videos", "")))
        record = question(f"{row['video']}/{row['qid']}", row["question"].strip() + PROMPT, video=clip, kind=kind)
        truth = [row["answer"], *([second] if second else [])]
        samples.append(BenchmarkSample(record, {"answers": truth, "type": kind, "kind": KINDS[kind[0]]}))
    return samples


def score(answers: Mapping[str, str], samples: Samples) -> dict[str, Metric]:
    """WUPS at 0 and 0.9, by kind and type, with WordNet; the exact share always."""
    exact = [
        float(any(content_words(answers[s.record.id]) == content_words(t) for t in s.reference["answers"]))
        for s in samples
    ]
    same = "words in lower case without NExT-QA's stop words are equal, without lemmas"
    results = {"exact": percent(exact, same)}
    directory, why = wordnet_directory(), None
    try:
        reader = None if directory is None else wordnet(directory)
        why = REMEDY if reader is None else None
    except ModuleNotFoundError:
        reader, why = None, "needs NLTK, which is not installed (pip install 'crossfuse[eval]')"
    words = (
        "WUPS@{}, first senses, best of the references; yes/no and counts exact; lemmas without a part-of-speech tagger"
    )
    for threshold, key in ((0.0, "wups"), (0.9, "wups@0.9")):
        variant = words.format(f"{threshold:g}")
        if reader is None:
            results[key] = Metric(None, len(samples), variant, "0-100", reason=why)
            continue
        scores = [_score_one(reader, answers[s.record.id], s.reference, threshold) for s in samples]
        results[key] = percent(scores, variant)
        if threshold == 0:
            for group in ("kind", "type"):
                results |= {
                    f"wups/{name}": metric for name, metric in by_group(scores, samples, group, variant).items()
                }
    return results


def content_words(text: str) -> list[str]:
    """Words in lower case, the stop words left out."""
    return [word for word in re.findall(r"\w+(?:'\w+)?", text.lower()) if word not in STOP_WORDS]


def _score_one(reader: Any, answer: str, reference: Mapping[str, Any], threshold: float) -> float:
    said = _lemmas(reader, answer)
    truths = [_lemmas(reader, truth) for truth in reference["answers"]]
    if reference["type"] in EXACT_TYPES:
        return float(said in truths)
    return max(wups(reader, said, truth, threshold) for truth in truths)


def _lemmas(reader: Any, text: str) -> Sequence[str]:
    lemmas = (lemma(reader, word) for word in re.findall(r"\w+(?:'\w+)?", text.lower()))
    return [word for word in lemmas if word not in STOP_WORDS]


NEXT_QA_OPEN = Benchmark(
    name="nextqa-open",
    rule="WUPS at threshold 0 (what the paper quotes) and 0.9; yes/no and counting questions by exact match",
    source="Xiao et al. 2021 (arXiv 2105.08276), eval_oe.py and metrics.py of NExT-OE",
    samples="9,178 (test), 5,343 (val)",
    metric="wups",
    loader=load,
    scorer=score,
    splits=("test", "val"),
    max_new_tokens=32,
    video=True,
    disagreements="the script lemmatises by tagged part of speech (pywsd, downloads needed), here noun, verb, "
    "adjective in turn; lmms-eval scores the second reference at 0 where 0.9 is meant",
)
