"""Pruning of image tokens by their likeness to the prompt (AttAnchor, future work): a shorter sequence, for real.

The matching that anchors make anyway tells which image tokens resemble some word of the prompt; the others are left out
of the fused sequence, so that prefill and cache shrink. No attention weights are needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from crossfuse.fusions.anchors.similarity import best_partner

if TYPE_CHECKING:
    from crossfuse.sequence import MultimodalSequence


def check_kept_share(share: float | None) -> None:
    """ValueError unless None or above 0 and at most 1."""
    if share is not None and (isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1):
        raise ValueError(f"keep_image_tokens must be above 0 and at most 1 (None keeps all); got {share!r}")


def pruned_image_tokens(
    sequence: MultimodalSequence, texts: Tensor, images: Tensor, anchored: Tensor, share: float
) -> Tensor:
    """(B, L) bool: image tokens to leave out.

    Of each image of n tokens the ``ceil(share * n)`` of highest cosine to any candidate text token of the same sample
    stay (the first ones on ties), and every ``anchored`` one besides. texts, images, anchored (B, L) bool:
    candidates, and image tokens that carry an anchor. Images outside the candidates, and images of a sample without
    candidate text, stay whole.
    """
    best = best_partner(sequence.embeds, images, texts, sequence.segments)
    nothing = torch.full_like(sequence.embeds[..., 0], torch.inf, dtype=torch.float32)
    scores = torch.where(best.partner >= 0, best.cosine, torch.inf)
    # Padding slots of `best` point at a column past the end, which is cut off again.
    column = torch.where(best.column >= 0, best.column, sequence.is_image.shape[1])
    likeness = torch.nn.functional.pad(nothing, (0, 1)).scatter(1, column, scores)[:, :-1]
    flat = likeness[sequence.is_image]  # (N,) in reading order; inf where the token stays whatever the others are
    lengths = torch.tensor(sequence.image_lengths, device=flat.device)
    item = torch.repeat_interleave(torch.arange(len(lengths), device=flat.device), lengths)
    order = flat.argsort(descending=True, stable=True)
    order = order[item[order].argsort(stable=True)]  # by image, then by falling likeness
    starts = lengths.cumsum(0) - lengths
    place = torch.arange(len(flat), device=flat.device) - starts[item]
    quota = torch.ceil(lengths * share - 1e-6).long().clamp(min=1)
    kept = torch.empty_like(flat, dtype=torch.bool)
    kept[order] = place < quota[item]
    kept |= torch.isinf(flat)
    pruned = torch.zeros_like(sequence.is_image).masked_scatter(sequence.is_image, ~kept)
    return pruned & ~anchored
