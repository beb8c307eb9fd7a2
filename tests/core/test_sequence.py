"""Layouts and the readout contract (design §1) against the literal definition."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossfuse.sequence import (
    block_causal_mask,
    count_positions,
    gather_by,
    left_padded,
    packed_segments,
    readout,
)
from matrix import every_fusion
from tiny import I, batch, fused

QUIET = settings(deadline=None, max_examples=80, derandomize=True)
BOOLS = st.lists(st.booleans(), min_size=1, max_size=9)


@st.composite
def hosts(draw):
    """(B, F) ascending hosts of left-padded rows over a common length L of original tokens."""
    length = draw(st.integers(1, 7))
    rows = draw(st.lists(st.lists(st.integers(0, length - 1), max_size=10), min_size=1, max_size=4))
    width = max(len(r) for r in rows)
    return torch.tensor([[-1] * (width - len(r)) + sorted(r) for r in rows]).view(len(rows), width), length


@QUIET
@given(hosts())
def test_readout_is_the_last_real_position_whose_host_is_not_later(case):
    host, length = case
    actual = readout(host, length)
    assert actual.shape == (len(host), length)
    for b, row in enumerate(host.tolist()):
        for j in range(length):
            places = [f for f, h in enumerate(row) if h >= 0 and h <= j]
            assert actual[b, j] == (places[-1] if places else -1)


@every_fusion
def test_readout_of_every_fusion_follows_the_contract(fusion):
    """Captured from the call: hosts ascend, padding comes first, and originals read out at their own place or after."""
    from crossfuse import fused_body

    model, inputs = fused(fusion), batch([2, I, 4], [3], [I, 1, I, 2])
    if fusion.needs_prompt:
        inputs["prompt_mask"] = torch.ones_like(inputs["input_ids"], dtype=torch.bool)
    seen, plain = [], fused_body.fuse_inputs
    fused_body.fuse_inputs = lambda *args, **kwargs: seen.append(plain(*args, **kwargs)) or seen[-1]
    try:
        model(**inputs, use_cache=False)
    finally:
        fused_body.fuse_inputs = plain
    if fusion.is_identity:
        assert not seen
        return
    (made,) = seen
    layout = made.layout
    for b, row in enumerate(layout.host.tolist()):
        real = [h for h in row if h >= 0]
        assert row == [-1] * (len(row) - len(real)) + sorted(real)
        assert made.attention_mask[b].tolist() == [h >= 0 for h in row]
        for j in range(inputs["input_ids"].shape[1]):
            places = [f for f, h in enumerate(row) if 0 <= h <= j]
            assert made.readout[b, j] == (places[-1] if places else -1)


@QUIET
@given(st.lists(BOOLS, min_size=1, max_size=4))
def test_left_padded_keeps_what_is_kept_in_order(rows):
    width = max(map(len, rows))
    keep = torch.tensor([r + [False] * (width - len(r)) for r in rows])
    values = torch.arange(width).expand_as(keep)
    found = left_padded(values, keep)
    longest = int(keep.sum(1).max())
    assert found.shape == (len(rows), longest)
    for out, row in zip(found.tolist(), keep.tolist(), strict=True):
        kept = [i for i, k in enumerate(row) if k]
        assert out == [-1] * (longest - len(kept)) + kept


@QUIET
@given(BOOLS, st.lists(st.integers(0, 2), min_size=9, max_size=9))
def test_positions_count_real_tokens_and_restart_at_segments(real, segments):
    segments = sorted(segments[: len(real)])
    expected, count, before = [], -1, None
    for token, segment in zip(real, segments, strict=True):
        if segment != before:
            count = -1
        before = segment
        count += token
        expected.append(max(count, 0))
    counted = count_positions(torch.tensor([real]), torch.tensor([segments]))[0].tolist()
    assert [c for c, r in zip(counted, real, strict=True) if r] == [e for e, r in zip(expected, real, strict=True) if r]


def test_gather_by_gives_minus_one_where_there_is_nothing():
    values = torch.tensor([[5, 6, 7]])
    assert gather_by(values, torch.tensor([[-1, 2, 0]])).tolist() == [[-1, 7, 5]]
    assert gather_by(values.expand(3, 1, 3), torch.tensor([[-1, 1]])).tolist() == [[[-1, 6]]] * 3


def test_packed_segments_reads_restarts():
    assert packed_segments(torch.arange(5)[None]) is None
    assert packed_segments(torch.tensor([[0, 1, 2, 0, 1]])).tolist() == [[0, 0, 0, 1, 1]]


def test_block_causal_mask_by_loops():
    segments = torch.tensor([[-1, 0, 0, 1, 1, 1]])
    mask = block_causal_mask(segments, None)[0, 0]
    bias = block_causal_mask(segments, torch.float32)[0, 0]
    for i in range(6):
        for j in range(6):
            assert bool(mask[i, j]) == (j <= i and segments[0, i] == segments[0, j])
            assert bias[i, j] == (0 if mask[i, j] else torch.finfo(torch.float32).min)
