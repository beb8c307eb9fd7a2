"""How other tools read an answer, so that their scores can be put beside ours. Never our default.

Written from the published scripts; the names say whose rule it is. Some of these rules are wrong on plain answers ("A
dog" is read as option A): `answers` has ours.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

from crossfuse.evaluation.vqa_accuracy import strip_punctuation

_PHRASES = (
    *(f"{the}{kind} is" for kind in ("answer", "choice") for the in ("the ", "")),
    *(
        f"{the}{good} {kind} is"
        for good in ("correct", "best")
        for kind in ("answer", "option")
        for the in ("the ", "")
    ),
    *(f"{the}correct choice is" for the in ("the ", "")),
    *("i choose", "i select", "i pick", "my answer is", "my choice is"),
    *("옵션", "정답은", "답은", "답:", "答案是", "答案为", "选", "答えは"),
)
_AFFIXES = ((6, "({})"), (5, "{}."), (4, "{}:"), (3, "{})"), (2, "{} "))


def pope_yes_no(answer: str) -> str:
    """POPE's script: "no" where the first sentence holds the word No, no or not (commas dropped); "yes" otherwise."""
    words = answer.split(".")[0].replace(",", "").split(" ")
    return "no" if {"No", "not", "no"} & set(words) else "yes"


def mme_yes_no(answer: str) -> str | None:
    """MME's script (after Otter): yes or no within the first four characters, or a lone y or n; full stops dropped."""
    text = answer.lower().strip().replace(".", "")
    if len(text) == 1:
        return {"y": "yes", "n": "no"}.get(text)
    start = text if text in ("yes", "no") else text[:4]
    return "yes" if "yes" in start else "no" if "no" in start else None


def scienceqa_letter(answer: str) -> str | None:
    """LLaVA's rule, in lmms-eval too: the answer is the letter, or starts with a capital letter and a full stop."""
    text = answer.strip()
    if len(text) == 1:
        return text.upper()
    return text[0] if len(text) > 1 and text[0].isupper() and text[1] == "." else None


def ai2d_letter(answer: str) -> str:
    """lmms-eval's AI2D filter and match: a leading "B.", else the whole answer; punctuation and case dropped."""
    leading = re.match(r"\s*([A-Z])\.", answer)
    return bare(leading.group(1) if leading else answer).upper()


def first_letter(answer: str, letters: str) -> str | None:
    """lmms-eval's PerceptionTest rule: the first of these capital letters that stands as a word of its own."""
    found = re.search(rf"\b([{letters}])\b", answer)
    return found.group(1) if found else None


def ranked_letter(answer: str, letters: Sequence[str]) -> str | None:
    """lmms-eval's shared rule (RealWorldQA, Video-MME, MLVU): the best marked letter, the later one among equals.

    Marks from best to worst: the start or the end of the answer, after a phrase such as "the answer is", (A), A., A:,
    A), A before a blank; else any occurrence. A letter inside a word counts for most of them.
    """
    text = answer.strip()
    for mark in ",.!?;:'\"":
        text = text.strip(mark)
    if not text:
        return None
    padded, core = f" {text} ", text.strip()
    ranked = [
        (rank, place, name)
        for rank, affix in _AFFIXES
        for name in letters
        if (place := padded.rfind(affix.format(name))) >= 0
    ]
    lower = padded.lower()
    for phrase in _PHRASES:
        start = lower.find(phrase)
        if start >= 0:
            after = ((padded.find(name, start + len(phrase)), name) for name in letters)
            ranked += [(7, place, name) for place, name in after if place >= 0]
    for name in letters:
        if core.startswith(name) and (len(core) == 1 or not core[1].isalpha()):
            ranked.append((10, 0, name))
        if core.endswith(name) and (len(core) == 1 or not core[-2].isalpha()):
            ranked.append((9, len(padded) - 1, name))
    if not ranked:
        ranked = [(0, place, name) for name in letters if (place := padded.rfind(name)) >= 0]
    return max(ranked, key=lambda entry: entry[:2])[2] if ranked else None


def mmbench_letter(answer: str, options: Sequence[str]) -> str | None:
    """MMBench's rule without a judge, as lmms-eval's "static" evaluation has it.

    A letter A to E that stands between blanks (not where an A stands among more than three words), then one with
    brackets or punctuation, then the only option whose text occurs, then `ranked_letter`.
    """
    words = answer.split()
    tries = [("", "")] + [(a, b) for a, b in _MMBENCH_AFFIXES]
    for number, (before, after) in enumerate(tries):
        there = [name for name in "ABCDE" if f"{before}{name}{after}" in words]
        if len(there) == 1 and not (number == 0 and "A" in words and len(words) > 3):
            return there[0]
    named = [name for name, option in zip("ABCD", options, strict=False) if option.lower() in answer.lower()]
    if len(named) == 1:
        return named[0]
    return ranked_letter(answer, "ABCD"[: len(options)])


def mvbench_letter(answer: str) -> str | None:
    """lmms-eval's MVBench rule: a leading "B. text", else the first single letter a to e once punctuation is gone."""
    leading = re.match(r"([A-E])\.\s*(.+)$", answer.strip(), re.IGNORECASE)
    if leading:
        return leading.group(1).upper()
    text = strip_punctuation(answer.replace("\n", " ").replace("\t", " ").strip(), loose_commas=True)
    found = re.search(r"\b([A-E])\b", text, re.IGNORECASE)
    return found.group(1).upper() if found else None


def bare(text: str) -> str:
    """Lower case without ASCII punctuation; blanks stay (the exact match of lmms-eval's GQA and AI2D)."""
    return text.lower().translate(_NO_PUNCTUATION)


_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_MMBENCH_AFFIXES = (
    *(("", "."), ("", ","), ("", ":"), ("", ")"), ("", ").")),
    *(("(", ")"), ("(", ").")),
    *((":", ""), (":", ","), (":", "."), (":", ")"), (":", ").")),
)
