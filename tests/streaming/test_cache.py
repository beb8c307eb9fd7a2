"""FusionCache: every change of rows or length equals a prefill of what is left."""

from __future__ import annotations

import pytest
import torch

import crossfuse as xf
from crossfuse.streaming.cache import FusionCache
from matrix import bare_cross_attention, cross_attention, each_fusion, every_fusion
from tiny import I, assert_close, batch, fused, llava, logits


def prefilled(fusion, *rows, **options):
    """(model, inputs, cache) after one prefill."""
    model, inputs = fused(fusion), batch(*rows, **options)
    if fusion.needs_prompt:
        inputs["prompt_mask"] = torch.ones_like(inputs["input_ids"], dtype=torch.bool)
    cache = xf.new_cache(model)
    logits(model, inputs, cache=cache)
    return model, inputs, cache


def continued(model, inputs, cache, token=7):
    """Logits of two more tokens a row on the cache."""
    mask, rows = inputs["attention_mask"], []
    for step in range(2):
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        ids = torch.full((len(mask), 1), token + step)
        rows.append(logits(model, {"input_ids": ids, "attention_mask": mask}, cache=cache))
    return torch.cat(rows, 1)


ROWS = [[2, I, 1, I, 4], [3], [3, I, 5]]


@every_fusion
@pytest.mark.parametrize("indices", [[2, 0, 0], [1, 1, 2]])
def test_reordered_rows_continue_as_their_sources(fusion, indices):
    model, inputs, cache = prefilled(fusion, *ROWS)
    _, _, whole = prefilled(fusion, *ROWS)
    expected = continued(model, inputs, whole)[indices]
    cache.reorder_cache(torch.tensor(indices))
    moved = {"attention_mask": inputs["attention_mask"][indices]}
    assert_close(continued(model, moved, cache), expected)


@every_fusion
def test_selected_and_repeated_rows_continue_as_their_sources(fusion):
    model, inputs, cache = prefilled(fusion, *ROWS)
    _, _, whole = prefilled(fusion, *ROWS)
    expected = continued(model, inputs, whole)
    cache.batch_select_indices(torch.tensor([2, 1]))
    cache.batch_repeat_interleave(2)
    moved = {"attention_mask": inputs["attention_mask"][[2, 2, 1, 1]]}
    assert_close(continued(model, moved, cache), expected[[2, 2, 1, 1]])


@every_fusion
def test_cropping_equals_not_having_seen_the_tokens(fusion):
    model, inputs, cache = prefilled(fusion, *ROWS[:1], [2, I, 1, I, 3])
    _, _, untouched = prefilled(fusion, *ROWS[:1], [2, I, 1, I, 3])
    expected = continued(model, inputs, untouched)
    length = cache.get_seq_length()
    continued(model, inputs, cache, token=40)
    cache.crop(-2)
    assert cache.get_seq_length() == length
    assert_close(continued(model, inputs, cache), expected)


@cross_attention
def test_cropping_into_the_current_window_and_not_beyond_it(fusion):
    model, inputs, cache = prefilled(fusion, [2, I, 4])
    cache.crop(-3)
    shorter = {n: v[:, :-3] for n, v in inputs.items() if n != "pixel_values"}
    fresh = xf.new_cache(model)
    logits(model, {**shorter, "pixel_values": inputs["pixel_values"]}, cache=fresh)
    assert_close(continued(model, shorter, cache), continued(model, shorter, fresh))
    _, _, cache = prefilled(fusion, [2, I, 4])
    with pytest.raises(ValueError, match=r"cannot crop 5 tokens: only the last 4 stand after the current image"):
        cache.crop(-5)


def test_cropping_into_copies_is_refused():
    _, _, cache = prefilled(xf.TextAnchors(threshold=0.1), [2, I, 4])
    limit = cache.croppable
    assert 4 <= limit < 20  # the text after the image, and image tokens behind the last copy
    with pytest.raises(ValueError, match=rf"cannot crop {limit + 1} tokens.*prefill again"):
        cache.crop(-limit - 1)
    cache.crop(-limit)


def test_crop_takes_negative_numbers_only():
    _, _, cache = prefilled(xf.CrossAttention(), [2, I, 4])
    before = cache.get_seq_length()
    cache.crop(0)
    assert cache.get_seq_length() == before
    with pytest.raises(ValueError, match="takes a negative number of tokens to remove; got 3"):
        cache.crop(3)


@each_fusion
def test_a_reset_cache_is_a_new_one(fusion):
    model, inputs, cache = prefilled(fusion, *ROWS)
    before = logits(model, inputs, cache=xf.new_cache(model))
    cache.reset()
    assert cache.get_seq_length() == 0
    assert_close(logits(model, inputs, cache=cache), before)


@bare_cross_attention
def test_lengths_of_user_and_fused_tokens(fusion):
    _, inputs, cache = prefilled(fusion, *ROWS)
    text = int((inputs["attention_mask"].bool() & (inputs["input_ids"] != 1)).sum(1).max())
    assert isinstance(cache, FusionCache)
    assert cache.get_seq_length() == inputs["input_ids"].shape[1]
    assert cache.get_seq_length(0) == cache.get_query_offset() == text
    assert cache.get_mask_sizes(3, 0) == (text + 3, 0)


def test_memory_counts_every_tensor():
    _, _, cache = prefilled(xf.CrossAttention(joint_text=True), *ROWS)
    parts = cache.memory()
    assert set(parts) == {"self_attention", "images", "window_text"}
    held = sum(
        tensor.numel() * tensor.element_size()
        for layer in cache.layers
        for tensor in vars(layer).values()
        if isinstance(tensor, torch.Tensor)
    )
    assert sum(parts.values()) == held
    _, _, plain = prefilled(xf.CrossAttention(), *ROWS)
    assert plain.memory()["window_text"] == 0
    _, _, anchors = prefilled(xf.TextAnchors(threshold=0.1), *ROWS)
    assert anchors.memory()["images"] == 0


def test_new_cache_needs_a_fused_model():
    with pytest.raises(ValueError, match="not fused; use transformers' DynamicCache"):
        xf.new_cache(llava())
