"""Which text sees which image: window numbers and key ranges of every token of one call.

An image run belongs to the window that the next text opens. Windows of a row are numbered from 1 in each call; 0 is
the window that the cache left open (or no image at all). Ranges are found by sorting and `searchsorted`: no loop over
tokens. Shape legend: B rows, L tokens, F fused tokens, S cached image slots a row.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from crossfuse.attention.windows import Windows
from crossfuse.fusions.cross_attention.layout import image_ends
from crossfuse.sequence import FusedInputs, MultimodalSequence, gather_by, left_padded
from crossfuse.streaming.cache import NO_WINDOW, WindowState

if TYPE_CHECKING:
    from crossfuse.fusions.cross_attention.fusion import CrossAttention


@dataclasses.dataclass(eq=False)
class WindowNumbers:
    """(B, L) of every token; see `window_numbers`."""

    text: Tensor  # bool
    before: Tensor  # text tokens of the row up to here; images with equal counts share a window
    changed: Tensor  # bool: the first token of a packed sample
    opens: Tensor  # bool: the first image token of a window
    ordinal: Tensor  # window of this token


def window_numbers(sequence: MultimodalSequence, lengths: list[int], state: WindowState | None) -> WindowNumbers:
    """Windows of one call, from 1; 0 is the one that the cache (``state``) left open. ``lengths``: of each image, or of
    each frame where every frame opens a window."""
    image, length = sequence.is_image, sequence.input_ids.shape[1]
    text = sequence.valid & ~image
    before = text.cumsum(1)
    segment = sequence.segment_index
    changed = segment != pad(segment[:, :-1], (1, 0), value=-1)
    key = torch.where(image, segment * (length + 1) + before, -1)
    opens = image & (key != pad(key.cummax(1).values[:, :-1], (1, 0), value=-1))
    if state is not None:  # a run that the previous call left open goes on
        still_open = (state.image_counts > 0) & (state.since_image == 0)
        opens &= ~(still_open[:, None] & (before == 0))
    if len(lengths) != len(sequence.image_lengths):  # every frame of a video opens a window
        opens |= image & pad(image_ends(sequence, lengths)[:, :-1], (1, 0), value=False)
    return WindowNumbers(text, before, changed, opens, opens.cumsum(1))


class Visibility:
    """Window numbers and key ranges of every token of one call.

    ``steps`` (N,) long: how many positions each image token takes; None: one each.
    """

    def __init__(
        self,
        fusion: CrossAttention,
        fused: FusedInputs,
        state: WindowState | None,
        lengths: list[int],
        steps: Tensor | None = None,
    ):
        sequence, layout = fused.sequence, fused.layout
        self.fusion, self.sequence, self.real = fusion, sequence, fused.attention_mask
        self.rows, self.length = sequence.input_ids.shape
        self.image = sequence.is_image
        self.gist = layout.source >= self.length
        self.lengths, self.steps = lengths, steps
        numbers = window_numbers(sequence, lengths, state)
        self.text, self.before, self.ordinal = numbers.text, numbers.before, numbers.ordinal
        changed, opens, segment = numbers.changed, numbers.opens, sequence.segment_index
        self.text_before = self.before - torch.where(changed, self.before - self.text.long(), 0).cummax(1).values
        oldest = self.ordinal - (self.length + 2**20 if fusion.history is None else fusion.history) + 1
        if sequence.segments is not None:  # images of an earlier sample of the row are out of sight
            own = torch.where(changed, self.ordinal - opens.long(), 0).cummax(1).values
            oldest = torch.maximum(oldest, own + 1)
        self.host = layout.host
        self.query_segment = gather_by(segment, layout.host)
        self.query_window = gather_by(self.ordinal, layout.host)
        self.oldest = torch.where(self.real, oldest.gather(1, layout.host.clamp(min=0)), 0)
        self.image_order: Tensor | None = None
        self._images(state)
        self._text(state)

    def _images(self, state: WindowState | None) -> None:
        """Flat images in row order, cached ones first, and the visible range of every query."""
        if state is not None and self.sequence.image_features is None:  # the cached slots, as they lie
            slots = state.image_ordinals.shape[1]
            self.image_order, self.image_row = None, self.image.new_zeros(0)
            starts = torch.arange(self.rows, device=self.real.device)[:, None] * slots
            self.range_start = starts.expand_as(self.real)
            self.range_length = state.image_counts[:, None] * self.real
            return
        row, _ = self.image.nonzero(as_tuple=True)
        ordinal = self.ordinal[self.image]
        self.image_order = None
        self.new = torch.ones_like(ordinal, dtype=torch.bool)
        if state is not None:
            filled = state.image_ordinals != NO_WINDOW
            old_row, slot = filled.nonzero(as_tuple=True)
            pool = old_row * filled.shape[1] + slot
            if len(row):
                pool = torch.cat([pool, filled.numel() + torch.arange(len(row), device=row.device)])
            self.new = torch.cat([torch.zeros_like(old_row, dtype=torch.bool), self.new])
            row, ordinal = torch.cat([old_row, row]), torch.cat([state.image_ordinals[filled], ordinal])
            order = (row * 2 + self.new).argsort(stable=True)
            row, ordinal, self.new, pool = row[order], ordinal[order], self.new[order], pool[order]
            if not torch.equal(pool, torch.arange(len(pool), device=pool.device)):
                self.image_order = pool
        self.image_row, self.image_ordinal = row, ordinal
        low = min(int(ordinal.min()), 0) if len(ordinal) else 0
        self.stride = self.length - low + 2
        self.low = low
        self.image_key = row * self.stride + ordinal - low
        line = torch.arange(self.rows, device=row.device)[:, None] * self.stride - low
        self.range_start = torch.searchsorted(self.image_key, line + self.oldest.clamp(min=low))
        range_end = torch.searchsorted(self.image_key, line + self.query_window.clamp(min=low), right=True)
        if self.fusion.gist_tokens:  # a gist sees its own image and those before it, not the next one of the run
            flat = self.new.nonzero()[:, 0]
            rank = (self.image.flatten().cumsum(0) - 1).view_as(self.image).gather(1, self.host.clamp(min=0))
            own_end = flat[rank.clamp(min=0)] + 1 if len(flat) else range_end
            range_end = torch.where(self.gist, own_end, range_end)
        self.range_length = (range_end - self.range_start).clamp(min=0) * self.real

    def _text(self, state: WindowState | None) -> None:
        """Where window text lies among the pooled text keys (joint text only)."""
        self.text_order: Tensor | None = None
        self.cached_text = torch.zeros(self.rows, dtype=torch.long, device=self.real.device)
        self.text_offset = 0
        if not self.fusion.joint_text or state is None:
            return
        self.cached_text = state.text_counts
        self.text_offset = int(state.text_counts.max())
        if self.text_offset and not bool(self.real.all()):
            slots = torch.arange(self.text_offset, device=self.real.device)
            kept = torch.cat([slots >= self.text_offset - self.cached_text[:, None], self.real], 1)
            self.text_order = left_padded(torch.arange(kept.shape[1], device=kept.device).expand_as(kept), kept)
            self.text_offset = self.text_order.shape[1] - self.real.shape[1]

    def windows(self) -> tuple[Windows, Tensor | None, Windows | None]:
        """Blocks of consecutive queries with equal keys and the flat indices of their queries; with joint text also the
        blocks of gists, whose queries come last."""
        sees = self.range_length > 0
        joint = self.fusion.joint_text
        if joint:
            gists = self._blocks(sees & self.gist) if self.fusion.gist_tokens else None
            sees = (self.real if self.fusion.replace else sees) & ~self.gist
        active, row, column, first, lengths = self._blocks(sees)
        starts, counts = (t.flatten()[active][first] for t in (self.range_start, self.range_length))
        if not joint:
            return Windows(lengths, starts, counts), None if len(active) == sees.numel() else active, None
        number = self.query_window.flatten()[active][first]
        extra = torch.where(number == 0, self.cached_text[row[first]], 0)
        pooled = self.text_offset + sees.shape[1]
        text_starts = row[first] * pooled + self.text_offset + column[first] - extra
        windows = Windows(lengths, starts, counts, text_starts, lengths + extra)
        if gists is None or not len(gists[0]):
            return windows, None if len(active) == sees.numel() else active, None
        own, _, _, first, lengths = gists
        starts, counts = (t.flatten()[own][first] for t in (self.range_start, self.range_length))
        return windows, torch.cat([active, own]), Windows(lengths, starts, counts)

    def _blocks(self, sees: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Flat index, row and column of every query, and the first query and length of every block of equal keys."""
        active = sees.flatten().nonzero()[:, 0]
        row, column = active // sees.shape[1], active % sees.shape[1]
        ends = self.range_start + self.range_length
        same = torch.stack([row, *(t.flatten()[active] for t in (self.query_segment, self.query_window, ends))])
        new = pad((same[:, 1:] != same[:, :-1]).any(0), (1, 0), value=True)[: len(active)]
        first = new.nonzero()[:, 0]
        lengths = pad(first, (0, 1), value=len(active)).diff()
        return active, row, column, first, lengths

    def image_positions(self, mrope: bool) -> Tensor:
        """(N,) or (3, N) stream positions of this call's image tokens, laid out backwards from what follows them.

        Without gists that is the text that opens the window; images of one run lie behind one another. With gists it is
        the image's own first gist. Under m-RoPE every image keeps its (t, h, w) grid, shifted so that its maximum + 1
        meets what follows.
        """
        if not mrope and not self.fusion.gist_tokens:  # token by token: a chunk may hold parts of images
            end = torch.searchsorted(self.image_key, self.image_key, right=True)
            taken = torch.ones_like(end)
            if self.steps is not None:
                taken[self.new] = self.steps
            taken = taken.cumsum(0)
            behind = (taken[end - 1] - taken)[self.new]
            row, column = self.image.nonzero(as_tuple=True)
            return self.sequence.start[row] + self.text_before[row, column] - 1 - behind
        lengths = torch.tensor(self.lengths, device=self.real.device)
        first = lengths.cumsum(0) - lengths
        image = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        if mrope:
            positions = self.sequence.position_ids
            assert positions is not None
            grid = positions[:, self.image]
            local = grid - grid[:, first][:, image]
            extent = torch.zeros_like(lengths).scatter_reduce(0, image, local.amax(0) + 1, reduce="amax")
        else:
            steps = torch.ones_like(image) if self.steps is None else self.steps
            taken = steps.cumsum(0)
            local = taken - taken[first][image]
            extent = torch.zeros_like(lengths).index_add(0, image, steps)
        row, column = (index[first] for index in self.image.nonzero(as_tuple=True))
        following = self.sequence.start[row] + self.text_before[row, column]
        if self.fusion.gist_tokens:
            segment = self.sequence.segment_index[row, column]
            following = following + self.fusion.gist_tokens * _earlier(row, segment)
            return local + (following - extent)[image]
        run = self.image_key[self.new][first]
        last = torch.searchsorted(run, run, right=True) - 1
        total = extent.cumsum(0)
        return local + (following - (total[last] - total) - extent)[image]

    def continued_run(self, state: WindowState) -> Tensor | None:
        """(B, S) shift of cached image keys whose run goes on here; None where none does."""
        steps = self.image.long()
        if self.steps is not None:
            steps = steps.masked_scatter(self.image, self.steps)
        added = torch.where(self.ordinal == 0, steps, 0).sum(1)
        if not bool(added.any()):
            return None
        return torch.where(state.image_ordinals == 0, -added[:, None], 0)

    def next_state(self, state: WindowState | None) -> tuple[WindowState, Tensor | None]:
        """What the cache holds after this call, and which pooled image keys it keeps (None: those it has)."""
        total = self.before[:, -1]
        has_new = self.image.any(1)
        if state is None:
            zero = torch.zeros_like(total)
            empty = torch.full((self.rows, 0), NO_WINDOW, dtype=torch.long, device=total.device)
            state = WindowState(empty, zero, zero, zero)
        after = total - torch.where(self.image, self.before, 0).amax(1)
        since = torch.where(has_new, after, state.since_image + total)
        ordinals, counts, store = state.image_ordinals, state.image_counts, None
        if len(self.image_row) and bool(has_new.any()):
            last = self.ordinal[:, -1]
            relative = self.image_ordinal - last[self.image_row]
            kept = relative > -(2**30 if self.fusion.history is None else self.fusion.history)
            row = self.image_row[kept]
            counts = torch.bincount(row, minlength=self.rows)
            slot = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
            pool = torch.arange(len(kept), device=row.device) if self.image_order is None else self.image_order
            shape = (self.rows, int(counts.max()))
            store = torch.zeros(shape, dtype=torch.long, device=row.device)
            store[row, slot] = pool[kept]
            ordinals = torch.full(shape, NO_WINDOW, dtype=torch.long, device=row.device)
            ordinals[row, slot] = relative[kept]
        text = torch.zeros_like(total)
        if self.fusion.joint_text:
            grown = torch.where(has_new, after, state.text_counts + total)
            text = grown if self.fusion.replace else torch.where(counts > 0, grown, 0)
        return WindowState(ordinals, counts, text, since), store


def _earlier(row: Tensor, segment: Tensor) -> Tensor:
    """How many images of the same row and segment come before each image."""
    order = torch.arange(len(row), device=row.device)
    new = (row != pad(row[:-1], (1, 0), value=-1)) | (segment != pad(segment[:-1], (1, 0), value=-1))
    return order - torch.where(new, order, 0).cummax(0).values if len(row) else order
