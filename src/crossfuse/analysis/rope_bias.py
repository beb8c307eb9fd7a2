"""The distance bias of rotary embeddings: how much a score falls by distance alone, for a model's own frequencies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from crossfuse.devices import input_device


@torch.no_grad()
def rope_distance_bias(model: Any, distances: Sequence[int]) -> dict[str, Tensor]:
    """Mean score of two equal unit vectors against the distance between their positions, 1 at distance 0.

    Over all directions of q = k that mean is (2 / D) Σ cos(Δ θ_i), whatever the content: what a model's rotary
    embedding makes of distance by itself. It is computed by the model's own rotary module (scaling rules included).

    distances: any integers. Returns ``{"sequence": (n,)}``; for m-RoPE ``"time"``, ``"height"``, ``"width"`` (distance
    along that axis alone) and ``"sequence"`` (along all three, as text has it).
    """
    from crossfuse.api import fusion_of
    from crossfuse.backbones import backbone_for

    backbone = model.model._backbone if fusion_of(model) is not None else backbone_for(model)
    decoder = backbone.decoder(backbone.body(model))
    attention = decoder.layers[0].self_attn
    places = torch.tensor(list(distances), device=input_device(model))
    count, width = len(places), attention.head_dim
    axes = {"sequence": (1, 1, 1)}
    if backbone.mrope:
        axes |= {"time": (1, 0, 0), "height": (0, 1, 0), "width": (0, 0, 1)}
    found = {}
    for name, along in axes.items():
        positions = places[None]
        if backbone.mrope:
            positions = torch.tensor(along, device=places.device)[:, None, None] * places
        here = torch.full((1, count, 1, width), width**-0.5, device=places.device)
        cos, sin = decoder.rotary_emb(here[:, :, 0], positions)
        far = backbone.rotate(attention, here, cos, sin)
        cos, sin = decoder.rotary_emb(here[:, :, 0], torch.zeros_like(positions))
        near = backbone.rotate(attention, here, cos, sin)
        # Equal entries: a pair (1, 1) turned by an angle a against itself gives 2 cos a, the mean over directions.
        found[name] = ((near * far).sum(-1)[0, :, 0] / (near * near).sum(-1)[0, :, 0]).cpu()
    return found
