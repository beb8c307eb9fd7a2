"""Best partner of each token in the other modality, by cosine in float32.

Legend: B rows, K candidates that look for a partner, M candidates that are looked at, d width.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from crossfuse.sequence import gather_by, gather_rows, left_padded


@dataclasses.dataclass(frozen=True, eq=False)
class BestPartner:
    """For each of K candidates: its column, the column of its best partner and the cosine."""

    column: Tensor  # (B, K) long, -1 where the row has fewer candidates
    partner: Tensor  # (B, K) long, -1 where there is none
    cosine: Tensor  # (B, K) float32, -1 where there is none


def best_partner(embeds: Tensor, seekers: Tensor, partners: Tensor, segments: Tensor | None = None) -> BestPartner:
    """For every seeker the partner of highest cosine in its own row (and segment); the first on ties.

    embeds (B, L, d); seekers, partners (B, L) bool; segments (B, L) long or None. A cosine that is not finite never
    wins: it counts as -1. Matching records no gradients (copies are gathers, and gradients flow through those).
    """
    columns = torch.arange(embeds.shape[1], device=embeds.device).expand(embeds.shape[:2])
    seeker, partner = left_padded(columns, seekers), left_padded(columns, partners)
    if not seeker.shape[1] or not partner.shape[1]:
        nothing = torch.full_like(seeker, -1)
        return BestPartner(seeker, nothing, nothing.float())
    with torch.no_grad():
        cosine = cosines(embeds, seeker, partner)
        cosine.masked_fill_(~may_match(seeker, partner, segments), -torch.inf)
        best = cosine.argmax(-1)  # documented: the first of equal maxima
        value = cosine.gather(-1, best[..., None])[..., 0]
    found = torch.isfinite(value)
    chosen = torch.where(found, partner.gather(1, best), -1)
    return BestPartner(seeker, chosen, torch.where(found, value, -1.0))


def may_match(seeker: Tensor, partner: Tensor, segments: Tensor | None) -> Tensor:
    """(B, K, M) bool: both columns are there (not -1), and in one segment where there are segments (B, L)."""
    allowed = (seeker >= 0)[:, :, None] & (partner >= 0)[:, None, :]
    if segments is not None:
        allowed &= gather_by(segments, seeker)[:, :, None] == gather_by(segments, partner)[:, None, :]
    return allowed


def cosines(embeds: Tensor, seeker: Tensor, partner: Tensor) -> Tensor:
    """Columns (B, K) and (B, M) of embeds (B, L, d) -> (B, K, M), in float32 whatever surrounds it; -1 where it is
    not finite. Column -1 gives anything."""
    with torch.autocast(embeds.device.type, enabled=False):
        left, right = (gather_rows(embeds, index.clamp(min=0)).float() for index in (seeker, partner))
        cosine = torch.bmm(left, right.mT)
        # Dividing the products instead of the vectors saves a pass over the image tokens. A zero vector has cosine 0.
        cosine = cosine / (_length(left)[:, :, None] * _length(right)[:, None, :])
    return cosine.nan_to_num_(nan=-1.0, posinf=-1.0, neginf=-1.0)


def _length(vectors: Tensor) -> Tensor:
    return torch.linalg.vector_norm(vectors, dim=-1).clamp(min=1e-12)
