"""VQA accuracy (Antol et al. 2015; Goyal et al. 2017) under each of its published answer processings.

An answer is compared with ten people's. "Leave one out" averages, over the subsets of nine people, the share of
agreement min(matches / 3, 1); the short form takes min(matches / 3, 1) over all ten.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence

# The official list, right forms only; the wrong ones are these without apostrophes (`_wrong_forms`).
_RIGHT_FORMS = """
    ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd
    he'd've he's how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've
    needn't not've o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've
    somebody'll somebody's someone'd someone'd've someone'll someone's something'd something'd've something'll
    that's there'd there'd've there're there's they'd they'd've they'll they're they've 'twas wasn't we'd've we've
    weren't what'll what're what's what've when's where'd where's where've who'd who'd've who'll who's who've why'll
    why're why's won't would've wouldn't wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've
"""
_UP_TO_TEN = "zero one two three four five six seven eight nine ten"
_NUMBERS = {"none": "0"} | {word: str(value) for value, word in enumerate(_UP_TO_TEN.split())}
_ARTICLES = frozenset(("a", "an", "the"))
_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_COMMAS = re.compile(r"(?<=\d),+(?=\d)")
_LOOSE_COMMAS = re.compile(r"\d,\d")
# As published: the look-ahead (?!<=\d) was meant to be a look-behind, so a full stop after a digit goes as well.
_FULL_STOPS = re.compile(r"(?!<=\d)\.(?!\d)")
_FULL_STOPS_AT_MOST = int(re.UNICODE)  # the script passes the flag where a count is meant: 32 full stops go, no more


def strip_punctuation(text: str, *, loose_commas: bool = False) -> str:
    """Punctuation dropped where it touches a blank (or a comma stands between digits), else turned into a blank."""
    commas = (_LOOSE_COMMAS if loose_commas else _COMMAS).search(text) is not None
    processed = text
    for mark in _PUNCTUATION:
        touches = mark in text and (f"{mark} " in text or f" {mark}" in text)
        processed = processed.replace(mark, "" if touches or commas else " ")
    return _FULL_STOPS.sub("", processed, count=_FULL_STOPS_AT_MOST)


def plain_numbers(text: str) -> str:
    """Lower case, number words as digits ("none" is 0), articles dropped, apostrophes put back into contractions."""
    words = [_NUMBERS.get(word, word) for word in text.lower().split()]
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in _ARTICLES)


@functools.lru_cache(maxsize=65536)
def processed(answer: str) -> str:
    """The VQA v2 script's processing of one answer, reference or not."""
    return plain_numbers(strip_punctuation(_one_line(answer)))


@functools.lru_cache(maxsize=65536)
def evalai(answer: str) -> str:
    """TextVQA's and VizWiz's processing (EvalAI, Pythia): lower case, commas, question marks and 's first."""
    text = answer.lower().replace(",", "").replace("?", "").replace("'s", " 's").strip()
    return plain_numbers(strip_punctuation(_one_line(text)))


def normalised_accuracy(answer: str, references: Sequence[str], process: Callable[[str], str] = processed) -> float:
    """Leave one out, both sides always processed: lmms-eval's rule for VQAv2, and with `evalai` for the others."""
    return leave_one_out(process(answer), [process(reference) for reference in references])


def official_accuracy(answer: str, references: Sequence[str]) -> float:
    """Leave one out as the VQA v2 script does it: both sides are processed *only where the people disagree*.

    So "Black." scores 0 against ten times "black". And a single reference always scores 0: nobody is left to agree.
    """
    raw = [_one_line(reference) for reference in references]
    if len(set(raw)) > 1:
        return normalised_accuracy(answer, raw)
    return leave_one_out(_one_line(answer), raw)


def short_accuracy(answer: str, references: Sequence[str]) -> float:
    """min(matches / 3, 1) over all references, both sides processed: the short form that papers print."""
    said = processed(answer)
    return min(sum(processed(reference) == said for reference in references) / 3, 1.0)


def leave_one_out(answer: str, references: Sequence[str]) -> float:
    """Mean over the references of min(matches among the others / 3, 1); 0 without references."""
    if not references:
        return 0.0
    matches = sum(reference == answer for reference in references)
    with_it, without_it = min((matches - 1) / 3, 1.0), min(matches / 3, 1.0)
    return (matches * with_it + (len(references) - matches) * without_it) / len(references)


def _one_line(text: str) -> str:
    return text.replace("\n", " ").replace("\t", " ").strip()


def _wrong_forms(right: str) -> list[str]:
    """Without its apostrophe; of several, each form that lacks one of them."""
    places = [place for place, mark in enumerate(right) if mark == "'"]
    return [right[:place] + right[place + 1 :] for place in places]


CONTRACTIONS = {wrong: right for right in _RIGHT_FORMS.split() for wrong in _wrong_forms(right)} | {
    "somebody'd": "somebodyd"
}
