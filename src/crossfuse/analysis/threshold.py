"""Choosing τ: the threshold at which a wanted share of the prompt's tokens is copied (AttAnchor: about 10 %)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from statistics import NormalDist
from typing import Any, overload

import torch
from torch import Tensor

from crossfuse.analysis.threshold_fit import ThresholdFit, fit_threshold, joined
from crossfuse.fusion import make_fusion
from crossfuse.fusions.anchors.explain import match_prompt
from crossfuse.sequence import MultimodalSequence


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A threshold, what it was calibrated to, and what chance alone would give."""

    threshold: float  # τ
    share: float  # share of candidate tokens asked for
    achieved: float  # share that reaches τ on the calibration data
    noise_floor: float  # median of the best cosine of unrelated vectors of this width and image size
    noise_share: float  # share of unrelated tokens that would reach τ
    n_tokens: int  # candidate tokens seen
    n_samples: int
    direction: str = "text-anchors"  # or "image-anchors", on a model that is fused so

    def fusion(self, **fields: Any) -> Any:
        """`TextAnchors` (or `ImageAnchors`) with this threshold, which remembers the share."""
        return make_fusion(self.direction, threshold=self.threshold, share=self.share, **fields)


@overload
def calibrate_threshold(model: Any, batches: Iterable[dict[str, Any]], share: float | None = None) -> Calibration: ...
@overload
def calibrate_threshold(
    model: Any, batches: Iterable[dict[str, Any]], share: None = None, *, pairs: Iterable[tuple[Tensor, Tensor]]
) -> ThresholdFit: ...
def calibrate_threshold(
    model: Any,
    batches: Iterable[dict[str, Any]],
    share: float | None = None,
    *,
    pairs: Iterable[tuple[Tensor, Tensor]] | None = None,
) -> Calibration | ThresholdFit:
    """τ such that ``share`` (0.10) of the candidate text tokens have an image token of cosine >= τ.

    ``batches`` are a processor's outputs (input_ids, attention_mask, pixel_values; labels bound the prompt). The
    threshold lies midway between the two neighbouring cosines, away from rounding. Raises ValueError without data.

    With ``pairs``, (cosines, related) of labelled (text token, image token) pairs as `labelled_cosines` in
    `crossfuse.analysis.word_patches` makes them, the batches are not read: the result is the `ThresholdFit` of
    `crossfuse.analysis.threshold_fit`, τ of the highest F1.
    """
    if pairs is not None:
        if share is not None:
            raise ValueError("give share or pairs, not both: a share copies so many tokens, pairs maximise F1")
        return fit_threshold(*joined(list(pairs)))
    share = 0.10 if share is None else share
    if not isinstance(share, (int, float)) or math.isnan(share) or not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1 (0.1 copies a tenth of the tokens); got {share}")
    cosines, lengths, width, samples, direction = [], [], 0, 0, "text-anchors"
    for batch in batches:
        sequence, best, fusion = match_prompt(model, batch)
        direction = fusion.name
        cosines.append(best.cosine[best.partner >= 0].float().cpu())
        lengths += partner_counts(sequence, direction)
        width = sequence.embeds.shape[-1]
        samples += len(sequence.input_ids)
    values = torch.cat(cosines).sort(descending=True).values if cosines else torch.zeros(0)
    if not len(values):
        raise ValueError("no prompt token stands beside an image in the calibration data; give samples with images")
    count = min(max(round(share * len(values)), 1), len(values))
    upper = float(values[count - 1])
    lower = float(values[count]) if count < len(values) else upper - 1e-3
    threshold = min(max((upper + lower) / 2, 0.0), 1 - 1e-6)
    tokens = sum(lengths) / len(lengths)
    return Calibration(
        threshold=threshold,
        share=float(share),
        achieved=float((values >= threshold).float().mean()),
        noise_floor=best_of_random(width, tokens),
        noise_share=1 - NormalDist().cdf(threshold * math.sqrt(width)) ** tokens,
        n_tokens=len(values),
        n_samples=samples,
        direction=direction,
    )


def partner_counts(sequence: MultimodalSequence, direction: str) -> list[int]:
    """Among how many tokens a candidate chooses: those of an image, or (``"image-anchors"``) the words of a prompt."""
    if direction == "text-anchors":
        return sequence.image_lengths
    words = sequence.valid & ~sequence.is_image
    if sequence.prompt_mask is not None:
        words = words & sequence.prompt_mask
    counts: list[int] = words.sum(1).tolist()
    return counts


def best_of_random(width: int, image_tokens: float) -> float:
    """Median of the largest of ``image_tokens`` cosines between unrelated vectors of ``width`` dimensions.

    A cosine of random directions is close to normal with variance 1 / width. Report it beside every threshold: below
    it, τ copies tokens that resemble nothing.
    """
    return NormalDist().inv_cdf(0.5 ** (1 / max(image_tokens, 1))) / math.sqrt(width)
