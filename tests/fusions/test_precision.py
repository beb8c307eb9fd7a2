"""Half precision and autocast: cosines stay float32, losses stay near float32, gradients stay finite."""

from __future__ import annotations

import pytest
import torch

import crossfuse as xf
from crossfuse.fusions.anchors.similarity import best_partner
from matrix import every_fusion
from tiny import I, batch, llava


def supervised():
    inputs = batch([2, I, 5], [1, I, 2, I, 4], [6])
    labels = inputs["input_ids"].clone()
    labels[:, :-2] = -100
    return {**inputs, "labels": labels}


def test_matching_is_float32_under_autocast():
    embeds = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(0))
    image = torch.arange(9).expand(2, 9) < 5
    alone = best_partner(embeds, ~image, image)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = best_partner(embeds, ~image, image)
    assert inside.cosine.dtype is torch.float32
    assert torch.equal(alone.cosine, inside.cosine)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_fusion
def test_half_precision_losses_are_near_float32(fusion, dtype):
    inputs = supervised()
    exact = xf.fuse(llava(), fusion)(**inputs).loss
    model = xf.fuse(llava(), fusion).to(dtype)
    assert {p.dtype for p in xf.fusion_parameters(model).values()} <= {dtype}
    loss = model(**inputs).loss
    assert torch.isfinite(loss)
    assert loss.item() == pytest.approx(exact.item(), rel=0.25)


@every_fusion
def test_autocast_training_gives_finite_gradients(fusion):
    model = xf.fuse(llava(), fusion).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**supervised(), use_cache=False).loss
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert gradients
    assert all(torch.isfinite(g).all() for g in gradients)
