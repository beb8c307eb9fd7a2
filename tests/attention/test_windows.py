"""Windows: layouts, masks, drawings and errors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossfuse.attention import Windows


def longs(*values):
    return torch.tensor(values, dtype=torch.int64)


def test_from_lengths_lays_windows_out_one_after_the_other():
    windows = Windows.from_lengths([2, 0, 3], [4, 5, 0], joint_text=True)
    assert windows.image_starts.tolist() == [0, 4, 9]
    assert windows.image_lengths.tolist() == [4, 5, 0]
    assert windows.text_starts.tolist() == [0, 2, 2]
    assert windows.text_lengths.tolist() == [2, 0, 3]
    assert (windows.query_count, windows.image_count, windows.text_count) == (5, 9, 5)


@pytest.mark.parametrize(
    ("history", "starts", "lengths"),
    [(1, [0, 4, 6, 9], [4, 2, 3, 5]), (2, [0, 0, 6, 6], [4, 6, 3, 8]), (None, [0, 0, 6, 6], [4, 6, 3, 8])],
)
def test_x5_history_never_crosses_samples(history, starts, lengths):
    windows = Windows.from_lengths([1] * 4, [4, 2, 3, 5], history=history, samples=[7, 7, 3, 3])
    assert windows.image_starts.tolist() == starts
    assert windows.image_lengths.tolist() == lengths


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_dense_mask_says_what_the_fields_say(data, layouts):
    """Oracle: the definition, pair by pair."""
    windows, images, texts, *_ = data.draw(layouts)
    image_mask, text_mask = windows.dense_mask(windows.query_count, images, texts)
    row = 0
    for window in windows.ranges:
        for place in range(window.query_length):
            wanted = list(range(window.image_start, window.image_start + window.image_length))
            assert image_mask[row].nonzero().flatten().tolist() == wanted
            if text_mask is not None:
                seen = window.text_length - window.query_length + place + 1
                wanted = list(range(window.text_start, window.text_start + seen))
                assert text_mask[row].nonzero().flatten().tolist() == wanted
            row += 1
    assert row == windows.query_count
    assert (text_mask is None) == (not windows.joint_text)


def test_x4_text_sees_the_image_of_its_own_window_only():
    """In "<img1> a a <img2> b b", a sees image 1 and b sees image 2."""
    mask, _ = Windows.from_lengths([2, 2], [1, 1]).dense_mask(4, 2)
    assert mask.tolist() == [[True, False], [True, False], [False, True], [False, True]]


def test_print_draws_the_mask():
    drawn = str(Windows.from_lengths([2, 1], [3, 2], joint_text=True)).splitlines()
    assert drawn == [
        "           image   text",
        "window 0   ███··   █··",
        "window 0   ███··   ██·",
        "window 1   ···██   ··█",
        "2 windows, 3 queries (rows) x 8 keys (columns)",
        "█ visible  · hidden",
    ]


def test_print_scales_large_layouts_down():
    drawn = str(Windows.from_lengths([300] * 20, [576] * 20)).splitlines()
    assert len(drawn) < 60
    assert max(map(len, drawn)) < 120
    assert drawn[-1] == "█ visible  · hidden  ▒ partly; a cell stands for 125 x 120 pairs"
    assert "█" in drawn[1]
    assert "▒" in drawn[1]
    assert drawn[1].startswith("window 0")


def test_print_of_nothing():
    assert "0 windows, 0 queries" in str(Windows.from_lengths([], []))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"query_lengths": longs(1, 2).int()}, "query_lengths must have dtype torch.int64"),
        ({"image_starts": longs(0)}, r"image_starts must have shape \(2,\), one entry a window; got \(1,\)"),
        ({"image_lengths": longs(3, -1)}, "image_lengths must be at least 0; got -1 in window 1"),
        ({"text_starts": longs(0, 0)}, "text_lengths is None"),
        ({"text_starts": longs(0, 0), "text_lengths": longs(1, 1)}, "1 keys for 2 queries in window 1"),
    ],
)
def test_constructor_refuses(fields, message):
    good = {"query_lengths": longs(1, 2), "image_starts": longs(0, 3), "image_lengths": longs(3, 1)}
    with pytest.raises(ValueError, match=message):
        Windows(**(good | fields))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], [3]), "got 2 and 1 entries"),
        (([1], [3], False, 0), "history must be at least 1"),
        (([1], [3], False, 1, [0, 0]), "samples needs one entry a window"),
    ],
)
def test_from_lengths_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        Windows.from_lengths(*arguments)


def test_dense_mask_refuses_another_number_of_queries():
    with pytest.raises(ValueError, match="partition 3 queries; the mask was asked for 4"):
        Windows.from_lengths([3], [2]).dense_mask(4, 2)
