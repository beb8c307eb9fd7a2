"""The plan of the bucketed backend: how many calls, what is copied, how much is padded."""

import pytest
import torch

from crossfuse.attention import Windows, windowed_attention
from crossfuse.attention.bucketed import make_plan
from crossfuse.attention.reference import reference_attention


def plan_of(windows, heads=4, key_heads=4, width=32):
    return make_plan(windows, heads, key_heads, width, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("joint_text", [False, True])
def test_equal_windows_are_one_call_on_views(joint_text):
    plan = plan_of(Windows.from_lengths([32] * 16, [256] * 16, joint_text))
    assert len(plan.buckets) == 1
    assert plan.order is None
    assert all(read.index is None for reads in (plan.queries, plan.images, plan.texts) for read in reads.reads)
    assert (plan.buckets[0].mask is None) == (not joint_text)


def test_text_only_windows_are_causal_without_a_mask():
    (bucket,) = plan_of(Windows.from_lengths([7] * 3, [0] * 3, joint_text=True)).buckets
    assert bucket.causal
    assert bucket.mask is None


@pytest.mark.parametrize("joint_text", [False, True])
def test_single_queries_need_no_mask(joint_text):
    for bucket in plan_of(Windows.from_lengths([1] * 4, [900] * 4, joint_text)).buckets:
        assert bucket.mask is None
        assert not bucket.causal


def test_small_windows_share_a_padded_call_and_large_ones_do_not():
    texts, images = [3, 5, 2, 4, 6, 1] * 4, [9, 4, 12, 7, 5, 16] * 4
    assert len(plan_of(Windows.from_lengths(texts, images)).buckets) <= 3
    plan = plan_of(Windows.from_lengths([60, 50, 40, 64], [1100, 700, 900, 500]))
    assert len(plan.buckets) == 4
    assert all(read.index is None for read in plan.images.reads)


def test_images_of_equal_length_are_not_copied_when_only_the_texts_are_uneven():
    plan = plan_of(Windows.from_lengths([3, 5, 4, 5, 3, 4], [16] * 6))
    assert len(plan.buckets) == 1
    assert plan.images.reads[0].index is None
    assert plan.buckets[0].mask is None


def test_neighbours_with_the_same_image_are_one_window():
    ranges = [torch.tensor(values) for values in ([2, 3, 1], [0, 0, 5], [5, 5, 4])]
    windows = Windows(*ranges)
    q, k, v = torch.randn(6, 2, 4), torch.randn(9, 2, 4), torch.randn(9, 2, 4)
    lengths = sorted(read.length * read.count for read in plan_of(windows, 2, 2, 4).queries.reads)
    assert lengths in ([1, 5], [10])  # apart, or padded into one call of 2 x 5
    torch.testing.assert_close(windowed_attention(q, k, v, windows), reference_attention(q, k, v, windows))


def test_padding_costs_less_than_the_calls_it_saves():
    """Padded pairs stay within the pairs that the saved calls are worth."""
    from crossfuse.attention import bucketed

    draw = torch.Generator().manual_seed(0)
    texts = torch.randint(1, 65, (64,), generator=draw)
    images = torch.randint(1, 400, (64,), generator=draw)
    plan = plan_of(Windows.from_lengths(texts, images))
    padded = sum(
        query.count * query.length * image.length
        for query, image in zip(plan.queries.reads, plan.images.reads, strict=True)
    )
    saved = (64 - len(plan.buckets)) * bucketed.CALL_SECONDS / (bucketed.PAIR_SECONDS * 4 * 32)
    assert (texts * images).sum() <= padded <= (texts * images).sum() + saved


def test_a_plan_is_made_once_for_all_layers():
    windows = Windows.from_lengths([2, 3], [4, 5])
    for _ in range(3):
        windowed_attention(torch.randn(5, 2, 4), torch.randn(9, 2, 4), torch.randn(9, 2, 4), windows)
    assert len(windows.plans) == 1
