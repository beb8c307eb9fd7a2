"""Anchors inside the windows of cross-attention: AttAnchor's copies among CASA's keys and values.

The image tokens of a window and the prompt's text are one small AttAnchor problem: each candidate text token up to the
end of the window is copied directly behind the image token of that window which it resembles most, if their cosine
reaches the threshold. A copy is a token of the window's images from then on: the embedding that the language model has
for the word, through the same norm and projections, and cached with the images. The self-attention sequence stays as it
was. Text of a later window, and answers, are never copied, so nothing before a window depends on it.

Shapes: B rows, L tokens as the user wrote them, P text tokens of earlier calls, E columns with copies, N image tokens.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from crossfuse.fusions.anchors.order import order_with_copies
from crossfuse.fusions.anchors.similarity import BestPartner, cosines, may_match
from crossfuse.fusions.anchors.text_anchors import candidates
from crossfuse.fusions.cross_attention.layout import image_lengths
from crossfuse.fusions.cross_attention.visibility import window_numbers
from crossfuse.sequence import FusedInputs, Layout, MultimodalSequence, gather_by, left_padded

if TYPE_CHECKING:
    from crossfuse.fusions.anchors import TextAnchors
    from crossfuse.fusions.cross_attention.fusion import CrossAttention
    from crossfuse.streaming.cache import FusionCache, WindowState


@dataclasses.dataclass(eq=False)
class AnchoredImages:
    """A call as if its images had come with the copies in them."""

    fused: FusedInputs  # its sequence has a column for every copy; source and host of its layout point into that
    lengths: list[int]  # tokens of each image (of each frame with a window of its own), copies included
    steps: Tensor  # (N,) long: how many positions each image token takes: 0 for a copy that shares its host's


def remember_prompt(anchors: TextAnchors, sequence: MultimodalSequence, cache: FusionCache) -> None:
    """Images of later calls receive copies of this call's candidates too."""
    texts, _ = candidates(sequence, anchors.exclude_token_ids)
    if bool(texts.any()):
        cache.note_prompt(torch.where(texts, sequence.input_ids, -1))


def anchored_images(
    anchors: TextAnchors,
    body: Any,
    fused: FusedInputs,
    lengths: list[int],
    state: WindowState | None,
    cache: FusionCache | None,
) -> AnchoredImages | None:
    """The copies of this call, or None where there are none. ``lengths``: tokens of each image (frame)."""
    sequence = fused.sequence
    if sequence.image_features is None:
        return None
    table, images, past, best = _matched(anchors, body, sequence, lengths, state, cache)
    segments = sequence.segments
    inserted = (best.cosine >= anchors.threshold) & (best.partner >= 0)
    if not bool(inserted.any()):
        return None
    written = torch.ones_like(images)
    written[:, :past] = False
    layout = order_with_copies(written, best.column, best.partner, inserted, anchors.copy_order)
    copied = (layout.source != layout.host) & (layout.host >= 0)
    host = torch.where(layout.host >= 0, layout.host - past, -1)
    is_image = gather_by(sequence.is_image.long(), host) > 0
    row, column = is_image.nonzero(as_tuple=True)
    rank = (sequence.is_image.flatten().cumsum(0) - 1).view_as(sequence.is_image)[row, host[row, column]]
    grown = dataclasses.replace(
        sequence,
        input_ids=gather_by(sequence.input_ids, host),
        valid=gather_by(sequence.valid.long(), host) > 0,
        is_image=is_image,
        image_features=table[row, layout.source[row, column]],
        image_lengths=_counts(sequence.image_lengths, rank),
        position_ids=None if sequence.position_ids is None else gather_by(sequence.position_ids, host).clamp(min=0),
        segments=None if segments is None else gather_by(segments, host),
    )
    inherits = anchors.positions == "inherit"
    steps = torch.where(copied[row, column], 0, 1) if inherits else torch.ones_like(row)
    return AnchoredImages(
        dataclasses.replace(fused, sequence=grown, layout=_moved_layout(fused, host)), _counts(lengths, rank), steps
    )


def match_in_windows(fusion: CrossAttention, sequence: MultimodalSequence) -> BestPartner:
    """The best image token of every candidate text token in every window of a prompt that comes in one call.

    Columns are those of ``sequence``, which has an image; ``fusion`` has anchors.
    """
    assert fusion.anchors is not None
    return _matched(fusion.anchors, None, sequence, image_lengths(fusion, sequence), None, None)[-1]


def _matched(
    anchors: TextAnchors,
    body: Any,
    sequence: MultimodalSequence,
    lengths: list[int],
    state: WindowState | None,
    cache: FusionCache | None,
) -> tuple[Tensor, Tensor, int, BestPartner]:
    """(embeddings (B, P + L, d), is_image (B, P + L), P, best partners): earlier text stands before this call's."""
    texts, _ = candidates(sequence, anchors.exclude_token_ids)
    assert sequence.image_features is not None
    table = sequence.embeds.masked_scatter(
        sequence.is_image[..., None], sequence.image_features.to(sequence.embeds.dtype)
    )
    window = window_numbers(sequence, lengths, state).ordinal
    earlier = _earlier_prompt(cache)
    past = 0 if earlier is None else earlier.shape[1]
    images = sequence.is_image
    if earlier is not None:  # as columns before this call's: older than every window
        table = torch.cat([body.get_input_embeddings()(earlier.clamp(min=0)).to(table.dtype), table], 1)
        texts, window = torch.cat([earlier >= 0, texts], 1), pad(window, (past, 0))
        images = pad(images, (past, 0), value=False)
    return table, images, past, best_in_windows(table, texts, images, window, sequence.segments)


def best_in_windows(
    embeds: Tensor, texts: Tensor, images: Tensor, window: Tensor, segments: Tensor | None
) -> BestPartner:
    """For every text token and every window that does not end before it, the image token of highest cosine in that
    window; the first on ties.

    embeds (B, C, d); texts, images (B, C) bool; window (B, C) long: of text the open one, of images their own;
    segments (B, C) long or None -> (B, K) with one entry a pair of text token and window.
    """
    columns = torch.arange(embeds.shape[1], device=embeds.device).expand(embeds.shape[:2])
    seeker, partner = left_padded(columns, texts), left_padded(columns, images)
    if not seeker.shape[1] or not partner.shape[1]:
        nothing = torch.full_like(seeker, -1)
        return BestPartner(seeker, nothing, nothing.float())
    with torch.no_grad():
        cosine = cosines(embeds, seeker, partner)
        own = gather_by(window, partner).clamp(min=0)
        allowed = may_match(seeker, partner, segments)
        allowed &= gather_by(window, seeker)[:, :, None] <= own[:, None, :]
        cosine.masked_fill_(~allowed, -torch.inf)
        shape = (*cosine.shape[:2], int(own.max()) + 1)
        index = own[:, None, :].expand_as(cosine)
        value = cosine.new_full(shape, -torch.inf).scatter_reduce(2, index, cosine, "amax")
        places = torch.arange(cosine.shape[2], device=embeds.device).expand_as(cosine)
        best = (cosine == value.gather(2, index)) & allowed
        last = cosine.shape[2] - 1
        first = torch.full(shape, last, device=embeds.device).scatter_reduce(
            2, index, torch.where(best, places, last), "amin"
        )
        found = torch.isfinite(value)
        chosen = partner[:, None, :].expand_as(cosine).gather(2, first)
    column = seeker[:, :, None].expand(shape)
    return BestPartner(
        column.flatten(1), torch.where(found, chosen, -1).flatten(1), torch.where(found, value, -1.0).flatten(1)
    )


def _earlier_prompt(cache: FusionCache | None) -> Tensor | None:
    """(B, P) ids of the prompt's candidates in the calls before this one, -1 in front of shorter rows."""
    if cache is None or cache.prompt_ids is None:
        return None
    ids = cache.prompt_ids[:, : cache.user_length]
    packed = left_padded(ids, ids >= 0)
    return packed if packed.shape[1] else None


def _counts(lengths: list[int], rank: Tensor) -> list[int]:
    """``rank``: of each token with copies, the place of its host among all image tokens."""
    sizes = torch.tensor(lengths, device=rank.device)
    item = torch.repeat_interleave(torch.arange(len(lengths), device=rank.device), sizes)
    counts: list[int] = torch.bincount(item[rank], minlength=len(lengths)).tolist()
    return counts


def _moved_layout(fused: FusedInputs, host: Tensor) -> Layout:
    """Hosts of the fused text in the new columns: of an image, its last token or the copy behind it."""
    old = fused.layout
    last = torch.searchsorted(host.contiguous(), old.host.contiguous(), right=True) - 1
    moved = torch.where(old.host >= 0, last, -1)
    length = fused.sequence.input_ids.shape[1]
    extra = old.source >= length
    return Layout(source=torch.where(extra, old.source - length + host.shape[1], moved), host=moved)
