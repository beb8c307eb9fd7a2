"""Bounded text: a model of one layer shows that what stays is seen as if it had been the whole stream.

With one layer, keys and values depend on their own token alone. So after eviction the logits must equal those of a
fresh forward over the tokens that are left, whatever was evicted and in which portions.
"""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import crossfuse as xf
import tiny
from crossfuse.streaming.eviction import TextBudget, _leaving
from crossfuse.streaming.sampling import Decoding
from crossfuse.streaming.session import StreamSession
from crossfuse.streaming.stream import Run
from matrix import name_of

LETTER = list(range(3, 60))
I = tiny.IMAGE  # noqa: E741


def left_after(ids: list[int], limit: int, sinks: int, block: int, calls: list[int]) -> list[int]:
    """Slow oracle: the ids that a cache holds after calls of these lengths, images as one item each."""
    kept: list[list[int]] = []
    items: list[list[int]] = []
    for token in ids:
        if token == I and items and items[-1][0] == I and len(items[-1]) < tiny.PATCHES:
            items[-1].append(token)
        else:
            items.append([token])
    for length in calls:
        new, count = [], 0
        while count < length:
            new.append(items.pop(0))
            count += len(new[-1])
        size = sum(map(len, kept))
        if size + count > limit:
            wanted = -(-(size + count - limit) // block) * block
            first = next((n for n, item in enumerate(kept) if item[0] == I), len(kept))
            start = min(sinks, first)
            gone = 0
            while gone < wanted and len(kept) > start:
                gone += len(kept.pop(start))
        kept += new
    return [token for item in kept for token in item]


@pytest.mark.parametrize("block", [1, 5, 32, 60])
@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_w3_text_left_over_is_seen_as_a_fresh_prefix(block, sinks, kind, fused, processor):
    model = fused(xf.CrossAttention(), layers=1, text=kind)
    session = StreamSession(model, processor, max_text_tokens=64, sink_tokens=sinks, block_tokens=block)
    draw = torch.Generator().manual_seed(block)
    ids = torch.randint(3, tiny.VOCABULARY, (200,), generator=draw).tolist()
    calls = []
    while sum(calls) < 200:
        calls.append(min([7, 1, 1, 20, 3][len(calls) % 5], 200 - sum(calls)))
    done = 0
    for length in calls:
        session.add_text(ids[done : done + length])
        done += length
        logits = session.forward()
    kept = left_after(ids, 64, sinks, block, calls)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([kept]), use_cache=False).logits[0, -1]
    tiny.assert_close(logits, expected)
    assert kept[:sinks] == ids[:sinks]
    assert session.text_tokens == session.next_position == len(kept) <= 64


@pytest.mark.parametrize(
    "fusion",
    [
        xf.CrossAttention(),
        xf.CrossAttention(joint_text=True),
        xf.CrossAttention(joint_text=True, share_projections=True),
    ],
    ids=name_of,
)
def test_image_and_text_of_the_window_move_together(fusion, fused, recorder, picture):
    """What leaves lies before the current window: the rest equals a fresh forward of sinks, image and window."""
    stream = recorder(fused(fusion, layers=1), max_text_tokens=30, sink_tokens=3, block_tokens=20)
    for _ in range(25):
        stream.text([LETTER[len(stream.ids) % 50]])
        stream.session.forward()
    stream.frame(picture(1))
    stream.session.forward()
    kept = list(stream.ids)
    for number in range(8):
        stream.text([LETTER[number]])
        stream.session.forward()
    assert stream.session.text_tokens == 25 + 1 + 8 - 20
    stream.ids = kept[:3] + kept[23:] + LETTER[:8]
    tiny.assert_close(stream.session.forward(), stream.batch_logits()[-1])


def test_window_longer_than_the_bound_keeps_every_distance(fused, processor, picture):
    """Text of the open window leaves too. Without sinks nothing else moves, so the stream equals one that kept its
    positions and merely cannot see the tokens that left."""
    model = fused(xf.CrossAttention(joint_text=True), layers=1)
    bounded = StreamSession(model, processor, max_text_tokens=16, sink_tokens=0, block_tokens=6)
    endless = StreamSession(model, processor)
    for session in (bounded, endless):
        session.add_text(LETTER[:5])
        session.add_frame(picture(0))
        for token in LETTER[5:25]:
            session.add_text([token])
            session.forward()
    assert bounded.text_tokens == 14
    assert int(bounded.stream.cache.window.text_counts) == 14
    gone = 26 - 14
    cache = copy.deepcopy(endless.stream.cache)
    cache.mask[:, :gone] = False
    in_window = gone - 5
    for layer in cache.layers:
        layer.text_keys, layer.text_values = layer.text_keys[:, in_window:], layer.text_values[:, in_window:]
    cache.window = dataclasses.replace(cache.window, text_counts=cache.window.text_counts - in_window)
    token = torch.tensor([[40]])
    with torch.no_grad():
        expected = model(input_ids=token, cache=cache, attention_mask=torch.ones(1, 1)).logits[0, -1]
    bounded.add_text([40])
    tiny.assert_close(bounded.forward(), expected)


@pytest.mark.parametrize("compress", [None, xf.MeanPool(4)], ids=["plain", "pooled"])
def test_insertion_evicts_whole_images(compress, fused, recorder, picture):
    model = fused(xf.Insertion(compress=compress), layers=1)
    stream = recorder(model, max_text_tokens=60, sink_tokens=2, block_tokens=5)
    stream.text([2, 5, 6])
    size = tiny.PATCHES if compress is None else tiny.PATCHES // 4
    for number in range(12):
        stream.frame(picture(number))
        stream.speak(2)
        images = [run.tokens for run in stream.session.stream.runs if run.is_image]
        assert set(images) == {size}
        assert stream.session.stream.cached_tokens == stream.session.stream.cache.fused_length <= 60
        assert stream.session.next_position == stream.session.stream.cached_tokens
    # What is left is a fresh prefix: sinks, then the latest tokens with their images.
    logits = stream.session.forward()
    text = stream.session.text_tokens
    images = len([run for run in stream.session.stream.runs if run.is_image])
    runs = stream.session.stream.runs
    written = [t for t in stream.ids if t != I]
    queue = written[:2] + written[len(written) - (text - 2) :]
    ids: list[int] = []
    for run in runs:
        ids += [I] * tiny.PATCHES if run.is_image else [queue.pop(0) for _ in range(run.tokens)]
    stream.ids, stream.images = ids, stream.images[-images:]
    tiny.assert_close(logits, stream.batch_logits()[-1])


@given(
    st.lists(st.one_of(st.integers(1, 9), st.just(-16)), min_size=1, max_size=12),
    st.integers(0, 6),
    st.integers(1, 40),
)
@settings(max_examples=200, deadline=None)
def test_leaving_tokens(layout, sinks, wanted):
    """The first tokens stay, images leave whole, and no more leaves than the block needs."""
    runs = [Run(abs(n), abs(n), n < 0) for n in layout]
    merged: list[Run] = []
    for run in runs:
        if merged and not run.is_image and not merged[-1].is_image:
            merged[-1] = Run(merged[-1].tokens + run.tokens, merged[-1].positions + run.positions, False)
        else:
            merged.append(run)
    kinds = [run.is_image * (1 + number) for number, run in enumerate(merged) for _ in range(run.tokens)]
    after = list(merged)
    start, end, positions = _leaving(after, sinks, wanted)
    left = [kind for run in after for kind in [run.is_image] * run.tokens]
    assert left == [bool(kind) for kind in kinds[:start] + kinds[end:]]
    assert start <= sinks
    assert not any(kinds[:start])
    assert start == sinks or start == len(kinds) or kinds[start]
    assert positions == end - start
    assert end == len(kinds) or not kinds[end - 1] or kinds[end - 1] != kinds[end]
    shortest = min(wanted, len(kinds) - start)
    assert end - start >= shortest
    if end - start > shortest:  # only ever to the end of an image
        assert kinds[end - 1] == kinds[start + shortest - 1] != 0


@pytest.mark.parametrize(
    "fusion",
    [
        xf.CrossAttention(),
        xf.CrossAttention(joint_text=True),
        xf.CrossAttention(every=2, replace=True, joint_text=True),
    ],
    ids=name_of,
)
def test_positions_and_memory_stay_bounded(fusion, fused, recorder, picture):
    """A stream many times longer than the model's largest position."""
    stream = recorder(
        fused(fusion, max_position_embeddings=64), max_text_tokens=48, decoding=Decoding(max_new_tokens=4)
    )
    stream.text([2, 5, 6, 7])
    sizes = []
    for number in range(60):
        stream.frame(picture(number))
        stream.speak(4)
        assert stream.session.next_position == stream.session.text_tokens <= 48
        memory = stream.session.memory()
        sizes.append(memory["self_attention"] + memory["window_text"])
        assert torch.isfinite(stream.session.stream.logits).all()
    assert sum(token != I for token in stream.ids) > 4 * 64
    assert max(sizes[20:]) <= max(sizes[:20])


def test_a_prompt_longer_than_the_bound_is_taken_in_portions(fused, processor):
    model = fused(xf.CrossAttention(), layers=1)
    session = StreamSession(model, processor, max_text_tokens=20, sink_tokens=2, block_tokens=1)
    ids = torch.randint(3, 60, (100,)).tolist()
    session.add_text(ids)
    logits = session.forward()
    kept = left_after(ids, 20, 2, 1, [18] * 5 + [10])
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([kept]), use_cache=False).logits[0, -1]
    tiny.assert_close(logits, expected)


def test_rope_that_changes_with_length_is_refused(fused):
    model = fused(xf.CrossAttention())
    model.config.text_config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ValueError, match="'dynamic' changes its frequencies"):
        TextBudget(32).check_model(model, 512)
