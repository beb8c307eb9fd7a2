"""ModalityRoPE: two rotary indices per token (AttAnchor, App. J.2)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from crossfuse.fusions.positions.base import PositionFusion, layout_in_place
from crossfuse.fusions.positions.indices import MODALITIES, TEXT, ModalityIndices, modality_indices
from crossfuse.fusions.positions.modality_attention import ModalityAttention, ModalityContext
from crossfuse.sequence import gather_by

if TYPE_CHECKING:
    from torch import nn

    from crossfuse.backbones.base import Backbone
    from crossfuse.sequence import FusedInputs, Layout, MultimodalSequence
    from crossfuse.streaming.cache import FusionCache


@dataclasses.dataclass(frozen=True)
class ModalityRoPE(PositionFusion):
    """Tokens of one modality see each other at their distance inside it, tokens of different modalities at one step.

    Each token has a position inside its modality (text, image or video) and the ordinal of its modality in the input
    (0 for the one that the sample starts with). A pair of the same modality uses the difference of the first, a pair of
    different modalities that of the second, so the distance between text and image does not grow with either.
    Under m-RoPE an image keeps its grid, and its grid follows that of the image before; the ordinal counts on all three
    rows.

    layers: the blocks that use it; None for all, ``()`` for none, which is the unfused model bit for bit.
    """

    name: ClassVar[str] = "modality-rope"
    attention_mixin = ModalityAttention

    layers: tuple[int, ...] | None = (0,)

    @property
    def streams(self) -> bool:
        # Eviction moves all that follows by the same distance, but no token of another modality should move.
        return self.layers == ()

    def check_attention(self, attention: Any) -> None:
        name = type(attention).__name__
        missing = [
            part
            for part in ("q_proj", "k_proj", "v_proj", "o_proj", "head_dim", "scaling")
            if not hasattr(attention, part)
        ]
        if missing:
            raise ValueError(f"{name} has no {', '.join(missing)}; modality-rope needs a decoder built like Llama")
        for attribute in ("attn_logit_softcapping", "sinks"):
            if getattr(attention, attribute, None) is not None:
                raise ValueError(f"{name} uses {attribute}, which modality-rope would have to ignore; not supported")
        norm = getattr(attention, "q_norm", None)
        if norm is not None and norm.weight.shape[-1] != attention.head_dim:
            raise ValueError(f"{name} normalises all heads at once, which modality-rope does not know; not supported")

    def arrange(self, sequence: MultimodalSequence, cache: FusionCache | None) -> Layout | None:
        if sequence.image_features is None and cache is None and sequence.segments is None:
            return None  # text alone, and nothing that follows it
        return layout_in_place(sequence)

    def prepare(
        self, backbone: Backbone, body: nn.Module, fused: FusedInputs, cache: FusionCache | None
    ) -> ModalityContext | None:
        decoder = backbone.decoder(body)
        chosen = self.layer_indices(len(decoder.layers))
        if not chosen:
            return None
        past, past_mask = None, None
        if cache is not None and cache.fused_length:
            past, past_mask = _cached(cache, chosen[0]), cache.mask
        rows = 3 if backbone.mrope else 1
        own = modality_indices(fused.sequence, rows, past, past_mask)
        host = fused.layout.host
        within, ordinal, modality = (gather_by(t, host).clamp(min=0) for t in (own.within, own.ordinal, own.modality))
        new = ModalityIndices(within, ordinal, modality)
        keys, key_mask = new, fused.attention_mask
        if past is not None and past_mask is not None:
            keys = ModalityIndices.unpacked(torch.cat([past.packed(), new.packed()], 1))
            key_mask = torch.cat([past_mask, key_mask], 1)
        seen = [m for m in MODALITIES if bool(((keys.modality == m) & key_mask).any())] or [TEXT]
        asking = [m for m in seen if bool(((modality == m) & fused.attention_mask).any())] or [TEXT]
        embeds = fused.inputs_embeds
        return ModalityContext(
            backbone=backbone,
            within_rope=decoder.rotary_emb(embeds, within if rows == 3 else within[0]),
            between_rope=decoder.rotary_emb(embeds, ordinal.expand(3, -1, -1) if rows == 3 else ordinal),
            query_modality=modality,
            key_modality=keys.modality,
            asking=tuple(asking),
            mixed=len(seen) > 1,
            state=keys.packed(),
        )


def _cached(cache: FusionCache, layer: int) -> ModalityIndices:
    """The indices of what the cache holds. ValueError where the cache was shortened at its front or taken apart."""
    held: Tensor | None = cache.layers[layer].text_values  # type: ignore[union-attr]
    assert cache.mask is not None
    if held is not None and held.shape[1] == cache.fused_length:
        past = ModalityIndices.unpacked(held.to(cache.mask.device))
        text = (past.modality == TEXT) & cache.mask
        if torch.equal(torch.where(text, past.within[0], -1).amax(1) + 1, text.sum(1)):
            return past
    raise ValueError(
        "the cache no longer holds the positions of modality-rope for every token (a stream evicted text or shared its "
        "cache); use max_text_tokens=None and one session a stream"
    )
