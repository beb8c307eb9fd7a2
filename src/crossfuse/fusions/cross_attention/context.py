"""Which text sees which image in this call: windows, positions, and what goes into the cache.

An image run belongs to the window that the next text opens. Windows of a row are numbered from 1 in each call; 0 is
the window that the cache left open (or no image at all). Ranges are found by sorting and `searchsorted`: no loop over
tokens. Shape legend as in `attention`; S cached image slots a row, P pooled text keys a row.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from crossfuse.attention.windows import Windows
from crossfuse.sequence import FusedInputs, Layout, MultimodalSequence, gather_by, left_padded
from crossfuse.streaming.cache import NO_WINDOW, FusedLayer, FusionCache, WindowState

if TYPE_CHECKING:
    from crossfuse.backbones.base import Backbone
    from crossfuse.fusions.cross_attention.fusion import CrossAttention

Rope = tuple[Tensor, Tensor]


@dataclasses.dataclass(eq=False)
class CrossContext:
    """State of one call, the same for all blocks."""

    backbone: Backbone
    windows: Windows
    active: Tensor | None  # (A,) flat indices of queries that see something; None: all
    features: Tensor | None  # (N, d) image tokens of this call
    image_rope: Rope | None  # (1, N, D) each, joint text only
    image_order: Tensor | None  # (all,) into cached slots then new tokens, where both exist
    image_store: Tensor | None  # (B, S') into the pool: what the cache keeps; None: unchanged
    image_shift: Rope | None  # (B, S, D): cached keys of an image run that goes on in this call
    text_order: Tensor | None  # (B, P) into cached then new columns, where padding lies between them
    text_stored: int  # columns that the cache keeps
    window: WindowState | None  # the cache's state after this call
    touch: bool = False  # training without any image: only touch the parameters
    updated: list[Tensor | None] | None = None  # image states before every block, each written once (CA+FFN)

    def image_states(self, block: int) -> Tensor | None:
        """(N, d) image tokens as this block sees them."""
        if self.updated is None or self.features is None:
            return self.features
        return self.updated[block]

    def update_images(self, attention: Any) -> None:
        """y_{l+1} = y_l + FFN_l(norm_l(y_l)), with the block's own norm and FFN, unless no later block reads it.

        Slots are written once and never changed: recomputation under checkpointing reads the states of its own block.
        """
        block = attention.layer_idx
        if self.updated is None or block + 1 >= len(self.updated):
            return
        states = self.updated[block]
        assert states is not None
        layer = attention._cross_block
        following = states + layer.mlp(layer.post_attention_layernorm(states))
        if self.updated[block + 1] is None:
            self.updated[block + 1] = following

    def rotate(self, attention: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (B, T, H, D)."""
        return self.backbone.rotate(attention, x, cos, sin)

    def query_rope(self, cos: Tensor, sin: Tensor) -> Rope:
        """The decoder's (..., B, F, D) tables for the active queries, (..., 1, A, D)."""
        flat = (cos.flatten(-3, -2), sin.flatten(-3, -2))
        if self.active is not None:
            flat = (flat[0].index_select(-2, self.active), flat[1].index_select(-2, self.active))
        return flat[0].unsqueeze(-3), flat[1].unsqueeze(-3)

    def image_pool(
        self, cached: FusedLayer | None, keys: Tensor | None, values: Tensor | None, attention: Any
    ) -> tuple[Tensor, Tensor]:
        """Flat image keys and values (all, G, D) in the order of `windows`; stores what later calls see."""
        old_keys, old_values = (None, None) if cached is None else (cached.image_keys, cached.image_values)
        if old_keys is not None and old_values is not None:
            if self.image_shift is not None:
                old_keys = self.rotate(attention, old_keys, *self.image_shift)
            flat_keys, flat_values = old_keys.flatten(0, 1), old_values.flatten(0, 1)
            if keys is not None and values is not None:
                flat_keys, flat_values = torch.cat([flat_keys, keys]), torch.cat([flat_values, values])
        elif keys is None or values is None:
            empty = attention.o_proj.weight.new_zeros(0, 1, attention.head_dim)
            return empty, empty
        else:
            flat_keys, flat_values = keys, values
        if cached is not None and self.image_store is not None:
            cached.image_keys, cached.image_values = (
                flat_keys[self.image_store],
                flat_values[self.image_store],
            )
        if self.image_order is not None:
            flat_keys, flat_values = flat_keys[self.image_order], flat_values[self.image_order]
        return flat_keys, flat_values

    def text_pool(self, cached: FusedLayer | None, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Flat text keys and values (B * P, G, D): the open window's cached text, then this call's."""
        if cached is not None and cached.text_keys is not None and cached.text_values is not None:
            keys = torch.cat([cached.text_keys, keys], 1)
            values = torch.cat([cached.text_values, values], 1)
        if self.text_order is not None:
            index = self.text_order.clamp(min=0)[..., None, None].expand(-1, -1, *keys.shape[2:])
            keys, values = keys.gather(1, index), values.gather(1, index)
        if cached is not None:
            stored = keys.shape[1] - self.text_stored
            cached.text_keys, cached.text_values = keys[:, stored:], values[:, stored:]
        return keys.flatten(0, 1), values.flatten(0, 1)


def text_layout(sequence: MultimodalSequence) -> Layout:
    """The fused order of cross-attention: text only."""
    if sequence.image_features is None:
        return sequence.plain_layout()
    columns = torch.arange(sequence.input_ids.shape[1], device=sequence.input_ids.device)
    source = left_padded(columns.expand_as(sequence.input_ids), sequence.valid & ~sequence.is_image)
    if not source.shape[1]:  # images alone (a chunk of a prefill): the decoder needs a column, which nobody attends to
        source = torch.full((len(source), 1), -1, device=source.device)
    return Layout(source=source, host=source)


def cross_context(
    fusion: CrossAttention, backbone: Backbone, body: Any, fused: FusedInputs, cache: FusionCache | None
) -> CrossContext | None:
    """Windows of this call and the state that the cache holds after it; None where nobody sees an image."""
    sequence = fused.sequence
    state = None if cache is None else cache.window
    if sequence.has_video and fusion.video_windows == "frame":
        raise NotImplementedError(
            "video_windows='frame' is not yet implemented; fuse with video_windows='all' to put every frame of a video "
            "into the window of the text that follows"
        )
    if sequence.image_features is None and state is None and not (fusion.replace and fusion.joint_text):
        return _without_images(fusion, backbone, backbone.decoder(body), sequence)
    seen = _Visibility(fusion, fused, state)
    rope = shift = None
    decoder = backbone.decoder(body)
    if fusion.joint_text and sequence.image_features is not None:
        places = seen.image_positions(backbone.mrope)
        rope = decoder.rotary_emb(sequence.image_features, places.unsqueeze(-2))
        if state is not None and (moved := seen.continued_run(state)) is not None:
            if backbone.mrope:
                raise ValueError(
                    "an image run was split between two calls, which joint_text cannot lay out on a grid; "
                    "use prefill_chunk_size=None"
                )
            cos, sin = decoder.rotary_emb(sequence.image_features, moved)
            scale = getattr(decoder.rotary_emb, "attention_scaling", 1.0)
            shift = (cos / scale, sin / scale)
    windows, active = seen.windows(state)
    window, store = (None, None) if cache is None else seen.next_state(state)
    return CrossContext(
        backbone=backbone,
        windows=windows,
        active=active,
        features=sequence.image_features,
        image_rope=rope,
        image_order=seen.image_order,
        image_store=store,
        image_shift=shift,
        text_order=seen.text_order,
        text_stored=0 if window is None else int(window.text_counts.max()),
        window=window,
        updated=_slots(fusion, decoder, sequence.image_features),
    )


def _without_images(
    fusion: CrossAttention, backbone: Backbone, decoder: Any, sequence: MultimodalSequence
) -> CrossContext | None:
    dummy = sequence.dummy_features
    if dummy is None and not fusion.replace:
        return None
    nothing = torch.zeros(0, dtype=torch.long, device=sequence.input_ids.device)
    return CrossContext(
        backbone=backbone,
        windows=Windows(nothing, nothing, nothing),
        active=nothing,
        features=dummy,
        image_rope=None,
        image_order=None,
        image_store=None,
        image_shift=None,
        text_order=None,
        text_stored=0,
        window=None,
        touch=dummy is not None,
        updated=_slots(fusion, decoder, dummy),
    )


def _slots(fusion: CrossAttention, decoder: Any, features: Tensor | None) -> list[Tensor | None] | None:
    """One slot of image states a block, up to the last block with cross-attention."""
    if not fusion.update_images or features is None:
        return None
    last = fusion.layer_indices(len(decoder.layers))[-1]
    return [features, *[None] * last]


class _Visibility:
    """Window numbers and key ranges of every token of one call."""

    def __init__(self, fusion: CrossAttention, fused: FusedInputs, state: WindowState | None):
        sequence, source = fused.sequence, fused.layout.source
        self.fusion, self.sequence, self.real = fusion, sequence, fused.attention_mask
        self.rows, self.length = sequence.input_ids.shape
        self.image = sequence.is_image
        self.text = sequence.valid & ~self.image
        self.before = self.text.cumsum(1)  # text tokens up to here; images with equal counts share a window
        segment = sequence.segment_index
        changed = segment != pad(segment[:, :-1], (1, 0), value=-1)
        key = torch.where(self.image, segment * (self.length + 1) + self.before, -1)
        opens = self.image & (key != pad(key.cummax(1).values[:, :-1], (1, 0), value=-1))
        if state is not None:  # a run that the previous call left open goes on
            still_open = (state.image_counts > 0) & (state.since_image == 0)
            opens &= ~(still_open[:, None] & (self.before == 0))
        self.ordinal = opens.cumsum(1)  # (B, L): window of this token
        self.text_before = self.before - torch.where(changed, self.before - self.text.long(), 0).cummax(1).values
        oldest = self.ordinal - (self.length + 2**20 if fusion.history is None else fusion.history) + 1
        if sequence.segments is not None:  # images of an earlier sample of the row are out of sight
            own = torch.where(changed, self.ordinal - opens.long(), 0).cummax(1).values
            oldest = torch.maximum(oldest, own + 1)
        self.query_segment = gather_by(segment, source)
        self.query_window = gather_by(self.ordinal, source)
        self.oldest = torch.where(source >= 0, oldest.gather(1, source.clamp(min=0)), 0)
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

    def windows(self, state: WindowState | None) -> tuple[Windows, Tensor | None]:
        """Blocks of consecutive queries with the same keys, and the flat indices of all their queries."""
        sees = self.real if self.fusion.replace and self.fusion.joint_text else self.range_length > 0
        active = sees.flatten().nonzero()[:, 0]
        row, column = active // sees.shape[1], active % sees.shape[1]
        number = self.query_window.flatten()[active]
        key = (row * (self.length + 1) + self.query_segment.flatten()[active]) * (self.length + 2) + number
        _, lengths = torch.unique_consecutive(key, return_counts=True)
        first = lengths.cumsum(0) - lengths
        starts, counts = self.range_start.flatten()[active][first], self.range_length.flatten()[active][first]
        everyone = None if len(active) == sees.numel() else active
        if not self.fusion.joint_text:
            return Windows(lengths, starts, counts), everyone
        extra = torch.where(number[first] == 0, self.cached_text[row[first]], 0)
        pooled = self.text_offset + sees.shape[1]
        text_starts = row[first] * pooled + self.text_offset + column[first] - extra
        return Windows(lengths, starts, counts, text_starts, lengths + extra), everyone

    def image_positions(self, mrope: bool) -> Tensor:
        """(N,) or (3, N) stream positions of this call's image tokens, laid out backwards from the text that follows."""
        if mrope:
            return self._grid_positions()
        end = torch.searchsorted(self.image_key, self.image_key, right=True)
        behind = (end - 1 - torch.arange(len(end), device=end.device))[self.new]
        row, column = self.image.nonzero(as_tuple=True)
        return self.sequence.start[row] + self.text_before[row, column] - 1 - behind

    def _grid_positions(self) -> Tensor:
        """m-RoPE: every image keeps its own (t, h, w) grid, shifted so that its maximum + 1 meets what follows it."""
        positions = self.sequence.position_ids
        assert positions is not None
        grid = positions[:, self.image]
        lengths = torch.tensor(self.sequence.image_lengths, device=grid.device)
        first = lengths.cumsum(0) - lengths
        image = torch.arange(len(lengths), device=grid.device).repeat_interleave(lengths)
        local = grid - grid[:, first][:, image]
        extent = torch.zeros_like(lengths).scatter_reduce(0, image, local.amax(0) + 1, reduce="amax")
        run = self.image_key[self.new][first]
        last = torch.searchsorted(run, run, right=True) - 1
        total = extent.cumsum(0)
        behind = total[last] - total  # extents of the images between this one and the text
        row, column = (index[first] for index in self.image.nonzero(as_tuple=True))
        following = self.sequence.start[row] + self.text_before[row, column]
        return local + (following - behind - extent)[image]

    def continued_run(self, state: WindowState) -> Tensor | None:
        """(B, S) shift of cached image keys whose run goes on here; None where none does."""
        added = (self.image & (self.ordinal == 0)).sum(1)
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
