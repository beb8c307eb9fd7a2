"""Pre-softmax scores and attention of chosen query positions, layer by layer, whatever attention kernel the model runs.

Queries and keys are recomputed from what each self-attention receives, so no attention weights are asked of the model
and nothing grows with the square of the length. H query heads, F fused positions, D head width.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from crossfuse.devices import on_device_of
from crossfuse.fusions.anchors.explain import anchor_sequence
from crossfuse.fusions.anchors.text_anchors import TextAnchors
from crossfuse.sequence import Layout, MultimodalSequence


@dataclasses.dataclass(frozen=True, eq=False)
class LayerHeads:
    """Rotated queries and keys of one layer."""

    query: Tensor  # (H, F, D)
    key: Tensor  # (H, F, D), key heads repeated
    scale: float

    def scores(self, row: int, keys: int | None = None) -> Tensor:
        """(H, keys): q·k / √D of one query with the first ``keys`` positions; by default those that it may see."""
        end = row + 1 if keys is None else keys
        return torch.einsum("hd,hkd->hk", self.query[:, row], self.key[:, :end]) * self.scale

    def mass(self, row: int, keys: int | None = None) -> Tensor:
        """(H, keys): their softmax."""
        return self.scores(row, keys).softmax(-1)


@dataclasses.dataclass(frozen=True, eq=False)
class Attended:
    """One sample run through the decoder: its layers, and which input column stands at each position."""

    layers: list[LayerHeads]
    source: list[int]  # input column of each position
    host: list[int]  # column that the position belongs to: itself, or where a copy stands
    positions: Tensor  # (F,) or (3, F) long
    sequence: MultimodalSequence

    def original(self, column: int) -> int:
        """Position of an original token; ValueError where it was pruned."""
        for place, (source, host) in enumerate(zip(self.source, self.host, strict=True)):
            if source == column == host:
                return place
        raise ValueError(f"token {column} is not in the fused sequence")

    def copy(self, column: int) -> int | None:
        """Position of the copy of a token, or None."""
        pairs = zip(self.source, self.host, strict=True)
        return next((place for place, (s, h) in enumerate(pairs) if s == column != h), None)


def without_and_with_anchors(model: Any, inputs: dict[str, Any], subject: str) -> tuple[Attended, Attended]:
    """`attended` of one sample without and with the model's `TextAnchors`; the model is fused so afterwards too.

    ``subject`` names what is measured in the ValueError that other fusions raise.
    """
    from crossfuse.api import fuse, fusion_of, unfuse

    fusion = fusion_of(model)
    if not isinstance(fusion, TextAnchors):
        raise ValueError(f"{subject} compares a model with and without TextAnchors; it is fused with {fusion}")
    fused_run = attended(model, inputs)
    unfuse(model)
    try:
        return attended(model, inputs), fused_run
    finally:
        fuse(model, fusion)


@torch.no_grad()
def attended(model: Any, inputs: dict[str, Any]) -> Attended:
    """Run one sample (a processor's output of batch 1, without padding) and keep every layer's queries and keys.

    Raises ValueError for a batch, for padding and for cross-attention (its image tokens are not in the sequence).
    """
    from crossfuse.api import fusion_of
    from crossfuse.backbones import backbone_for

    ids = inputs["input_ids"]
    if len(ids) != 1 or not bool(inputs.get("attention_mask", torch.ones_like(ids)).all()):
        raise ValueError(f"attention is analysed one unpadded sample at a time; got a batch of {len(ids)}")
    fusion = fusion_of(model)
    given = on_device_of(model, {k: v for k, v in inputs.items() if k != "labels"})
    ids = given["input_ids"]
    sequence, _ = anchor_sequence(model, given)
    layout = None if fusion is None else fusion.arrange(sequence, None)
    layout = layout or sequence.plain_layout()
    if fusion is not None:
        given.setdefault("prompt_mask", torch.ones_like(ids, dtype=torch.bool))
        backbone = model.model._backbone
    else:
        backbone = backbone_for(model)
    decoder = backbone.decoder(backbone.body(model))
    layers: list[LayerHeads] = []

    def note(attention: Any, args: Any, kwargs: dict[str, Any]) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        layers.append(_heads(backbone, attention, hidden, *kwargs["position_embeddings"]))

    hooks = [layer.self_attn.register_forward_pre_hook(note, with_kwargs=True) for layer in decoder.layers]
    seen: dict[str, Any] = {}
    hooks.append(decoder.register_forward_pre_hook(lambda m, a, k: seen.update(k), with_kwargs=True))
    try:
        model(**given, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return Attended(layers, *_row(layout), _positions(seen.get("position_ids"), layout), sequence)


def _row(layout: Layout) -> tuple[list[int], list[int]]:
    real = layout.host[0] >= 0
    return layout.source[0, real].tolist(), layout.host[0, real].tolist()


def _positions(given: Tensor | None, layout: Layout) -> Tensor:
    if given is None:
        return torch.arange(layout.source.shape[1])
    return (given[0] if given.ndim == 2 else given[-3:, 0]).cpu()


def _heads(backbone: Any, attention: Any, hidden: Tensor, cos: Tensor, sin: Tensor) -> LayerHeads:
    def split(kind: str) -> Tensor:
        made = getattr(attention, f"{kind}_proj")(hidden).unflatten(-1, (-1, attention.head_dim))
        norm = getattr(attention, f"{kind}_norm", None)
        return backbone.rotate(attention, made if norm is None else norm(made), cos, sin)[0].float().cpu()

    query, key = split("q").transpose(0, 1), split("k").transpose(0, 1)
    scale = getattr(attention, "scaling", None) or attention.head_dim**-0.5
    return LayerHeads(query, key.repeat_interleave(len(query) // len(key), 0), float(scale))
