"""Will anchors help here? AttAnchor's three failure conditions, measured on a model and its data.

1. Cosines lie uniformly below τ: nothing is copied. 2. Cosines are not tied to meaning: a word is copied wherever, as
it would be with another image. 3. Attention is well placed already: the text attends to its image token anyway.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from crossfuse.analysis.anchor_precision import AnchorPrecision, anchor_precision
from crossfuse.analysis.attention_scores import attended
from crossfuse.analysis.threshold import best_of_random
from crossfuse.data.collate import Collator
from crossfuse.data.records import Record
from crossfuse.evaluation.scoring import other_images
from crossfuse.fusions.anchors.explain import anchor_sequence, match_prompt

LEAST_SHARE = 0.01
WELL_PLACED = 2.0


@dataclasses.dataclass(frozen=True)
class Finding:
    """One condition: is it met (then anchors will hardly help), the numbers, and what they mean."""

    name: str
    met: bool
    numbers: dict[str, float]
    sentence: str


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    findings: tuple[Finding, ...]
    precision: AnchorPrecision | None  # where records name objects with boxes

    @property
    def promising(self) -> bool:
        """True where none of the conditions is met."""
        return not any(finding.met for finding in self.findings)


@torch.no_grad()
def diagnose(
    model: Any, processor: Any, records: list[Record], threshold: float, *, attention_samples: int = 16
) -> Diagnosis:
    """Measure the three conditions for ``threshold`` on records with one image each.

    model: unfused or fused with `TextAnchors`; it is left as it was. Raises ValueError for fewer than 2 records with an
    image.
    """
    from crossfuse.api import fuse, fusion_of, unfuse

    chosen = [record for record in records if len(record.images) == 1]
    if len(chosen) < 2:
        raise ValueError(f"a diagnosis needs at least 2 records with one image each; got {len(chosen)}")
    fusion = fusion_of(model)
    if fusion is not None:
        unfuse(model)
    try:
        batch = Collator(processor, prompt_only=True)(chosen)
        findings = (
            _below(model, batch, threshold),
            _meaning(model, batch, len(chosen)),
            _attention(model, processor, chosen[:attention_samples]),
        )
        precision = None
        if any(record.meta.get("spans") for record in chosen):
            precision = anchor_precision(model, processor, chosen, batch, threshold)
    finally:
        if fusion is not None:
            fuse(model, fusion)
    return Diagnosis(findings, precision)


def _below(model: Any, batch: dict[str, Any], threshold: float) -> Finding:
    sequence, best, _ = match_prompt(model, batch)
    values = best.cosine[best.partner >= 0]
    share = float((values >= threshold).float().mean())
    tokens = sum(sequence.image_lengths) / len(sequence.image_lengths)
    noise = best_of_random(sequence.embeds.shape[-1], tokens)
    met = share < LEAST_SHARE
    sentence = (
        f"{share:.1%} of {len(values)} prompt tokens reach τ = {threshold:.3f}; their best cosine is "
        f"{float(values.median()):.3f} "
        f"in the median and {float(values.max()):.3f} at most; unrelated vectors of this width reach {noise:.3f}. "
    )
    sentence += "Hardly anything would be copied: lower τ or use share=0.10." if met else "Enough tokens are copied."
    if not met and threshold < noise:
        sentence += " τ lies below what chance gives: many copies will mean nothing."
    numbers = {"share": share, "median": float(values.median()), "maximum": float(values.max()), "noise_floor": noise}
    return Finding("cosines below the threshold", met, numbers, sentence)


def _meaning(model: Any, batch: dict[str, Any], samples: int) -> Finding:
    """Best cosine of each prompt token in its own image and in another question's: a paired difference."""
    sequence, _ = anchor_sequence(model, batch)
    unit = torch.nn.functional.normalize(sequence.embeds.float(), dim=-1)
    others = other_images(range(samples))
    special = torch.tensor(sequence.special_ids, device=unit.device)
    gaps = []
    for row in range(samples):
        words = sequence.valid[row] & ~sequence.is_image[row] & ~torch.isin(sequence.input_ids[row], special)
        own = (unit[row, words] @ unit[row, sequence.is_image[row]].T).amax(1)
        other = (unit[row, words] @ unit[others[row], sequence.is_image[others[row]]].T).amax(1)
        gaps.append(float((own - other).mean()))
    values = torch.tensor(gaps)
    mean = float(values.mean())
    half = 1.96 * float(values.std(correction=1)) / math.sqrt(samples)
    met = mean - half <= 0
    sentence = (
        f"A prompt token's best cosine is {mean:+.4f} [{mean - half:+.4f}, {mean + half:+.4f}] higher in its own "
        f"image than in "
        "another question's. "
    )
    sentence += (
        "Cosines do not depend on what is in the image: train with the alignment loss first."
        if met
        else "Cosines depend on what is in the image."
    )
    return Finding(
        "cosines not tied to meaning", met, {"difference": mean, "low": mean - half, "high": mean + half}, sentence
    )


def _attention(model: Any, processor: Any, records: list[Record]) -> Finding:
    """Attention of prompt tokens to their best image token over the mean image token, in the unfused model."""
    ratios = []
    for record in records:
        single = Collator(processor, prompt_only=True)([record])
        run = attended(model, single)
        _, best, _ = match_prompt(model, single)
        images = [run.original(c) for c in run.sequence.is_image[0].nonzero()[:, 0].tolist()]
        for column, partner in zip(best.column[0].tolist(), best.partner[0].tolist(), strict=True):
            row = run.original(column) if column >= 0 and partner >= 0 else -1
            if row < max(images):
                continue
            target = images.index(run.original(partner))
            masses = torch.stack([layer.mass(row)[:, images] for layer in run.layers])
            ratios.append(float(masses[..., target].mean() / masses.mean()))
    if not ratios:
        raise ValueError("no prompt token stands behind its image, so attention to it cannot be measured")
    ratio = float(torch.tensor(ratios).mean())
    met = ratio >= WELL_PLACED
    sentence = (
        f"Without anchors a prompt token already pays its best image token {ratio:.2f} times the attention of a "
        f"mean image "
        "token. "
    )
    sentence += "There is little left to gain." if met else "Anchors have something to add."
    return Finding("attention well placed already", met, {"ratio": ratio, "tokens": float(len(ratios))}, sentence)
