"""Mutual information between image and text tokens, from attention-weighted co-occurrence, before and after anchors.

The joint distribution of an image token and a text token is the attention that the text pays to the image, averaged
over layers and heads and normalised. Globally all image tokens and all prompt tokens count, locally only the anchors
and the image tokens around them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from crossfuse.analysis.attention_scores import Attended, without_and_with_anchors


@dataclasses.dataclass(frozen=True)
class InformationChange:
    """Nats. Local values are None without anchors."""

    global_without: float
    global_with: float
    local_without: float | None
    local_with: float | None
    anchors: int


def mutual_information(joint: Tensor) -> float:
    """Σ p(i, j) log(p(i, j) / p(i) p(j)) in nats of non-negative weights (I, J), normalised to a distribution.

    ValueError for negative weights or a sum of 0.
    """
    weights = joint.double()
    if bool((weights < 0).any()) or float(weights.sum()) <= 0:
        raise ValueError("co-occurrence weights must be at least 0 and not all 0")
    p = weights / weights.sum()
    expected = p.sum(1, keepdim=True) * p.sum(0, keepdim=True)
    return float(torch.where(p > 0, p * (p / expected).log(), 0.0).sum())


@torch.no_grad()
def information_change(model: Any, inputs: dict[str, Any], radius: int = 8) -> InformationChange:
    """Global and local mutual information of one sample, without and with the model's `TextAnchors`.

    The text side has one row per prompt token after the image; with anchors a token that was copied attends through its
    copy as well, and the two are added. Local: copied tokens × image tokens at most ``radius`` places from an anchor.
    """
    plain, fused_run = without_and_with_anchors(model, inputs, "mutual information")
    kept = set(fused_run.source)
    images = [c for c in plain.sequence.is_image[0].nonzero()[:, 0].tolist() if c in kept]
    if not images:
        raise ValueError("mutual information needs an image; this sample has none")
    texts = [c for c in range(images[0] + 1, len(plain.source)) if c not in set(images)]
    pairs = [(s, h) for s, h in zip(fused_run.source, fused_run.host, strict=True) if s != h]
    before, after = (_cooccurrence(run, texts, images) for run in (plain, fused_run))
    copied = [t for t in texts if any(s == t for s, _ in pairs)]
    near = [i for i, column in enumerate(images) if any(abs(i - images.index(h)) <= radius for _, h in pairs)]
    local_without = local_with = None
    if copied and near:
        rows = [texts.index(t) for t in copied]
        local_without, local_with = (mutual_information(joint[rows][:, near]) for joint in (before, after))
    return InformationChange(
        global_without=mutual_information(before),
        global_with=mutual_information(after),
        local_without=local_without,
        local_with=local_with,
        anchors=len(pairs),
    )


def _cooccurrence(run: Attended, texts: list[int], images: list[int]) -> Tensor:
    """(T, I) attention of text tokens (and of their copies) to image tokens, mean over layers and heads."""
    columns = torch.tensor([run.original(column) for column in images])
    joint = torch.zeros(len(texts), len(images))
    for n, text in enumerate(texts):
        copied = run.copy(text)
        for row in (run.original(text),) if copied is None else (run.original(text), copied):
            seen = columns <= row
            for layer in run.layers:
                joint[n, seen] += layer.mass(row)[:, columns[seen]].mean(0) / len(run.layers)
    return joint
