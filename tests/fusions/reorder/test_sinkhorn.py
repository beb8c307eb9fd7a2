"""Gumbel-Sinkhorn: doubly stochastic, hard in the limit, blind to padding; the assignment against all permutations."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossfuse.fusions.reorder.sinkhorn import best_order, gumbel_sinkhorn


def scores_of(samples: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(samples, length, length, generator=torch.Generator().manual_seed(seed)) * 2


def test_rows_and_columns_sum_to_one():
    soft = gumbel_sinkhorn(scores_of(3, 7), torch.ones(3, 7).bool(), 1.0, 300)
    assert soft.min() >= 0
    torch.testing.assert_close(soft.sum(1), torch.ones(3, 7), atol=1e-5, rtol=0)
    torch.testing.assert_close(soft.sum(2), torch.ones(3, 7), atol=1e-3, rtol=0)


def test_a_low_temperature_gives_the_assignment():
    """Where the best order leads by a clear margin; near a tie Sinkhorn takes as long as one likes."""
    wanted = torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(n)) for n in range(4)])
    scores = scores_of(4, 6) + 12 * torch.nn.functional.one_hot(wanted, 6)
    mask = torch.ones(4, 6).bool()
    assert torch.equal(best_order(scores, mask), wanted)
    soft = gumbel_sinkhorn(scores, mask, 0.1, 50, noise=0.0)
    torch.testing.assert_close(soft, torch.nn.functional.one_hot(wanted, 6).float(), atol=1e-4, rtol=0)


def test_a_high_temperature_mixes_everything():
    soft = gumbel_sinkhorn(scores_of(1, 5), torch.ones(1, 5).bool(), 1e4, 20, noise=0.0)
    torch.testing.assert_close(soft, torch.full((1, 5, 5), 0.2), atol=1e-3, rtol=0)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 5), st.integers(0, 1000))
def test_the_hard_order_is_the_best_of_all_permutations(length, seed):
    scores = scores_of(1, length, seed)
    order = best_order(scores, torch.ones(1, length).bool())[0]
    assert sorted(order.tolist()) == list(range(length))
    totals = [sum(scores[0, i, p[i]].item() for i in range(length)) for p in itertools.permutations(range(length))]
    assert scores[0, range(length), order].sum().item() == pytest.approx(max(totals), abs=1e-5)


def test_padding_neither_moves_nor_changes_the_rest():
    scores = scores_of(2, 6)
    mask = torch.tensor([[True] * 4 + [False] * 2, [True] * 6])
    soft = gumbel_sinkhorn(scores, mask, 0.7, 30, noise=0.0)
    alone = gumbel_sinkhorn(scores[:1, :4, :4], mask[:1, :4], 0.7, 30, noise=0.0)
    torch.testing.assert_close(soft[0, :4, :4], alone[0], atol=1e-6, rtol=0)
    assert torch.equal(soft[0, 4:, 4:], torch.eye(2))
    assert not soft[0, :4, 4:].any()
    order = best_order(scores, mask)
    assert order[0, 4:].tolist() == [4, 5]
    assert torch.equal(order[0, :4], best_order(scores[:1, :4, :4], mask[:1, :4])[0])


def test_noise_follows_the_seed_and_gradients_are_finite():
    scores, mask = scores_of(2, 8).requires_grad_(), torch.ones(2, 8).bool()
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws.append(gumbel_sinkhorn(scores, mask, 0.05, 20))
    assert torch.equal(draws[0], draws[1])
    assert not torch.allclose(draws[0], draws[2], atol=1e-2)
    (draws[0] * torch.arange(8.0)).sum().backward()
    assert torch.isfinite(scores.grad).all()
    assert scores.grad.any()


def test_diverged_scores_are_named():
    scores = scores_of(2, 3)
    scores[1, 0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"sample 1 hold NaN .* lower the learning rate"):
        best_order(scores, torch.ones(2, 3).bool())
