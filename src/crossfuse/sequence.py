"""The sequence before and after a fusion: `MultimodalSequence` -> `Layout` -> `FusedInputs`.

Shapes: B rows, L tokens as the user wrote them, F fused positions, N image tokens of the whole batch, d model width.
Every fused position has a *host*, the original token that it belongs to (a copy: the token that it stands after).
Fused rows are left-padded, whatever the padding of the input, so the last column is always a real token.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(eq=False)
class MultimodalSequence:
    """What came in with one call (the whole prompt, or the part that follows a cache)."""

    input_ids: Tensor  # (B, L) long
    embeds: Tensor  # (B, L, d): token embeddings, image tokens in their places
    valid: Tensor  # (B, L) bool: real tokens; padding and placeholders without a feature are not
    is_image: Tensor  # (B, L) bool, part of `valid`
    image_features: Tensor | None  # (N, d), in reading order over the whole batch
    image_lengths: list[int]  # tokens of each image, sum N
    is_video: list[bool]  # of each image
    image_grids: list[tuple[int, int] | None]  # (rows, columns) of each image
    image_frames: list[int] | None  # of each image, where compression has counted them; None: positions tell
    position_ids: Tensor | None  # (B, L) or (3, B, L): the user's
    start: Tensor  # (B,) long: position of the first token of this call
    segments: Tensor | None = None  # (B, L) long: samples of a packed row, -1 for padding
    anchor_mask: Tensor | None = None  # (B, L) bool: text that may be copied
    prompt_mask: Tensor | None = None  # (B, L) bool: what stands before the first answer
    answer_starts: Tensor | None = None  # (B, L) bool: first supervised token of every answer
    special_ids: tuple[int, ...] = ()
    dummy_features: Tensor | None = None  # (n, d) of a blank image, in training steps without images

    @property
    def segment_index(self) -> Tensor:
        """(B, L) long: number of the sample inside its row, 0 where rows are not packed."""
        return torch.zeros_like(self.input_ids) if self.segments is None else self.segments.clamp(min=0)

    def user_positions(self) -> Tensor:
        """(B, L) or (3, B, L): the positions that the unfused model would use."""
        if self.position_ids is not None:
            return self.position_ids
        return count_positions(self.valid, self.segments) + self.start[:, None]

    def following_position(self) -> Tensor:
        """(B,) position of the token after this call, in the unfused model's counting."""
        last = torch.where(self.valid, self.user_positions(), -1).amax(-1)
        return (last if last.ndim == 1 else last.amax(0)) + 1

    def plain_layout(self) -> Layout:
        """Every real token once, in the order of the input."""
        rows, length = self.input_ids.shape
        source = torch.arange(length, device=self.input_ids.device).expand(rows, length)
        if not bool(self.valid.all()):
            source = left_padded(source, self.valid)
        layout = Layout(source=source, host=source)
        if self.position_ids is not None and self.position_ids.ndim == 3:  # the grids of images cannot be counted
            layout.position_ids = gather_by(self.position_ids, source).clamp(min=0)
            layout.next_position = self.following_position()
        return layout


@dataclasses.dataclass(eq=False)
class Layout:
    """The fused order as indices into the input; -1 is padding, and padding comes first in a row."""

    source: Tensor  # (B, F) long: which input token stands here
    host: Tensor  # (B, F) long, ascending: the original token that this position belongs to
    position_ids: Tensor | None = None  # (B, F) or (3, B, F); None: counted
    next_position: Tensor | None = None  # (B,); None: counted
    extra_token_ids: tuple[int, ...] = ()  # tokens that the input does not hold: source L + i is the i-th of them


@dataclasses.dataclass(eq=False)
class FusedInputs:
    """What the decoder sees, and how to read its output back in the user's order."""

    sequence: MultimodalSequence
    layout: Layout
    inputs_embeds: Tensor  # (B, F, d)
    attention_mask: Tensor  # (B, F) bool
    position_ids: Tensor  # (B, F) or (3, B, F) long
    next_position: Tensor  # (B,) long: position of the token that follows
    readout: Tensor  # (B, L) long: fused position whose state predicts token j + 1; -1 where there is none
    plain_tail: int  # trailing columns that are the same tokens before and after, in every row

    def gather(self, hidden: Tensor) -> Tensor:
        """(B, F, d) states -> (B, L, d) by `readout`; zeros where nothing precedes."""
        readout = self.readout.to(hidden.device)
        missing = readout < 0
        rows = gather_rows(hidden, readout.clamp(min=0))
        return rows.masked_fill(missing[..., None], 0) if bool(missing.any()) else rows


def fuse_inputs(sequence: MultimodalSequence, layout: Layout, extra: Tensor | None = None) -> FusedInputs:
    """Gather embeddings, masks and positions into the fused order; ``extra`` (E, d) are the layout's extra tokens."""
    source, host = layout.source, layout.host
    real = host >= 0
    table = sequence.embeds
    if extra is not None and len(extra):
        table = torch.cat([table, extra.to(table).expand(len(table), -1, -1)], 1)
    embeds = gather_rows(table, source.clamp(min=0))
    if not bool(real.all()):
        embeds = embeds.masked_fill(~real[..., None], 0)
    position_ids, next_position = layout.position_ids, layout.next_position
    if position_ids is None:
        segments = None if sequence.segments is None else gather_by(sequence.segments, host)
        position_ids = count_positions(real, segments) + sequence.start[:, None]
        next_position = sequence.start + real.sum(1)
    assert next_position is not None
    return FusedInputs(
        sequence=sequence,
        layout=layout,
        inputs_embeds=embeds,
        attention_mask=real,
        position_ids=position_ids,
        next_position=next_position,
        readout=readout(host, sequence.input_ids.shape[1]),
        plain_tail=_plain_tail(source, sequence.input_ids.shape[1]),
    )


def readout(host: Tensor, length: int) -> Tensor:
    """(B, F) ascending hosts -> (B, L): the last fused position whose host is an original token <= j, or -1."""
    columns = torch.arange(length, device=host.device).expand(host.shape[0], length).contiguous()
    last = torch.searchsorted(host.contiguous(), columns, right=True) - 1
    padding = (host < 0).sum(1, keepdim=True)
    return torch.where(last >= padding, last, -1)


def left_padded(values: Tensor, keep: Tensor, key: Tensor | None = None) -> Tensor:
    """(B, K) values where ``keep``, ordered by ``key`` (default: as they stand), as (B, F), -1 in front."""
    if key is None:
        key = torch.arange(values.shape[1], device=values.device).expand_as(values)
    key = torch.where(keep, key, -1)
    longest = int(keep.sum(1).max()) if keep.numel() else 0
    order = key.argsort(dim=1, stable=True)[:, values.shape[1] - longest :]
    return torch.where(keep.gather(1, order), values.gather(1, order), -1)


def interleave(keep: Tensor, sources: Tensor, hosts: Tensor, ranks: Tensor, inserted: Tensor) -> Layout:
    """The kept tokens in their order, and every inserted one behind its host, by rank.

    keep (B, L) bool; sources, hosts (columns), ranks (1 to L + 1), inserted: (B, K). One sort by (host, rank).
    """
    rows, length = keep.shape
    columns = torch.arange(length, device=keep.device).expand(rows, length)
    stride = length + 2
    key = torch.cat([columns * stride, hosts * stride + ranks], 1)
    order = left_padded(
        torch.arange(key.shape[1], device=key.device).expand_as(key), torch.cat([keep, inserted], 1), key
    )
    real, pick = order >= 0, order.clamp(min=0)
    source = torch.where(real, torch.cat([columns, sources], 1).gather(1, pick), -1)
    return Layout(source=source, host=torch.where(real, torch.cat([columns, hosts], 1).gather(1, pick), -1))


def gather_rows(table: Tensor, index: Tensor) -> Tensor:
    """(B, L, d) rows at (B, F) indices. Whole vectors are copied, which a gather by element does many times slower."""
    rows, length, width = table.shape
    flat = index + torch.arange(rows, device=index.device)[:, None] * length
    return table.reshape(rows * length, width).index_select(0, flat.flatten()).view(*index.shape, width)


def gather_by(values: Tensor, index: Tensor) -> Tensor:
    """(..., B, L) values at (B, F) indices; index -1 gives -1."""
    expanded = index.clamp(min=0).expand(*values.shape[:-2], *index.shape)
    return torch.where(index >= 0, values.gather(-1, expanded), -1)


def count_positions(real: Tensor, segments: Tensor | None = None) -> Tensor:
    """(B, K) bool -> (B, K) long: 0, 1, 2 ... over real tokens, restarting at each segment; padding repeats."""
    count = real.cumsum(1)
    if segments is not None:
        before = torch.nn.functional.pad(segments[:, :-1], (1, 0), value=-2)
        count = count - torch.where(segments != before, count - real.long(), 0).cummax(1).values
    return (count - 1).clamp(min=0)


def triples(position_ids: Tensor | None, rows: int) -> Tensor | None:
    """Positions as transformers passes them -> (3, B, L) of m-RoPE, or (B, L)."""
    if position_ids is None:
        return None
    if position_ids.shape[0] == 4 and position_ids.ndim == 3:
        position_ids = position_ids[1:]  # the first row is transformers' text-only counter
    if position_ids.shape[-2] == 1:
        position_ids = position_ids.expand(*position_ids.shape[:-2], rows, -1)
    return position_ids


def restarted(positions: Tensor, segments: Tensor) -> Tensor:
    """(3, B, K) positions counted over a packed row -> each sample's own, which start at 0 on all three axes."""
    before = torch.nn.functional.pad(segments[:, :-1], (1, 0), value=-2)
    columns = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    first = torch.where(segments != before, columns, 0).cummax(1).values
    return positions - positions.gather(-1, first.expand_as(positions))


def packed_segments(position_ids: Tensor) -> Tensor | None:
    """Samples of a row whose positions restart, as transformers reads them; None where nothing restarts."""
    restarts = torch.nn.functional.pad(position_ids.diff(dim=-1) != 1, (1, 0))
    return restarts.cumsum(-1) if bool(restarts.any()) else None


def block_causal_mask(segments: Tensor, eager_dtype: torch.dtype | None) -> Tensor:
    """(B, F) segments -> (B, 1, F, F): causal inside a segment. Bool, or additive in ``eager_dtype``.

    Padding (-1) sees itself, so that no row is without keys.
    """
    length = segments.shape[1]
    same = segments[:, :, None] == segments[:, None, :]
    mask = (same & torch.ones(length, length, dtype=torch.bool, device=segments.device).tril())[:, None]
    if eager_dtype is None:
        return mask
    bias = torch.zeros(mask.shape, dtype=eager_dtype, device=mask.device)
    return bias.masked_fill(~mask, torch.finfo(eager_dtype).min)


def _plain_tail(source: Tensor, length: int) -> int:
    """How many trailing columns hold the same token before and after the fusion, in every row."""
    shared = min(source.shape[1], length)
    if not shared:
        return 0
    wanted = torch.arange(length - shared, length, device=source.device)
    same = (source[:, -shared:] == wanted).all(0)
    return int(same.flip(0).cumprod(0).sum())
