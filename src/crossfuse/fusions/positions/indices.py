"""The two indices of ModalityRoPE (AttAnchor, App. J.2): the position inside a modality, the ordinal of the modality.

Shape legend: B rows, L tokens, R position rows (1, or 3 under m-RoPE), M modalities, S samples of a packed row.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from crossfuse.sequence import MultimodalSequence, count_positions

TEXT, IMAGE, VIDEO = MODALITIES = (0, 1, 2)
_LATER = 2**31  # a column behind all others


@dataclasses.dataclass(eq=False)
class ModalityIndices:
    """Both indices of every token; what stands at padding means nothing."""

    within: Tensor  # (R, B, L) long: position inside the modality
    ordinal: Tensor  # (B, L) long: 0 for the modality that the sample starts with, 1 for the next ...
    modality: Tensor  # (B, L) long: TEXT, IMAGE or VIDEO

    def packed(self) -> Tensor:
        """(B, L, 1, R + 2) long, as the cache keeps it: one vector a token."""
        return torch.cat([self.within, self.ordinal[None], self.modality[None]]).permute(1, 2, 0).unsqueeze(2)

    @classmethod
    def unpacked(cls, packed: Tensor) -> ModalityIndices:
        rows = packed.squeeze(2).permute(2, 0, 1)
        return cls(rows[:-2], rows[-2], rows[-1])


def modality_indices(
    sequence: MultimodalSequence,
    rows: int = 1,
    past: ModalityIndices | None = None,
    past_mask: Tensor | None = None,
) -> ModalityIndices:
    """Indices of this call's tokens, on ``rows`` position rows (3 under m-RoPE).

    They go on from those of the cache, of which ``past_mask`` (B, P) are real.

    Within a modality, tokens are counted; under m-RoPE image and video tokens keep their grid, and each grid starts
    behind the largest index of the one before. Samples of a packed row are counted apart.
    """
    modality = modalities(sequence)
    start = torch.zeros(len(MODALITIES), len(modality), dtype=torch.long, device=modality.device)
    first = _first_columns(sequence, modality)
    if past is not None and past_mask is not None:
        for m in MODALITIES:
            seen = (past.modality == m) & past_mask
            start[m] = torch.where(seen, past.within.amax(0), -1).amax(1) + 1
            earlier = torch.where(seen, past.ordinal, -1).amax(1, keepdim=True)  # one ordinal a modality
            first[m] = torch.where(earlier >= 0, earlier - len(MODALITIES), first[m])
    earlier_modalities = (first[None] < first[:, None]).sum(1)  # (M, B, S)
    owner = sequence.segment_index
    ordinals = torch.stack([earlier_modalities[m].gather(1, owner) for m in MODALITIES])
    ordinal = ordinals.gather(0, modality[None])[0]
    user = sequence.user_positions()
    if user.ndim == 3 and sequence.image_features is not None:
        within = _grids_in_turn(sequence, user, modality)
    else:
        within = torch.zeros(rows, *modality.shape, dtype=torch.long, device=modality.device)
    for m in MODALITIES:
        mine = (modality == m) & sequence.valid
        if m == TEXT or user.ndim == 2:
            counted = count_positions(mine, sequence.segments)
            within = torch.where(mine, counted, within)
        within = torch.where(mine, within + start[m][:, None], within)
    return ModalityIndices(within, ordinal, modality)


def modalities(sequence: MultimodalSequence) -> Tensor:
    """(B, L) long; padding counts as text."""
    modality = torch.zeros_like(sequence.input_ids)
    if sequence.image_features is None:
        return modality
    kinds = torch.tensor([VIDEO if video else IMAGE for video in sequence.is_video], device=modality.device)
    lengths = torch.tensor(sequence.image_lengths, device=modality.device)
    return modality.masked_scatter(sequence.is_image, kinds.repeat_interleave(lengths))


def _first_columns(sequence: MultimodalSequence, modality: Tensor) -> Tensor:
    """(M, B, S) long: the column where each modality first appears in a sample; `_LATER` where it does not."""
    owner = sequence.segment_index
    columns = torch.arange(modality.shape[1], device=modality.device).expand_as(modality)
    samples = int(owner.max()) + 1 if owner.numel() else 1
    empty = torch.full((len(modality), samples), _LATER, dtype=torch.long, device=modality.device)
    mine = [(modality == m) & sequence.valid for m in MODALITIES]
    return torch.stack([empty.scatter_reduce(1, owner, torch.where(m, columns, _LATER), reduce="amin") for m in mine])


def _grids_in_turn(sequence: MultimodalSequence, user: Tensor, modality: Tensor) -> Tensor:
    """(3, B, L): the grids of each sample's images one behind the other, and the same for its videos; 0 at text."""
    lengths = torch.tensor(sequence.image_lengths, device=user.device)
    item = torch.arange(len(lengths), device=user.device).repeat_interleave(lengths)
    row, column = sequence.is_image.nonzero(as_tuple=True)
    grid = user[:, row, column]
    low = torch.full_like(lengths, _LATER).scatter_reduce(0, item, grid.amin(0), reduce="amin")
    high = torch.full_like(lengths, -1).scatter_reduce(0, item, grid.amax(0), reduce="amax")
    begins = lengths.cumsum(0) - lengths
    group = torch.stack([row, sequence.segment_index[row, column], modality[row, column]])[:, begins]
    same = (group[:, :, None] == group[:, None]).all(0)
    before = torch.ones_like(same).tril(-1) & same
    offset = (before * (high - low + 1)).sum(1)
    placed = grid - low[item] + offset[item]
    within = torch.zeros_like(user)
    within[:, row, column] = placed
    return within
