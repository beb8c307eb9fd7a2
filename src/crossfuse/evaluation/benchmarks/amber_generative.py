"""AMBER's descriptions: CHAIR, Cover, Hal and Cog, with words matched exactly in place of spaCy's similarity.

AMBER's script takes the nouns of a description (NLTK's tagger, WordNet's lemmas) that its association lists hold, and
asks of each whether it means something that is annotated: the same word, an associated one, or one whose spaCy vector
is similar (above 0.8). Neither tagger nor vectors can be shipped, so that its own numbers are left empty here. What is
counted instead, under names of their own, is the same but for two things: a word of the lists is a noun wherever it
stands (words that are verbs or adjectives as often: only after an article, a possessive or a number), and only equal
words mean the same. Without similarity fewer words are forgiven and fewer are found, so that CHAIR and Hal tend to come
out higher, Cover and Cog lower than the script's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from crossfuse.evaluation.benchmarks.base import Benchmark, BenchmarkSample, Metric, Samples
from crossfuse.evaluation.benchmarks.files import document, find, find_all, image_of, question, rows

RULE = "exact-words"
WORDS = "words matched exactly, not by spaCy similarity; words of the lists count as nouns"
OFFICIAL = "AMBER's inference.py"
NEEDS_DATA = (
    "needs a part-of-speech tagger and word vectors (data of NLTK and spaCy), which are not shipped; "
    "run AMBER's own inference.py on the predictions"
)
NEEDS_LISTS = "needs relation.json and safe_words.txt of AMBER's data folder beside annotations.json"
NAMES = ("chair", "cover", "hal", "cog")
# WordNet's endings of English plurals, in its order, and irregular plurals of words that such lists hold.
_ENDINGS = (("s", ""), ("ses", "s"), ("ves", "f"), ("ves", "fe"), ("xes", "x"), ("zes", "z"), ("ches", "ch"),
            ("shes", "sh"), ("men", "man"), ("ies", "y"))  # fmt: skip
# Words of AMBER's lists that descriptions hold as verbs or adjectives: "can be seen" names no can.
_SELDOM_NOUNS = "brush can drink hot leave lock ring sound support switch watch"
_BEFORE_NOUNS = "a an the one two three four five six seven eight nine ten his her their its"
_IRREGULAR = {"children": "child", "geese": "goose", "mice": "mouse", "feet": "foot", "teeth": "tooth"}


def load_descriptions(root: Path, split: str) -> list[BenchmarkSample]:
    """``query_generative.json`` (or ``query_all.json``), ``annotations.json``, and for the scores ``relation.json`` and
    ``safe_words.txt``; images in ``image/``."""
    truths = {int(entry["id"]): entry for entry in document(find(root, "annotations.json"))}
    lists = _lists(root)
    samples = []
    for query in rows(find(root, "query_generative.json", "query_all.json", "query_*.json")):
        truth = truths.get(int(query["id"]))
        if truth is None:
            raise ValueError(f"AMBER query {query['id']} is not in annotations.json; are both files of one release?")
        if truth["type"] != "generative":
            continue
        record = question(
            str(query["id"]), str(query["query"]), [image_of(root, query["image"], "image", "images", "")]
        )
        samples.append(BenchmarkSample(record, _reference(truth, lists)))
    return samples


def _lists(root: Path) -> tuple[dict[str, list[str]], list[str]] | None:
    """(associated words by word, words that are always safe), in lower case; None where a file is missing."""
    relations, safe = find_all(root, "relation.json"), find_all(root, "safe_words.txt")
    if not relations or not safe:
        return None
    associated = {str(k).lower(): [str(w).lower() for w in v] for k, v in document(relations[0]).items()}
    return associated, safe[0].read_text(encoding="utf-8").lower().split()


def _reference(truth: Mapping[str, Any], lists: tuple[dict[str, list[str]], list[str]] | None) -> dict[str, Any]:
    there, imagined = ([str(word).lower() for word in truth[part]] for part in ("truth", "hallu"))
    reference: dict[str, Any] = {"truth": there, "hallu": imagined}
    if lists is not None:
        associated, safe = lists
        words = dict.fromkeys(w for key, others in associated.items() for w in (key, *others))
        reference |= {"there": _places(there, associated), "imagined": _places(imagined, associated)}
        reference |= {"words": list(words), "safe": safe}
    return reference


def _places(objects: Sequence[str], associated: Mapping[str, list[str]]) -> dict[str, int]:
    """Word -> which object it stands for: as in the script associated words go first, each for the first object."""
    places: dict[str, int] = {}
    for index, name in enumerate(objects):
        for word in associated.get(name, ()):
            places.setdefault(word, index)
    for index, name in enumerate(objects):
        places.setdefault(name, index)
    return places


def score_descriptions(answers: Mapping[str, str], samples: Samples) -> dict[str, Metric]:
    """CHAIR, Cover, Hal and Cog in per cent with exact words; the official ones are None with the reason."""
    results = {name: Metric(None, len(samples), OFFICIAL, "0-100", reason=NEEDS_DATA) for name in NAMES}
    counted = [_count(answers[s.record.id], s.reference) for s in samples if "words" in s.reference]
    if len(counted) < len(samples):
        return results | {
            f"{name}@{RULE}": Metric(None, len(samples), WORDS, "0-100", reason=NEEDS_LISTS) for name in NAMES
        }
    nouns, wrong, objects, covered, imagined, fallen_for = (sum(column) for column in zip(*counted, strict=True))
    hallucinated = sum(bool(each[1]) for each in counted)
    parts = {
        "chair": (wrong, nouns, "named objects that are not in the image, of all named"),
        "cover": (covered, objects, "annotated objects that are named"),
        "hal": (hallucinated, len(samples), "descriptions that name an object which is not there"),
        "cog": (fallen_for, imagined, "objects that people would imagine, and that are named"),
    }
    return results | {
        f"{name}@{RULE}": Metric(
            100 * part / whole if whole else None, whole, f"share of {what}; {WORDS}", "0-100",
            reason=None if whole else "there is none to count",
        )
        for name, (part, whole, what) in parts.items()
    }  # fmt: skip


def _count(text: str, reference: Mapping[str, Any]) -> tuple[int, int, int, int, int, int]:
    """(nouns of the lists, wrong ones, annotated objects, covered ones, imaginable objects, those named)."""
    covered, fallen_for, nouns, wrong = set(), set(), 0, 0
    for noun in listed_words(text, reference["words"]):
        nouns += 1
        if noun in reference["safe"]:
            continue
        if noun in reference["there"]:
            covered.add(reference["there"][noun])
            continue
        if noun in reference["imagined"]:
            fallen_for.add(reference["imagined"][noun])
        wrong += 1
    return nouns, wrong, len(reference["truth"]), len(covered), len(reference["hallu"]), len(fallen_for)


def listed_words(text: str, words: Sequence[str]) -> Iterator[str]:
    """Words of the text that the lists hold, in the singular where they hold that one only; every mention counts."""
    known, before = set(words), ""
    seldom, articles = set(_SELDOM_NOUNS.split()), set(_BEFORE_NOUNS.split())
    for word in re.findall(r"[a-z]+(?:-[a-z]+)*", text.lower()):
        if word not in seldom or before in articles:
            form = next((form for form in _forms(word) if form in known), None)
            if form is not None:
                yield form
        before = word


def _forms(word: str) -> Iterator[str]:
    yield word
    if word in _IRREGULAR:
        yield _IRREGULAR[word]
    for ending, replacement in _ENDINGS:
        if word.endswith(ending):
            yield word.removesuffix(ending) + replacement


AMBER_GENERATIVE = Benchmark(
    name="amber-generative",
    rule=f"CHAIR, Cover, Hal and Cog of descriptions, with AMBER's lists and {WORDS}",
    source="Wang et al. 2023 (arXiv 2311.07397), inference.py of its repository",
    samples="1,004 descriptions",
    metric=f"chair@{RULE}",
    loader=load_descriptions,
    scorer=score_descriptions,
    splits=("generative",),
    max_new_tokens=512,
    disagreements="the script takes tagged nouns only and also words whose spaCy vectors are similar (over 0.8), so "
    "published CHAIR, Cover, Hal and Cog are other numbers; it is case-sensitive, and counts a word for the first "
    "object that it is associated with (so here)",
)
