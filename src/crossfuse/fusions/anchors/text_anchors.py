"""TextAnchors: AttAnchor's text-into-image direction (Algorithm 1 of the paper)."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from crossfuse.fusion import Fusion
from crossfuse.fusions.anchors.order import COPY_ORDERS, order_with_copies
from crossfuse.fusions.anchors.pruning import check_kept_share, pruned_image_tokens
from crossfuse.fusions.anchors.similarity import BestPartner, best_partner
from crossfuse.sequence import gather_by

if TYPE_CHECKING:
    from crossfuse.sequence import Layout, MultimodalSequence
    from crossfuse.streaming.cache import FusionCache

POSITIONS = ("sequential", "inherit")


@dataclasses.dataclass(frozen=True)
class TextAnchors(Fusion):
    """Copies each prompt token next to the image token that it resembles most, if their cosine reaches ``threshold``.

    threshold: 0 <= τ < 1; 1 or more inserts nothing, and the result equals the unfused model bit for bit.
    share: the share of candidate tokens that τ was calibrated to (a record; `crossfuse.calibrate_threshold` sets both).
    copy_order: ``"algorithm"`` (several copies on one image token stand in reverse prompt order) or ``"prompt"``.
    positions: ``"sequential"`` counts the fused sequence; with ``"inherit"`` a copy shares its image token's position.
    exclude_token_ids: token ids that are never copied, besides the special tokens.
    keep_image_tokens: the share of each image's tokens that stays in the sequence: those of highest cosine to any
        candidate text token, and every one that carries an anchor. None keeps all. See
        `crossfuse.fusions.anchors.pruning`.
    """

    name: ClassVar[str] = "text-anchors"

    threshold: float = 0.12
    share: float | None = None
    copy_order: str = "algorithm"
    positions: str = "sequential"
    exclude_token_ids: tuple[int, ...] = ()
    keep_image_tokens: float | None = None

    def __post_init__(self) -> None:
        check_anchor_fields(self)
        check_kept_share(self.keep_image_tokens)

    @property
    def needs_prompt(self) -> bool:
        return True

    @property
    def is_identity(self) -> bool:
        return self.threshold >= 1 and not self._prunes and (self.compress is None or self.compress.is_identity)

    @property
    def _prunes(self) -> bool:
        return self.keep_image_tokens is not None and self.keep_image_tokens < 1

    def match(self, sequence: MultimodalSequence) -> BestPartner:
        """The best image token of every candidate text token."""
        texts, images = candidates(sequence, self.exclude_token_ids)
        return best_partner(sequence.embeds, texts, images, sequence.segments)

    def arrange(self, sequence: MultimodalSequence, cache: FusionCache | None) -> Layout | None:
        changed = self.compress is not None and not self.compress.is_identity
        if self.is_identity or sequence.image_features is None:
            return sequence.plain_layout() if changed else None
        texts, images = candidates(sequence, self.exclude_token_ids)
        best = best_partner(sequence.embeds, texts, images, sequence.segments)
        inserted = (best.cosine >= self.threshold) & (best.partner >= 0) & (self.threshold < 1)
        valid = sequence.valid
        if self._prunes:
            assert self.keep_image_tokens is not None
            anchored = torch.zeros_like(images).scatter_reduce(1, best.partner.clamp(min=0), inserted, reduce="amax")
            valid = valid & ~pruned_image_tokens(sequence, texts, images, anchored, self.keep_image_tokens)
        elif not bool(inserted.any()):
            return sequence.plain_layout() if changed else None
        layout = order_with_copies(valid, best.column, best.partner, inserted, self.copy_order)
        place_copies(layout, sequence, self.positions)
        return layout


def check_threshold(threshold: float) -> None:
    """ValueError unless ``threshold`` is a number of at least 0."""
    if not isinstance(threshold, (int, float)) or math.isnan(threshold) or threshold < 0:
        raise ValueError(f"threshold must be at least 0 (1 or more switches anchors off); got {threshold}")


def check_anchor_fields(fusion: Any) -> None:
    """Fields that both directions share."""
    check_threshold(fusion.threshold)
    if fusion.share is not None and not 0 < fusion.share <= 1:
        raise ValueError(f"share must be above 0 and at most 1 (0.1 copies a tenth of the tokens); got {fusion.share}")
    if fusion.copy_order not in COPY_ORDERS:
        raise ValueError(f"copy_order must be one of {', '.join(COPY_ORDERS)}; got {fusion.copy_order!r}")
    if fusion.positions not in POSITIONS:
        raise ValueError(f"positions must be one of {', '.join(POSITIONS)}; got {fusion.positions!r}")


def candidates(sequence: MultimodalSequence, exclude: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(B, L) masks of the text that may be copied and of the image tokens that it may be copied to.

    Both lie in the prompt, so that nothing of an answer, and no later image, can change what stands before it.
    """
    prompt, anchors = sequence.prompt_mask, sequence.anchor_mask
    texts = sequence.valid & ~sequence.is_image
    images = sequence.is_image
    if prompt is None and anchors is not None:
        later = anchors.flip(1).cumsum(1).flip(1)  # without a stated prompt it ends with the last candidate
        prompt = (later > 0) if sequence.segments is None else _before_last(anchors, sequence.segments)
    if prompt is not None:
        texts, images = texts & prompt, images & prompt
    if anchors is not None:
        texts = texts & anchors
    banned = torch.tensor([*sequence.special_ids, *exclude], device=texts.device)
    return texts & ~torch.isin(sequence.input_ids, banned), images


def _before_last(anchors: Tensor, segments: Tensor) -> Tensor:
    """Columns up to the last candidate of their own segment."""
    columns = torch.arange(anchors.shape[1], device=anchors.device).expand_as(anchors)
    last = torch.full_like(segments, -1).scatter_reduce(
        1, segments.clamp(min=0), torch.where(anchors, columns, -1), reduce="amax"
    )
    return columns <= last.gather(1, segments.clamp(min=0))


def place_copies(layout: Layout, sequence: MultimodalSequence, positions: str) -> None:
    """Positions of the fused order, where they are not simply counted.

    A copy shares its host's position with ``"inherit"`` and always under m-RoPE; decoding goes on from the original's
    position. Pause tokens take new positions, and everything behind them moves up.
    """
    user = sequence.user_positions()
    if positions == "sequential" and user.ndim == 2:
        return
    pause = layout.source >= sequence.input_ids.shape[1]
    moved = pause.cumsum(1)
    if sequence.segments is not None:  # a pause moves its own sample only
        segments = gather_by(sequence.segments, layout.host)
        before = torch.nn.functional.pad(segments[:, :-1], (1, 0), value=-2)
        moved = moved - torch.where(segments != before, moved - pause.long(), 0).cummax(1).values
    layout.position_ids = gather_by(user, layout.host).clamp(min=0) + moved
    layout.next_position = sequence.following_position() + pause.sum(1)
