"""GumbelReorder: the order of image and prompt tokens is learned (AttAnchor, App. J.1)."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from crossfuse.fusion import Fusion
from crossfuse.fusions.anchors.text_anchors import candidates
from crossfuse.fusions.positions.base import layout_in_place
from crossfuse.fusions.reorder.sinkhorn import best_order, gumbel_sinkhorn
from crossfuse.sequence import Layout, gather_by

if TYPE_CHECKING:
    from torch import nn

    from crossfuse.backbones.base import Backbone
    from crossfuse.sequence import MultimodalSequence
    from crossfuse.streaming.cache import FusionCache

SCORES = ("learned", "identity")


@dataclasses.dataclass(frozen=True)
class GumbelReorder(Fusion):
    """A small transformer reads image and prompt and gives each token a score for each of their places.

    In training the tokens are mixed by a soft permutation (Gumbel-Sinkhorn, the temperature falls), in evaluation they
    are put in the order of the largest total score (the assignment problem). Only places change hands: what stands at a
    place gets the place's position, special tokens keep theirs, answers are never read and never move. Samples without
    an image stay as they are.

    score: ``"identity"`` is the fixed order of the input: the unfused model bit for bit, without new weights.
    width, depth, heads: of the scoring transformer.
    iterations: of Sinkhorn's normalisation; two matrices of L × L floats each are kept for the backward pass.
    temperature, final_temperature, anneal_steps: the temperature falls by the same factor with each training forward.
    noise: scale of the Gumbel noise in training; 0 draws none.
    identity_start: what the scores of staying in place have in advance; 0 lets training begin at any order.
    """

    name: ClassVar[str] = "gumbel-reorder"

    score: str = "learned"
    width: int = 64
    depth: int = 2
    heads: int = 4
    iterations: int = 20
    temperature: float = 1.0
    final_temperature: float = 0.1
    anneal_steps: int = 1000
    noise: float = 1.0
    identity_start: float = 0.0

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise ValueError(f"score must be one of {', '.join(SCORES)}; got {self.score!r}")
        for name, least in (("width", 2), ("depth", 1), ("heads", 1), ("iterations", 1), ("anneal_steps", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}; got {value!r}")
        if self.width % 2 or self.width % self.heads:
            raise ValueError(f"width must be even and a multiple of heads={self.heads}; got {self.width}")
        for name in ("temperature", "final_temperature"):
            if not _number(getattr(self, name)) or getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0 (near 0 the order is hard); got {getattr(self, name)!r}")
        if not _number(self.noise) or self.noise < 0:
            raise ValueError(f"noise must be at least 0 (0 draws none); got {self.noise!r}")
        if not _number(self.identity_start):
            raise ValueError(f"identity_start must be a number; got {self.identity_start!r}")

    @property
    def needs_prompt(self) -> bool:
        return self.score != "identity"

    @property
    def is_identity(self) -> bool:
        return self.score == "identity" and self.active_compression is None

    def attach(self, backbone: Backbone, model: nn.Module) -> None:
        from crossfuse.fusions.reorder.scorer import ReorderScorer

        if self.score == "identity":
            return
        body = backbone.body(model)
        table = body.get_input_embeddings().weight
        body.cross = ReorderScorer(self, table.shape[1]).to(table.device, table.dtype).train(body.training)

    def detach(self, backbone: Backbone, model: nn.Module) -> None:
        backbone.body(model)._modules.pop("cross", None)

    def arrange(self, sequence: MultimodalSequence, cache: FusionCache | None) -> Layout | None:
        idle = sequence.image_features is None and sequence.dummy_features is None
        if self.score == "identity" or idle:
            return None if self.active_compression is None else layout_in_place(sequence)
        movable = movable_tokens(sequence)
        plain = layout_in_place(sequence)
        # A training step in which nothing moves goes through the network all the same, so that ranks stay in step.
        taken = movable if bool(movable.any()) else sequence.valid
        moved = gather_by(taken.long(), plain.host) > 0
        source = torch.where(moved, plain.host + sequence.input_ids.shape[1], plain.host)
        samples = Samples(sequence, movable)
        return ReorderLayout(source, plain.host, plain.position_ids, plain.next_position, samples=samples)

    def extra_embeddings(self, backbone: Backbone, body: Any, layout: Layout) -> Tensor | None:
        """(B, L, d): what stands at each place of the input."""
        samples = getattr(layout, "samples", None)
        return None if samples is None else reordered(self, body.cross, samples, body.training)


@dataclasses.dataclass(eq=False)
class ReorderLayout(Layout):
    """A layout whose tokens at source L + i are what stands at column i after reordering."""

    samples: Samples | None = None


class Samples:
    """The movable tokens of a batch, one row for each sample: S samples, K tokens of the longest."""

    def __init__(self, sequence: MultimodalSequence, movable: Tensor):
        self.sequence = sequence
        self.row, self.column = movable.nonzero(as_tuple=True)
        segment = sequence.segment_index[self.row, self.column]
        name = self.row * (int(segment.max()) + 1 if len(segment) else 1) + segment
        _, self.sample, counts = name.unique_consecutive(return_inverse=True, return_counts=True)
        first = counts.cumsum(0) - counts
        self.place = torch.arange(len(name), device=name.device) - first[self.sample]
        places = torch.arange(int(counts.max()) if len(counts) else 0, device=name.device)
        self.mask = places < counts[:, None]  # (S, K) bool
        index = (first[:, None] + places).clamp(max=max(len(name) - 1, 0))
        self.tokens = sequence.embeds[self.row, self.column][index].masked_fill(~self.mask[..., None], 0)  # (S, K, d)
        self.is_image = sequence.is_image[self.row, self.column][index] & self.mask

    def put_back(self, tokens: Tensor) -> Tensor:
        """(S, K, d) tokens at the places -> (B, L, d) embeddings of the whole input."""
        embeds = self.sequence.embeds
        return embeds.index_put((self.row, self.column), tokens[self.sample, self.place].to(embeds.dtype))


def movable_tokens(sequence: MultimodalSequence) -> Tensor:
    """(B, L) bool: image tokens and text of the prompt, without special tokens, of the samples that have an image."""
    texts, images = candidates(sequence, ())
    owner = sequence.segment_index
    samples = int(owner.max()) + 1 if owner.numel() else 1
    counted = torch.zeros(len(owner), samples, dtype=torch.long, device=owner.device)
    return (texts | images) & (counted.scatter_add(1, owner, images.long()).gather(1, owner) > 0)


def reordered(fusion: GumbelReorder, scorer: Any, samples: Samples, training: bool) -> Tensor:
    """(B, L, d) embeddings in the soft (training) or hard (evaluation) order."""
    embeds = samples.sequence.embeds
    if not len(samples.mask):
        if not training:
            return embeds
        two = torch.ones(1, min(2, embeds.shape[1]), dtype=torch.bool, device=embeds.device)
        scores, _ = scorer(embeds[:1, : two.shape[1]], ~two, two)
        return embeds + 0.0 * scores.sum().to(embeds)
    scores, temperature = scorer(samples.tokens, samples.is_image, samples.mask)
    scores = scores.to(embeds.device)  # the network may stand on another device
    if not training:
        order = best_order(scores, samples.mask)
        return samples.put_back(samples.tokens.gather(1, order[..., None].expand_as(samples.tokens)))
    soft = gumbel_sinkhorn(scores, samples.mask, temperature, fusion.iterations, fusion.noise)
    return samples.put_back(soft @ samples.tokens.float())


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
