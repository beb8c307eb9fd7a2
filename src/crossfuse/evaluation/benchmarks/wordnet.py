"""Word similarity by WordNet (Wu and Palmer 1994), from the database files that a system package or NLTK installs."""

from __future__ import annotations

import functools
import io
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# WordNet's own variables first, then Debian's wordnet-base, then NLTK's data.
_PLACES = (
    "/usr/share/wordnet",
    "/usr/local/share/wordnet",
    "~/nltk_data/corpora/wordnet",
    "/usr/share/nltk_data/corpora/wordnet",
)
REMEDY = "needs the WordNet database: install wordnet-base (Debian), or set WNSEARCHDIR to a directory with index.noun"


def wordnet_directory() -> Path | None:
    """The first directory with WordNet's files; None where there is none."""
    named = [os.environ.get("WNSEARCHDIR", ""), os.path.join(os.environ.get("WNHOME", "-"), "dict")]
    for place in (*named, *_PLACES):
        path = Path(place).expanduser()
        if place and (path / "index.noun").is_file() and (path / "data.noun").is_file():
            return path
    return None


@functools.lru_cache(maxsize=2)
def wordnet(directory: Path) -> Any:
    """NLTK's reader of a WordNet directory; the file of lexicographers' names, which Debian lacks, is not needed."""
    import nltk.data
    from nltk.corpus.reader.wordnet import WordNetCorpusReader

    if str(directory) not in nltk.data.path:
        nltk.data.path.append(str(directory))  # NLTK refuses to open files outside the folders of its data path

    class Reader(WordNetCorpusReader):  # type: ignore[misc]
        def open(self, file: str) -> Any:
            if file == "lexnames" and not (directory / file).exists():
                return io.StringIO("".join(f"{number:02d}\tname{number}\t0\n" for number in range(45)))
            return super().open(file)

        def map_wn(self, version: str = "wordnet") -> None:
            """No mapping between releases: only the multilingual functions need it, and it needs a second release."""

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # says that the multilingual functions are absent
        return Reader(str(directory), None)


def similarity(reader: Any, one: str, other: str) -> float:
    """Wu-Palmer similarity of the first senses; 1 for equal words, 0 where a word or a common ancestor is unknown."""
    if one == other:
        return 1.0
    first, second = _senses(reader, one), _senses(reader, other)
    if not first or not second:
        return 0.0
    return first[0].wup_similarity(second[0]) or 0.0


def lemma(reader: Any, word: str) -> str:
    """The word's base form: as a noun, else as a verb, else as an adjective; the word itself where WordNet has none."""
    for part in ("n", "v", "a"):
        base = reader.morphy(word, part)
        if base and base != word:
            return str(base)
    return word


def wups(reader: Any, said: Sequence[str], truth: Sequence[str], threshold: float) -> float:
    """WUPS (Malinowski and Fritz 2014) as NExT-QA has it: the smaller side's product of best similarities.

    Similarities below the threshold count a tenth. As in its script a word without any counterpart (best similarity 0)
    is left out of the product, and a side without any counterpart gives 0.
    """
    return min(_one_sided(reader, said, truth, threshold), _one_sided(reader, truth, said, threshold))


def _one_sided(reader: Any, words: Sequence[str], others: Sequence[str], threshold: float) -> float:
    product, matched = 1.0, False
    for word in words:
        best = max((_weighed(similarity(reader, word, other), threshold) for other in others), default=0.0)
        if best:
            product, matched = product * best, True
    return product if matched else 0.0


def _weighed(value: float, threshold: float) -> float:
    return value if value >= threshold else 0.1 * value


@functools.lru_cache(maxsize=16384)
def _senses(reader: Any, word: str) -> list[Any]:
    return list(reader.synsets(word))
