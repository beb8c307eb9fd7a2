"""Do anchors land on what the word names? Against images shuffled between questions, and against chance."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from crossfuse.analysis.word_patches import with_images, word_patches
from crossfuse.data.records import Record
from crossfuse.evaluation.scoring import Difference, other_images, paired_difference, wilson_interval
from crossfuse.fusions.anchors.explain import anchor_sequence


@dataclasses.dataclass(frozen=True)
class AnchorPrecision:
    """Over words of prompts that name something in their image: does the image token of highest cosine show it?"""

    words: int
    hits: int
    shuffled_hits: int  # the same with the image of another question; the object's place stays that of the own image
    chance: float  # mean share of the image that the named object covers
    copied_words: int  # words whose best cosine reaches the threshold
    copied_hits: int
    mean_best_cosine: float
    mean_shuffled_cosine: float
    difference: Difference  # hits minus shuffled hits, 95 %

    @property
    def precision(self) -> float:
        return self.hits / self.words

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval of the precision."""
        return wilson_interval(self.hits, self.words)


@torch.no_grad()
def anchor_precision(
    model: Any, processor: Any, records: list[Record], batch: dict[str, Any], threshold: float = 0.0, seed: int = 0
) -> AnchorPrecision:
    """Measure it on records with meta spans, one image each, all of one grid (`crossfuse.analysis.word_patches`).

    batch: ``Collator(processor, prompt_only=True)(records)``. Raises ValueError without named words, and for grids that
    differ (another question's image could not be compared).
    """
    sequence, _ = anchor_sequence(model, batch)
    placed = list(with_images(records))
    if len(placed) < 2:
        raise ValueError(f"shuffling images between questions needs at least 2 of them; got {len(placed)}")
    grids = {sequence.image_grids[image] for _, image, _ in placed}
    if len(grids) != 1 or None in grids:
        raise ValueError(f"precision is compared between images of one grid; got {sorted(map(str, grids))}")
    grid: Any = grids.pop()
    units = [
        torch.nn.functional.normalize(sequence.embeds[row][sequence.is_image[row]].float(), dim=-1)
        for row, _, _ in placed
    ]
    others = other_images(range(len(placed)), seed=seed)
    hits: list[bool] = []
    shuffled: list[bool] = []
    copied: list[bool] = []
    chance, best, other_best = 0.0, 0.0, 0.0
    for n, (row, _, record) in enumerate(placed):
        labels = word_patches(processor, record, sequence.input_ids[row], grid)
        for column, shown in zip(labels.columns, labels.shown, strict=True):
            word = torch.nn.functional.normalize(sequence.embeds[row, column].float(), dim=-1)
            own, other = units[n] @ word, units[others[n]] @ word
            hits.append(bool(shown[own.argmax()]))
            shuffled.append(bool(shown[other.argmax()]))
            copied.append(bool(own.max() >= threshold))
            chance += float(shown.float().mean())
            best += float(own.max())
            other_best += float(other.max())
    if not hits:
        raise ValueError("no record names an object with its box; give records with meta spans")
    return AnchorPrecision(
        words=len(hits),
        hits=sum(hits),
        shuffled_hits=sum(shuffled),
        chance=chance / len(hits),
        copied_words=sum(copied),
        copied_hits=sum(h for h, c in zip(hits, copied, strict=True) if c),
        mean_best_cosine=best / len(hits),
        mean_shuffled_cosine=other_best / len(hits),
        difference=paired_difference(hits, shuffled),
    )
