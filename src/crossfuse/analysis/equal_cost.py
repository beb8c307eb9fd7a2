"""Insertion with pruning and anchors at the cost of another fusion: how many image tokens may stay?

Cross-attention saves operations because image tokens do not pass through the blocks. Pruning saves them by dropping
image tokens. At equal operations the two can be compared: `equal_cost` finds the share of image tokens with which
pruned insertion costs as much as, and never more than, the other fusion.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

from crossfuse.analysis.cost import PromptCost, prompt_cost
from crossfuse.fusion import Fusion
from crossfuse.fusions.anchors import TextAnchors


@dataclasses.dataclass(frozen=True)
class EqualCost:
    """Two fusions of equal operations, of one image, its text and its answer."""

    target: Fusion
    fusion: TextAnchors  # ready to use: ``keep_image_tokens`` is set
    image_tokens: int
    kept: int  # of them
    target_operations: int
    operations: int  # at most the target's; one token more would exceed them, unless all are kept

    @property
    def ratio(self) -> float:
        return self.operations / self.target_operations


def equal_cost(
    model: Any,
    target: Fusion,
    anchors: TextAnchors | None = None,
    *,
    text_tokens: int = 50,
    image_tokens: int = 576,
    answer_tokens: int = 0,
) -> EqualCost:
    """The ``keep_image_tokens`` of ``anchors`` (default: `TextAnchors()`) that costs what ``target`` costs.

    model: not fused, on the device "meta". Counted are the prefill of one image and ``text_tokens`` of text and
    ``answer_tokens`` further tokens, each as expensive as the first. Raises ValueError where one kept image token is
    too expensive already.
    """
    anchors = anchors or TextAnchors()
    if anchors.keep_image_tokens is not None or anchors.active_compression is not None:
        raise ValueError(f"the share of image tokens is what is looked for; got {anchors}: leave it and compress out")

    def operations(fusion: Fusion) -> int:
        cost = prompt_cost(model, fusion, text_tokens=text_tokens, image_tokens=image_tokens)
        return total(cost, answer_tokens)

    def keeping(count: int) -> TextAnchors:
        return dataclasses.replace(anchors, keep_image_tokens=count / image_tokens)

    limit = operations(target)
    # Attention grows with the square of the length, all else in step with it: three counts tell all of them.
    known = {count: operations(keeping(count)) for count in {1, (image_tokens + 1) // 2, image_tokens}}
    low = sum(_interpolated(known, count) <= limit for count in range(1, image_tokens + 1))
    if not low:
        raise ValueError(
            f"{target.name} takes {limit:,} operations, and insertion takes {operations(keeping(1)):,} with a single "
            f"image token beside {text_tokens} of text: no share of image tokens is as cheap"
        )
    chosen = keeping(low)
    return EqualCost(target, chosen, image_tokens, low, limit, operations(chosen))


def _interpolated(known: dict[int, int], count: int) -> Fraction:
    """The polynomial through ``known`` at ``count`` (Lagrange)."""
    value = Fraction(0)
    for place, height in known.items():
        term = Fraction(height)
        for other in known:
            if other != place:
                term *= Fraction(count - other, place - other)
        value += term
    return value


def total(cost: PromptCost, answer_tokens: int) -> int:
    """Operations of a prompt and an answer."""
    return cost.prefill + answer_tokens * cost.decode
