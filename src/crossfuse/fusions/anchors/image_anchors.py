"""ImageAnchors: AttAnchor's image-into-text direction, with optional pause tokens ("think mode")."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from crossfuse.fusion import Fusion
from crossfuse.fusions.anchors.order import order_with_copies
from crossfuse.fusions.anchors.similarity import BestPartner, best_partner
from crossfuse.fusions.anchors.text_anchors import candidates, check_anchor_fields, place_copies

if TYPE_CHECKING:
    from torch import nn

    from crossfuse.backbones.base import Backbone
    from crossfuse.sequence import Layout, MultimodalSequence
    from crossfuse.streaming.cache import FusionCache


@dataclasses.dataclass(frozen=True)
class ImageAnchors(Fusion):
    """Copies each image token behind the prompt token that it resembles most, if their cosine reaches ``threshold``.

    threshold, share, copy_order, positions, exclude_token_ids: as in `TextAnchors`.
    pause_tokens: this many pause tokens between prompt and answer: before every supervised answer in training, at the
    end of the prompt in ``generate``. Their embedding is the pad token's, or ``pause_token_id``'s.
    """

    name: ClassVar[str] = "image-anchors"

    threshold: float = 0.12
    share: float | None = None
    copy_order: str = "algorithm"
    positions: str = "sequential"
    exclude_token_ids: tuple[int, ...] = ()
    pause_tokens: int = 0
    pause_token_id: int | None = None

    def __post_init__(self) -> None:
        check_anchor_fields(self)
        if isinstance(self.pause_tokens, bool) or not isinstance(self.pause_tokens, int) or self.pause_tokens < 0:
            raise ValueError(f"pause_tokens must be at least 0 (0 switches them off); got {self.pause_tokens!r}")

    @property
    def needs_prompt(self) -> bool:
        return True

    @property
    def is_identity(self) -> bool:
        compressed = self.compress is not None and not self.compress.is_identity
        return self.threshold >= 1 and self.pause_tokens == 0 and not compressed

    def check_model(self, backbone: Backbone, model: nn.Module) -> None:
        if self.pause_tokens:
            object.__setattr__(self, "pause_token_id", _pause_id(self.pause_token_id, backbone.body(model).config))

    def match(self, sequence: MultimodalSequence) -> BestPartner:
        """The best prompt token of every candidate image token."""
        texts, images = candidates(sequence, self.exclude_token_ids)
        return best_partner(sequence.embeds, images, texts, sequence.segments)

    def arrange(self, sequence: MultimodalSequence, cache: FusionCache | None) -> Layout | None:
        changed = self.compress is not None and not self.compress.is_identity
        pauses = self._pauses_after(sequence)
        if self.threshold < 1 and sequence.image_features is not None:
            best = self.match(sequence)
            copied, after = best.column, best.partner
            inserted = (best.cosine >= self.threshold) & (after >= 0)
        else:
            copied = after = torch.zeros(len(sequence.input_ids), 0, dtype=torch.long, device=sequence.input_ids.device)
            inserted = copied.bool()
        if pauses is None and not bool(inserted.any()):
            return sequence.plain_layout() if changed else None
        layout = order_with_copies(sequence.valid, copied, after, inserted, self.copy_order, pauses)
        if pauses is not None:
            assert self.pause_token_id is not None
            layout.extra_token_ids = (self.pause_token_id,)
        place_copies(layout, sequence, self.positions)
        return layout

    def _pauses_after(self, sequence: MultimodalSequence) -> Tensor | None:
        """(B, P) hosts of pause tokens: the last prompt token, and the token before every supervised answer."""
        if not self.pause_tokens:
            return None
        columns = torch.arange(sequence.input_ids.shape[1], device=sequence.input_ids.device)
        if sequence.answer_starts is not None:
            ends = torch.nn.functional.pad(sequence.answer_starts[:, 1:], (0, 1), value=False) & sequence.valid
        elif sequence.prompt_mask is not None:
            prompt = sequence.prompt_mask & sequence.valid
            owner = sequence.segment_index  # each sample of a packed row has a prompt of its own
            last = torch.full_like(owner, -1).scatter_reduce(1, owner, torch.where(prompt, columns, -1), reduce="amax")
            ends = prompt & (columns == last.gather(1, owner))
        else:
            return None
        most = int(ends.sum(1).max())
        if not most:
            return None
        hosts = torch.where(ends, columns, -1).topk(most, dim=1).values
        return hosts.repeat_interleave(self.pause_tokens, dim=1)


def _pause_id(given: int | None, config: Any) -> int:
    """The token whose embedding a pause token has; ValueError where the pad token cannot serve."""
    if given is not None:
        return given
    owners = (config.get_text_config(), config)
    pad = next((v for v in (getattr(o, "pad_token_id", None) for o in owners) if v is not None), None)
    if pad is None:
        raise ValueError(
            "pause tokens use the pad token's embedding, and this model has no pad token; give pause_token_id"
        )
    for owner in owners:
        eos = getattr(owner, "eos_token_id", None)
        if pad in (eos if isinstance(eos, (list, tuple)) else [eos]):
            raise ValueError(f"the pad token {pad} is the end-of-text token, a poor pause; give pause_token_id")
    return int(pad)
