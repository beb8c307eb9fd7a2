"""The fused order of AttAnchor (Algorithm 1), without a loop over tokens: one sort by (host column, rank)."""

from __future__ import annotations

import torch
from torch import Tensor

from crossfuse.fusions.anchors.similarity import best_partner
from crossfuse.sequence import Layout, interleave

COPY_ORDERS = ("algorithm", "prompt")


def order_with_copies(
    valid: Tensor,
    copied: Tensor,
    stands_after: Tensor,
    inserted: Tensor,
    copy_order: str,
    pauses_after: Tensor | None = None,
) -> Layout:
    """Real tokens in their order, and a copy of each inserted token directly after the token it stands after.

    valid (B, L) bool; copied, stands_after (B, K) long columns; inserted (B, K) bool. Taken literally, the algorithm
    inserts one token after the other directly behind the host, so a later token lands closer to it: copies on one
    host stand in reverse order (``copy_order="algorithm"``); ``"prompt"`` keeps the prompt's. pauses_after (B, P) long:
    hosts of pause tokens, -1 for none; they stand behind all copies and have source L (the layout's extra token).
    """
    length = valid.shape[1]
    rank = length - copied if copy_order == "algorithm" else copied + 1
    if pauses_after is not None:
        copied = torch.cat([copied, torch.full_like(pauses_after, length)], 1)
        stands_after = torch.cat([stands_after, pauses_after], 1)
        inserted = torch.cat([inserted, pauses_after >= 0], 1)
        rank = torch.cat([rank, torch.full_like(pauses_after, length + 1)], 1)
    return interleave(valid, copied, stands_after, rank, inserted)


def text_into_image(
    image_tokens: Tensor, text_tokens: Tensor, threshold: float, copy_order: str = "algorithm"
) -> Tensor:
    """AttAnchor, text into image, as a pure function: the fused order of one sample.

    image_tokens (M, d), text_tokens (N, d), any float dtype -> long indices into ``cat([image_tokens, text_tokens])``.
    ``threshold`` >= 1 inserts nothing.
    """
    is_image = _first(len(image_tokens), len(text_tokens), image_tokens)
    embeds = torch.cat([image_tokens, text_tokens])[None]
    return _order(embeds, ~is_image, is_image, threshold, copy_order, 0)


def image_into_text(
    image_tokens: Tensor, text_tokens: Tensor, threshold: float, copy_order: str = "algorithm", pause_tokens: int = 0
) -> Tensor:
    """AttAnchor, image into text: as `text_into_image`, with image tokens copied behind the text token they resemble.

    ``pause_tokens`` pause tokens end the prompt; their index is -1.
    """
    is_image = _first(len(image_tokens), len(text_tokens), image_tokens)
    embeds = torch.cat([image_tokens, text_tokens])[None]
    return _order(embeds, is_image, ~is_image, threshold, copy_order, pause_tokens)


def _first(count: int, others: int, like: Tensor) -> Tensor:
    return (torch.arange(count + others, device=like.device) < count)[None]


def _order(embeds: Tensor, seekers: Tensor, partners: Tensor, threshold: float, copy_order: str, pauses: int) -> Tensor:
    best = best_partner(embeds, seekers, partners)
    inserted = (best.cosine >= threshold) & (best.partner >= 0) & (threshold < 1)
    last = embeds.shape[1] - 1
    pauses_after = torch.full((1, pauses), last, device=embeds.device) if pauses else None
    layout = order_with_copies(torch.ones_like(seekers), best.column, best.partner, inserted, copy_order, pauses_after)
    return torch.where(layout.source[0] > last, -1, layout.source[0])
