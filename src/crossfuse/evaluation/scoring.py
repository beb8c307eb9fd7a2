"""Scores of short answers, with their uncertainty. Pure functions: predictions in, numbers out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from crossfuse.evaluation.answers import yes_no


def normalise(answer: str) -> str:
    """Lower case, one space between words, no surrounding blanks, quotes or final punctuation."""
    return " ".join(answer.lower().split()).strip(" \"'`").rstrip(".,;:!? ")


def exact_match(answer: str, reference: str) -> bool:
    """Whether both are the same after `normalise`."""
    return normalise(answer) == normalise(reference)


def is_right(answer: str, reference: str) -> bool | None:
    """Judge one answer: yes/no questions by `yes_no`, all others by `exact_match`.

    None means that no yes or no could be read; it counts as wrong and is counted on its own too.
    """
    expected = normalise(reference)
    if expected in ("yes", "no"):
        said = yes_no(answer)
        return None if said is None else said == expected
    return exact_match(answer, reference)


def wilson_interval(right: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a share (Wilson 1927), both ends in [0, 1]. No samples: (0, 1).

    Raises `ValueError` unless 0 <= right <= total and 0 < confidence < 1.
    """
    if not 0 <= right <= total:
        raise ValueError(f"right answers lie between 0 and the number of questions; got {right} of {total}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence lies between 0 and 1, as 0.95; got {confidence}")
    if total == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = right / total
    centre = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    # At the ends the formula gives 0 and 1 exactly; floating point does not.
    return (0.0 if right == 0 else centre - half), (1.0 if right == total else centre + half)


@dataclasses.dataclass(frozen=True)
class Score:
    """Right answers of all; `unparsed` of the wrong ones held no yes or no where one was asked for."""

    right: int
    total: int
    unparsed: int = 0

    @property
    def share(self) -> float:
        """Share of right answers in [0, 1]; NaN without questions."""
        return self.right / self.total if self.total else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval of the share."""
        return wilson_interval(self.right, self.total)


def score(answers: Sequence[str], references: Sequence[str]) -> Score:
    """Score answers against references in the same order (`ValueError` where their numbers differ)."""
    if len(answers) != len(references):
        raise ValueError(f"one reference an answer: got {len(answers)} answers and {len(references)} references")
    judged = [is_right(answer, reference) for answer, reference in zip(answers, references, strict=True)]
    return Score(sum(1 for j in judged if j), len(judged), sum(1 for j in judged if j is None))


@dataclasses.dataclass(frozen=True)
class Difference:
    """Difference of two shares on the same questions, with its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """ "better", "worse", or "not distinguishable" where the interval holds zero."""
        if self.low > 0:
            return "better"
        return "worse" if self.high < 0 else "not distinguishable"


def paired_difference(right: Sequence[bool], baseline: Sequence[bool], confidence: float = 0.95) -> Difference:
    """Share of `right` minus share of `baseline`, question by question, with the interval of Agresti and Min (2005).

    Pairing matters: both models meet the same hard questions, so the difference is known better than either share.
    The interval is the normal one after half a question is added to each cell of the 2 x 2 table, so two models that
    never disagree still get one of positive width.

    Raises `ValueError` for sequences of different length or without questions.
    """
    if len(right) != len(baseline) or not right:
        raise ValueError(f"a paired difference needs the same questions twice; got {len(right)} and {len(baseline)}")
    gained = sum(1 for a, b in zip(right, baseline, strict=True) if a and not b)
    lost = sum(1 for a, b in zip(right, baseline, strict=True) if b and not a)
    total, up, down = len(right) + 2, gained + 0.5, lost + 0.5
    centre = (up - down) / total
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    half = z * math.sqrt(up + down - (up - down) ** 2 / total) / total
    return Difference((gained - lost) / len(right), max(centre - half, -1.0), min(centre + half, 1.0))


def other_images(images: Sequence[object], *, seed: int = 0) -> list[int]:
    """For each question the index of a question with *another* image: the shuffled-image control.

    A model that scores as well with these images has not looked at them.

    Args:
        images: what identifies the image of each question; equal means the same image.

    Raises:
        ValueError: one image has more than half of the questions, so that not every question can get another.
    """
    order = list(np.random.default_rng(seed).permutation(len(images)))
    # Questions of one image side by side, shifted by the largest group: nobody lands in the own group.
    order.sort(key=lambda index: str(images[index]))
    groups: dict[str, int] = {}
    for image in images:
        groups[str(image)] = groups.get(str(image), 0) + 1
    largest = max(groups.values(), default=0)
    if 2 * largest > len(images):
        raise ValueError(
            f"one image has {largest} of the {len(images)} questions, so they cannot all get another image: "
            "score more images"
        )
    chosen = [0] * len(images)
    for place, index in enumerate(order):
        chosen[index] = int(order[(place + largest) % len(order)])
    return chosen
