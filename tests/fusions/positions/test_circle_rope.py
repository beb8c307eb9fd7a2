"""CircleRoPE: each text token is equally far from all tokens of an image; all else keeps its positions."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_qwen import IMAGE, VIDEO, batch, qwen

import crossfuse as xf
from crossfuse.fusions.positions.circle import CircleAttention
from crossfuse.fusions.positions.circle_geometry import circle_positions
from tiny import llava

SHAPES = [(1, 1), (1, 7), (5, 1), (2, 3), (8, 8), (9, 14)]


def grid_at(start: int, rows: int, columns: int, time: int = 0) -> torch.Tensor:
    """(3, rows * columns): an image of Qwen2.5-VL that begins at position ``start``."""
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.stack([torch.full_like(row, time), row, column]).flatten(1) + start


def one(grid: torch.Tensor, alpha: float = 0.5, radius: float | None = 10.0) -> torch.Tensor:
    return circle_positions(grid, torch.zeros(grid.shape[1], dtype=torch.long), alpha, radius)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("radius", [0.5, 10.0, None])
def test_every_text_token_is_equally_far_from_all_image_tokens(shape, alpha, radius):
    """Circle-RoPE's per-token distance: the spread is 0 to 1e-5, at any distance in the stream."""
    placed = one(grid_at(1000, *shape), alpha, radius)
    for position in (0, 999, 1000 + max(shape), 5000):
        distance = (placed - position).pow(2).sum(0).sqrt()
        assert distance.max() - distance.min() < 1e-5


def test_grid_positions_are_not_equally_far():
    """The unfused model's grid has what the circle takes away."""
    distance = (grid_at(10, 4, 6).double() - 30).pow(2).sum(0).sqrt()
    assert distance.max() - distance.min() > 1


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_tokens_stand_at_the_mixed_angle_on_the_circle(alpha):
    """Each angle by hand: from the centre of the grid, scaled to a full turn, and from the grid index."""
    rows, columns, start, radius = 3, 4, 20, 2.5
    placed = one(grid_at(start, rows, columns), alpha, radius)
    spatial = [math.atan2(r - 1, c - 1.5) for r in range(rows) for c in range(columns)]
    low, high = min(spatial), max(spatial)
    u, v = torch.tensor([0, 1, -1]) / math.sqrt(2), torch.tensor([2, -1, -1]) / math.sqrt(6)
    centre = start + (0 + 1 + 1.5) / 3
    for index, angle in enumerate(spatial):
        theta = alpha * (angle - low) / (high - low) * 2 * math.pi + (1 - alpha) * index / 12 * 2 * math.pi
        expected = centre + radius * (math.cos(theta) * u + math.sin(theta) * v)
        torch.testing.assert_close(placed[:, index], expected.double(), atol=1e-5, rtol=0)
    if alpha < 1:  # the direction alone is the same for tokens in line with the centre
        assert len({tuple(p) for p in placed.T.round(decimals=4).tolist()}) == rows * columns


def test_radius_none_is_half_the_longer_side_and_items_do_not_mix():
    small, large = grid_at(3, 2, 5), grid_at(30, 9, 3)
    item = torch.tensor([0] * 10 + [1] * 27)
    together = circle_positions(torch.cat([small, large], 1), item, 0.5, None)
    torch.testing.assert_close(together[:, :10], one(small, 0.5, None))
    torch.testing.assert_close(together[:, 10:], one(large, 0.5, None))
    for part, radius in ((together[:, :10], 2.0), (together[:, 10:], 4.0)):
        off_axis = part - part.mean(0)
        torch.testing.assert_close(off_axis.norm(dim=0), torch.full_like(off_axis[0], radius))


def test_each_frame_of_a_video_has_a_circle_of_its_own():
    frames = torch.cat([grid_at(7, 2, 3, time) for time in (0, 2)], 1)
    placed = one(frames)
    axis = placed.mean(0)
    torch.testing.assert_close(axis[6:] - axis[:6], torch.full((6,), 2 / 3, dtype=torch.double))
    distance = (placed - 40).pow(2).sum(0).sqrt().view(2, 6)
    assert (distance.amax(1) - distance.amin(1)).max() < 1e-5


def test_all_layers_equal_the_unfused_model_at_circle_positions():
    """Stock decoder, float positions: the fusion does this and nothing else."""
    inputs, plain = batch([3, (4, 6), 4, (2, 4, 4), 3]), qwen()
    body = plain.model
    positions, _ = body.get_rope_index(
        inputs["input_ids"], inputs["mm_token_type_ids"], inputs["image_grid_thw"], inputs["video_grid_thw"],
        second_per_grid_ts=inputs["second_per_grid_ts"], attention_mask=inputs["attention_mask"],
    )  # fmt: skip
    model = xf.fuse(qwen(), xf.CircleRoPE(alpha=0.4, radius=3.0))
    positions = model.model._backbone.mended_positions(
        model.model, inputs["input_ids"], positions, inputs["attention_mask"].bool()
    )
    ids = inputs["input_ids"][0]
    placed = positions.double()
    for kind in (IMAGE, VIDEO):
        placed[:, 0, ids == kind] = one(positions[:, 0, ids == kind], 0.4, 3.0)
    text = (ids != IMAGE) & (ids != VIDEO)
    assert torch.equal(placed[:, 0, text], positions[:, 0, text].double())
    with torch.no_grad():
        expected = plain(**inputs, position_ids=placed, use_cache=False).logits
        found = model(**inputs, use_cache=False).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_alternation_keeps_the_original_positions_in_every_second_layer():
    inputs = batch([3, (4, 6), 4])
    alternating = xf.fuse(qwen(), xf.CircleRoPE(alternate=True))
    layers = alternating.model.language_model.layers
    assert [isinstance(layer.self_attn, CircleAttention) for layer in layers] == [True, False, True]
    with torch.no_grad():
        out = alternating(**inputs).logits
        assert torch.equal(out, xf.fuse(qwen(), xf.CircleRoPE(layers=(0, 2)))(**inputs).logits)
        assert not torch.allclose(out, xf.fuse(qwen(), xf.CircleRoPE())(**inputs).logits, atol=1e-3)


def test_fields_and_models_that_do_not_fit_are_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"alpha must lie between 0 .* got 1.5"):
        xf.CircleRoPE(alpha=1.5)
    for radius in (0, -1.0, math.inf, True):
        with pytest.raises(ValueError, match=r"radius must be above 0, or None .* got"):
            xf.CircleRoPE(radius=radius)
    with pytest.raises(ValueError, match=r"three rows \(m-RoPE\).*use modality-rope there"):
        xf.fuse(llava(), xf.CircleRoPE())
    with pytest.raises(ValueError, match="layers must be below 3, the number of blocks; got 3"):
        xf.fuse(qwen(), xf.CircleRoPE(layers=(0, 3)))
    with pytest.raises(ValueError, match="did you mean 'radius'"):
        xf.make_fusion("circle-rope", radious=2)
