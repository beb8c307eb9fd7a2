"""What an answer says: yes or no, an option's letter, or a number. The one reading that all benchmarks share.

Each function gives None where the answer cannot be read; scorers count those answers as wrong and show how many there
were. The rules of other tools, kept for comparison only, are in `foreign_rules`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

_YES_NO = re.compile(r"\b(yes|no)\b", re.IGNORECASE)
_LONE = re.compile(r"[\s(\[*\"']*([A-Za-z])[\s)\].:,;*\"']*")
# "the answer is B", "Answer: (c)", "option B", "I choose b)"; the letter must stand alone.
_STATED = re.compile(
    r"\b(?i:(?:answer|option|choice)(?:\s+(?:is|would\s+be|must\s+be))?\s*[:=]?|choose|select|pick)\s*(?i:option\s+)?"
    r"[*\"']*(?:\(([A-Za-z])\)|([A-Z])\b(?!')|([b-hj-z])(?=[\s.*\"']*$))",
)
_LEADING = re.compile(r"\s*\(?([A-Z])\s*[).:,](?!\s*(?:or|and)\b)\s*\S")
_BRACKETED = re.compile(r"\(([A-Za-z])\)|(?<![\w(])([A-Z])\)")
_STANDING = re.compile(r"(?<![\w'])([A-Z])(?![\w'])")
# A capital A (or I) before a word in lower case is an article (a pronoun), unless a verb or a joining word follows.
_ARTICLE = re.compile(r"\s+(?!(?:is|was|because|since|as|and|or|but)\b)[a-z]")
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|(?<![\w.])[-+]?\.\d+")
_UP_TO_TWENTY = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)
_NUMBER_WORDS = {word: float(value) for value, word in enumerate(_UP_TO_TWENTY.split())}
_WORDS = re.compile(r"[a-z]+")


def yes_no(answer: str) -> str | None:
    """ "yes" or "no": the first of these that stands in the answer as a whole word; None where neither does.

    "Notice" and "yesterday" are no answers: whole words only.
    """
    found = _YES_NO.search(answer)
    return found.group(1).lower() if found else None


def letter(answer: str, options: Sequence[str]) -> str | None:
    """The option's capital letter that the answer names; None where it names none, or several.

    The first rule that finds something decides: the answer is nothing but a letter, "b" and "(b)" too; it is an
    option's text; a letter is stated ("the answer is B", the last such statement); it starts with a marked letter
    ("B. cat"); one letter only stands in brackets; one capital letter only stands alone; the text of one option only
    occurs as whole words, where an option inside a longer one that occurs does not count. "A dog" names no letter.

    Args:
        options: texts in the order of their letters, at most 26; their number bounds the letters. Empty texts are
            letters without a text.
    """
    valid = LETTERS[: len(options)]
    lone = _LONE.fullmatch(answer)
    if lone and lone.group(1).upper() in valid:
        return lone.group(1).upper()
    words = plain_words(answer)
    same = [name for name, option in zip(valid, options, strict=True) if option and plain_words(option) == words]
    if len(same) == 1:
        return same[0]
    stated = [found for found in _STATED.finditer(answer) if _is_letter(found, answer, valid)]
    if stated:
        return _letter_of(stated[-1])
    leading = _LEADING.match(answer)
    if leading and leading.group(1) in valid:
        return leading.group(1)
    for pattern in (_BRACKETED, _STANDING):
        named = {_letter_of(found) for found in pattern.finditer(answer) if _is_letter(found, answer, valid)}
        if named:
            return named.pop() if len(named) == 1 else None
    return _only_option(words, valid, options)


def number(answer: str) -> float | None:
    """The one number that the answer names, in digits ("1,200", "-3.5", "40%" is 40) or words up to twenty.

    None where there is none, or several different ones.
    """
    found = {float(text.group().replace(",", "")) for text in _NUMBER.finditer(answer)}
    found |= {_NUMBER_WORDS[word] for word in _WORDS.findall(answer.lower()) if word in _NUMBER_WORDS}
    return found.pop() if len(found) == 1 else None


def plain_words(text: str) -> str:
    """Lower case, words and numbers only, one blank between them."""
    return " ".join(re.findall(r"\w+(?:[.,']\w+)*", text.lower()))


def _letter_of(found: re.Match[str]) -> str:
    return next(group for group in found.groups() if group).upper()


def _is_letter(found: re.Match[str], answer: str, valid: str) -> bool:
    name = _letter_of(found)
    if name not in valid:
        return False
    bracketed = found.group().endswith(")")
    return bracketed or name not in "AI" or not _ARTICLE.match(answer, found.end())


def _only_option(words: str, valid: str, options: Sequence[str]) -> str | None:
    padded = f" {words} "
    there = {name: plain_words(option) for name, option in zip(valid, options, strict=True)}
    there = {name: text for name, text in there.items() if text and f" {text} " in padded}
    longest = [
        name
        for name, text in there.items()
        if not any(other != text and f" {text} " in f" {other} " for other in there.values())
    ]
    return longest[0] if len(longest) == 1 else None
