"""Which token is copied to which patch, and why: the anchors of a batch, without running the decoder."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from typing import Any

import torch
from torch import Tensor

from crossfuse.devices import on_device_of
from crossfuse.fusions.anchors.image_anchors import ImageAnchors
from crossfuse.fusions.anchors.similarity import BestPartner
from crossfuse.fusions.anchors.text_anchors import TextAnchors
from crossfuse.fusions.cross_attention.anchored import match_in_windows
from crossfuse.fusions.cross_attention.fusion import CrossAttention
from crossfuse.prompt import prompt_before_labels
from crossfuse.sequence import MultimodalSequence


@dataclasses.dataclass(frozen=True)
class Anchor:
    """A text token and an image token one of which is copied next to the other.

    `TextAnchors` copies the text token behind the image token, `ImageAnchors` the image token behind the text token.
    """

    token_index: int  # column of the text token in its row of input_ids
    token_id: int
    image_index: int  # image within the sample
    patch_index: int  # image token within the image
    row: int  # of the patch grid; -1 where the image has no grid
    column: int
    grid: tuple[int, int] | None  # (rows, columns)
    cosine: float


def match_prompt(
    model: Any, inputs: dict[str, Any]
) -> tuple[MultimodalSequence, BestPartner, TextAnchors | ImageAnchors]:
    """Best partner of every candidate (text tokens for `TextAnchors`, image tokens for `ImageAnchors`) of a batch.

    Matching is that of a prefill. A model that is not fused is matched with `TextAnchors`' default candidates; one
    with ``CrossAttention(anchors=TextAnchors(...))`` in each window apart, so that a token may occur several times.
    The fusion that is returned is that of the anchors.
    """
    sequence, used = _sequence_and_fusion(model, inputs)
    with torch.no_grad():
        _report_broken(sequence)
        if isinstance(used, CrossAttention):
            assert used.anchors is not None
            apart = sequence.image_features is not None
            return sequence, match_in_windows(used, sequence) if apart else used.anchors.match(sequence), used.anchors
        return sequence, used.match(sequence), used


def _report_broken(sequence: MultimodalSequence) -> None:
    """Tokens that are not finite never get an anchor; say so where anchors are looked at."""
    broken = int((~torch.isfinite(sequence.embeds).all(-1) & sequence.valid).sum())
    if broken:
        warnings.warn(
            f"{broken} of {int(sequence.valid.sum())} tokens hold NaN or infinite values; their cosines count as -1",
            stacklevel=3,
        )


def anchor_sequence(model: Any, inputs: dict[str, Any]) -> tuple[MultimodalSequence, TextAnchors | ImageAnchors]:
    """A processor's batch as the fusion sees it (embeddings with image tokens in place), and that fusion.

    inputs: input_ids (B, L), attention_mask, pixels and grids; optionally labels, prompt_mask, anchor_mask. Gradients
    are recorded where they are enabled. ValueError for cross-attention, whose images are not in the sequence.
    """
    sequence, used = _sequence_and_fusion(model, inputs)
    if isinstance(used, CrossAttention):
        raise ValueError("the model is fused with cross-attention, whose image tokens are not in the sequence")
    return sequence, used


def _sequence_and_fusion(
    model: Any, inputs: dict[str, Any]
) -> tuple[MultimodalSequence, TextAnchors | ImageAnchors | CrossAttention]:
    from crossfuse.api import fused, fusion_of

    fusion = fusion_of(model)
    nested = isinstance(fusion, CrossAttention) and fusion.anchors is not None
    if fusion is not None and not nested and not isinstance(fusion, (TextAnchors, ImageAnchors)):
        raise ValueError(
            f"the model is fused with {fusion.name}; anchors need TextAnchors, ImageAnchors, "
            "CrossAttention(anchors=...) or no fusion"
        )
    if getattr(model, "get_base_model", None) is not None:
        model = model.get_base_model()
    inputs = on_device_of(model, inputs)
    context = contextlib.nullcontext(model) if fusion is not None else fused(model, TextAnchors())
    with context:
        body = model.model
        prompt = inputs.get("prompt_mask")
        if prompt is None:
            labels = inputs.get("labels")
            ids = inputs["input_ids"]
            prompt = torch.ones_like(ids).bool() if labels is None else prompt_before_labels(labels, None)
        images = body._backbone.encode(body, None, {k: v for k, v in inputs.items() if isinstance(v, Tensor)})
        if images is not None:
            images = body._backbone.in_reading_order(body, inputs["input_ids"], images)
        masks = {"anchor_mask": inputs.get("anchor_mask"), "prompt_mask": prompt}
        embeds = body.get_input_embeddings()(inputs["input_ids"])
        sequence = body._sequence(
            inputs["input_ids"], embeds, inputs.get("attention_mask"), None, None, images, masks, None, 0, inputs
        )  # fmt: skip
        return sequence, body._fusion


def explain_anchors(model: Any, inputs: dict[str, Any]) -> list[list[Anchor]]:
    """Anchors that `TextAnchors` or `ImageAnchors` inserts for a processor's batch: one list a sample, in reading
    order.

    ``model`` is fused with either (its threshold decides), or with ``CrossAttention(anchors=TextAnchors(...))``, whose
    windows each have copies of their own: a word has an anchor for every window that gets one. ``inputs`` hold
    input_ids (B, L), attention_mask, pixel_values and, optionally, labels, prompt_mask, anchor_mask.
    """
    sequence, best, fusion = match_prompt(model, inputs)
    if fusion.threshold >= 1:
        return [[] for _ in range(len(sequence.input_ids))]
    rank = sequence.is_image.flatten().cumsum(0).view_as(sequence.is_image) - 1  # place among all image tokens
    ends = torch.tensor(sequence.image_lengths).cumsum(0)
    starts = ends - torch.tensor(sequence.image_lengths)
    inserted = ((best.cosine >= fusion.threshold) & (best.partner >= 0)).nonzero().tolist()
    anchors: list[list[Anchor]] = [[] for _ in range(len(sequence.input_ids))]
    for sample, slot in inserted:
        token, patch_column = int(best.column[sample, slot]), int(best.partner[sample, slot])
        if isinstance(fusion, ImageAnchors):
            token, patch_column = patch_column, token
        place = int(rank[sample, patch_column])
        image = int(torch.searchsorted(ends, place, right=True))
        own = sequence.is_image[sample].nonzero()
        first = int(torch.searchsorted(ends, int(rank[sample, own[0, 0]]), right=True))
        grid = sequence.image_grids[image]
        patch = place - int(starts[image])
        row, column = (-1, -1) if grid is None else divmod(patch, grid[1])
        anchors[sample].append(
            Anchor(
                token_index=token,
                token_id=int(sequence.input_ids[sample, token]),
                image_index=image - first,
                patch_index=patch,
                row=row,
                column=column,
                grid=grid,
                cosine=float(best.cosine[sample, slot]),
            )
        )
    return anchors
