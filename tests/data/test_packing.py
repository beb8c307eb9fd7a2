"""Packing: bins respect both budgets, hold every sample once, and a packed row equals its samples alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import crossfuse as xf
from crossfuse.data.packing import PackingSampler, pack_batch, pack_samples
from tiny import I, batch, llava

LENGTHS = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 90)), max_size=60)


@given(LENGTHS)
@settings(deadline=None, max_examples=60)
def test_every_sample_stands_in_one_bin_and_no_budget_is_exceeded(lengths):
    text, image = [t for t, _ in lengths], [i for _, i in lengths]
    bins, report = pack_samples(text, image, 64, 100)
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    for members in bins:
        assert sum(text[i] for i in members) <= 64
        assert sum(image[i] for i in members) <= 100
    assert report.rows == len(bins)
    if bins:
        assert report.text_share == pytest.approx(sum(text) / (64 * len(bins)))


@given(LENGTHS)
@settings(deadline=None, max_examples=40)
def test_first_fit_decreasing_opens_a_bin_only_where_none_fits(lengths):
    text, image = [t for t, _ in lengths], [i for _, i in lengths]
    bins, _ = pack_samples(text, image, 64, 100)
    for later, members in enumerate(bins):
        opener = members[0]
        for earlier in bins[:later]:
            # What stood in an earlier bin when this one was opened: samples at least as large, which come first.
            size = max(text[opener] / 64, image[opener] / 100)
            before = [i for i in earlier if max(text[i] / 64, image[i] / 100) > size]
            ties = [i for i in earlier if max(text[i] / 64, image[i] / 100) == size and i < opener]
            held = before + ties
            assert sum(text[i] for i in held) + text[opener] > 64 or sum(image[i] for i in held) + image[opener] > 100


def test_a_sample_over_a_budget_is_named_or_counted():
    with pytest.raises(ValueError, match="sample 1 has 70 text and 0 image tokens"):
        pack_samples([3, 70], [0, 0], 64, 100)
    bins, report = pack_samples([3, 70], [0, 0], 64, 100, on_overflow="skip")
    assert bins == [[0]]
    assert report.too_long == (1,)


def test_an_empty_set_has_no_rows():
    bins, report = pack_samples([], [])
    assert bins == []
    assert report.rows == 0


def test_the_sampler_is_deterministic_and_changes_with_the_epoch():
    text, image = list(range(1, 40)), [5] * 39
    first = PackingSampler(text, image, 64, 100, seed=1)
    again = PackingSampler(text, image, 64, 100, seed=1)
    assert list(first) == list(again)
    assert sorted(i for row in first for i in row) == list(range(39))
    first.set_epoch(1)
    assert list(first) != list(again)
    assert first.report.samples == 39


@pytest.mark.parametrize(
    "fusion",
    [
        xf.Insertion(),
        xf.TextAnchors(threshold=0.1),
        xf.ImageAnchors(threshold=0.3, pause_tokens=1, pause_token_id=5),
        xf.CrossAttention(joint_text=True),
        xf.CrossAttention(gist_tokens=1, history=None),
    ],
    ids=lambda fusion: fusion.name,
)
def test_a_packed_row_gives_the_losses_of_its_samples(fusion):
    model = xf.fuse(llava(), fusion)
    samples = batch([2, I, 4], [5], [1, I, 2, I, 4], padding="right")
    labels = samples["input_ids"].clone()
    lengths = samples["attention_mask"].sum(1)
    for row, length in enumerate(lengths):
        labels[row, : int(length) - 2] = -100
    labels[samples["attention_mask"] == 0] = -100
    samples["labels"] = labels
    padded = model(**samples, use_cache=False)
    packed = model(**pack_batch(samples), use_cache=False)
    torch.testing.assert_close(packed.loss, padded.loss, atol=1e-5, rtol=1e-5)
    real = samples["attention_mask"].bool()
    # Rows that nothing precedes are zero in both; elsewhere packed equals padded, token by token.
    torch.testing.assert_close(packed.logits[0], padded.logits[real], atol=1e-4, rtol=1e-4)


def test_the_first_label_of_every_sample_is_masked():
    samples = batch([3], [4], padding="right")
    samples["labels"] = samples["input_ids"].masked_fill(samples["attention_mask"] == 0, -100)
    packed = pack_batch(samples)
    assert packed["labels"][0, [0, 3]].tolist() == [-100, -100]
    assert packed["position_ids"][0].tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert packed["segment_ids"][0].tolist() == [0] * 3 + [1] * 4


def test_rows_are_full_where_both_budgets_bind() -> None:
    """First-fit-decreasing alone leaves about a tenth of both budgets empty on this mix."""
    draw = np.random.default_rng(0)
    text = np.clip(draw.lognormal(np.log(150), 0.9, 1024).astype(int), 4, 2048)
    image = np.array([draw.integers(64, 1157, draw.integers(0, 9)).sum() for _ in range(1024)])
    bins, report = pack_samples(text, image)
    assert sorted(index for row in bins for index in row) == list(range(1024))
    assert all(text[row].sum() <= 2048 and image[row].sum() <= 20480 for row in bins)
    assert report.binding_share >= 0.95
