"""Attention gain: what an anchor changes for a text token and its best image token, per layer and head.

AttAnchor's theorem bounds the gain of attention between a text token and an image token by exp(ΔP / √d), where P is the
rotary score and ΔP its change by standing closer. It speaks of one query at two places with the same keys. That is the
*copy* against the original in layer 0, where both have the same embedding, over the keys that both see. The original
itself does not move closer (with sequential positions it even moves away by the number of copies). Deeper layers see
states that already differ: there the tool reports and bounds nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from crossfuse.analysis.attention_scores import Attended, without_and_with_anchors


@dataclasses.dataclass(frozen=True, eq=False)
class AnchorGain:
    """One anchor. Tensors (layers, H) unless noted; scores are q·k / √d before the softmax, masses after it."""

    token_index: int
    image_column: int
    distance_without: float  # from the token to its image token, in positions (m-RoPE: the largest of the three axes)
    distance_copy: float
    scores_without: Tensor  # the token's row in the unfused model
    scores_original: Tensor  # the original's row in the fused model
    scores_copy: Tensor  # the copy's row in the fused model
    mass_without: Tensor
    mass_original: Tensor
    mass_copy: Tensor
    bound: Tensor  # (H,) exp(ΔP / √d) in layer 0; NaN where the original stands before its image token
    gain: Tensor  # (H,) mass of the copy over mass of the original on the image token, over their common keys, layer 0


@dataclasses.dataclass(frozen=True)
class GainSummary:
    """Means over anchors, layers and heads; ``layers`` holds (mass without, of the original, of the copy) per layer."""

    anchors: int
    distance_without: float
    distance_copy: float
    closer_scores_higher: float  # share of (anchor, head) in layer 0 where the copy's score is the higher one
    bound_reached: float  # share of (anchor, head) in layer 0 whose gain reaches the bound
    median_gain: float
    median_bound: float
    layers: tuple[tuple[float, float, float], ...]


@torch.no_grad()
def attention_gain(model: Any, inputs: dict[str, Any]) -> list[AnchorGain]:
    """The anchors of one sample, with and without. ``model`` is fused with `TextAnchors`; it is fused so afterwards
    too.

    inputs: a processor's output of batch 1 without padding. Raises ValueError for other fusions and batches.
    """
    plain, fused_run = without_and_with_anchors(model, inputs, "attention gain")
    gains = []
    for place, (token, host) in enumerate(zip(fused_run.source, fused_run.host, strict=True)):
        if token != host:
            gains.append(_gain(plain, fused_run, token, host, place))
    return gains


def summarise(gains: list[AnchorGain]) -> GainSummary | None:
    """Over the anchors of any number of samples; None without anchors."""
    if not gains:
        return None
    bound, gain = torch.stack([g.bound for g in gains]), torch.stack([g.gain for g in gains])
    known = torch.isfinite(bound)
    bound, gain = bound[known], gain[known]
    parts = [torch.stack([getattr(g, n) for g in gains]) for n in ("mass_without", "mass_original", "mass_copy")]
    means = [part.mean((0, 2)).tolist() for part in parts]
    empty = float("nan")
    return GainSummary(
        anchors=len(gains),
        distance_without=sum(g.distance_without for g in gains) / len(gains),
        distance_copy=sum(g.distance_copy for g in gains) / len(gains),
        closer_scores_higher=float((bound > 1).float().mean()) if len(bound) else empty,
        # Rounding aside: where every other key scores the same, gain and bound are equal.
        bound_reached=float((gain >= bound * (1 - 1e-5)).float().mean()) if len(bound) else empty,
        median_gain=float(gain.median()) if len(bound) else empty,
        median_bound=float(bound.median()) if len(bound) else empty,
        layers=tuple(zip(*means, strict=True)),  # type: ignore[arg-type]
    )


def _gain(plain: Attended, fused_run: Attended, token: int, image: int, copy: int) -> AnchorGain:
    target, original = fused_run.original(image), fused_run.original(token)
    rows = [
        (plain, plain.original(token), plain.original(image)),
        (fused_run, original, target),
        (fused_run, copy, target),
    ]
    scores, masses = [], []
    for run, row, key in rows:
        seen = key <= row  # text before its image does not see it
        nothing = torch.full((len(run.layers), len(run.layers[0].query)), float("nan"))
        scores.append(torch.stack([layer.scores(row)[:, key] for layer in run.layers]) if seen else nothing)
        masses.append(torch.stack([layer.mass(row)[:, key] for layer in run.layers]) if seen else nothing.fill_(0))
    first = fused_run.layers[0]
    bound = gain = torch.full((len(first.query),), float("nan"))
    common = min(copy, original) + 1
    if target < common:
        at_copy, at_original = first.scores(copy, common), first.scores(original, common)
        bound = (at_copy[:, target] - at_original[:, target]).exp()
        gain = at_copy.softmax(-1)[:, target] / at_original.softmax(-1)[:, target]
    return AnchorGain(
        token_index=token,
        image_column=image,
        distance_without=_distance(plain, *rows[0][1:]),
        distance_copy=_distance(fused_run, copy, target),
        scores_without=scores[0],
        scores_original=scores[1],
        scores_copy=scores[2],
        mass_without=masses[0],
        mass_original=masses[1],
        mass_copy=masses[2],
        bound=bound,
        gain=gain,
    )


def _distance(run: Attended, row: int, key: int) -> float:
    difference = (run.positions[..., row] - run.positions[..., key]).abs()
    return float(difference.max())
