"""Packed rows over every fusion: packed == padded, and no sample sees another (invariant 3)."""

from __future__ import annotations

import pytest
import torch

import crossfuse as xf
from matrix import each_fusion, every_fusion
from tiny import IMAGE, PATCHES, I, assert_close, batch, fused, gradients, labelled, llava, logits, rows_of

SAMPLES = [[2, I, 4], [5], [1, I, I, 1, I, 4]]


def packed(singles, padding=0):
    """One row of all samples, with `segment_ids`; -1 and token 0 for padding at the end."""
    ids = torch.cat([s["input_ids"] for s in singles], 1)
    segments = torch.cat([torch.full_like(s["input_ids"], n) for n, s in enumerate(singles)], 1)
    row = {
        "input_ids": torch.nn.functional.pad(ids, (0, padding)),
        "segment_ids": torch.nn.functional.pad(segments, (0, padding), value=-1),
        "pixel_values": torch.cat([s["pixel_values"] for s in singles if "pixel_values" in s]),
    }
    for name, fill in (("labels", -100), ("prompt_mask", False)):
        if name in singles[0]:
            joined = torch.cat([s[name] for s in singles], 1)
            row[name] = torch.nn.functional.pad(joined, (0, padding), value=fill)
    return row


def samples_of(out, singles):
    """The samples of a packed row, without its padding."""
    lengths = [s["input_ids"].shape[1] for s in singles]
    return out[0, : sum(lengths)].split(lengths)


def prepared(fusion, seed=1):
    singles = rows_of(batch(*SAMPLES, seed=seed))
    if fusion.needs_prompt:
        for single in singles:
            single["prompt_mask"] = torch.ones_like(single["input_ids"], dtype=torch.bool)
            single["prompt_mask"][:, -2:] = False
    return singles


@every_fusion
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_equals_padded(fusion, attention):
    model = llava()
    model.set_attn_implementation(attention)
    xf.fuse(model, fusion)
    singles = prepared(fusion)
    out = logits(model, packed(singles, padding=3), use_cache=False)
    for sample, single in zip(samples_of(out, singles), singles, strict=True):
        assert_close(sample, logits(model, single)[0])


@every_fusion
def test_gradients_of_a_packed_row_equal_those_of_the_padded_batch(fusion):
    """The label at the first token of a sample is masked: no sample is predicted from the one before it."""
    model = fused(fusion)
    padded = labelled(batch(*SAMPLES), 3)
    singles = rows_of(padded)
    whole = gradients(model, padded, use_cache=False)
    row = gradients(model, packed(singles, padding=2), use_cache=False)
    assert set(whole) == set(row)
    for name, gradient in whole.items():
        assert_close(row[name], gradient, msg=lambda text, name=name: f"{name}: {text}")


@every_fusion
@pytest.mark.parametrize("changed", [0, 2])
def test_changing_one_sample_leaves_the_others_bit_equal(fusion, changed):
    model, singles = fused(fusion), prepared(fusion)
    before = samples_of(logits(model, packed(singles), use_cache=False), singles)
    singles[changed]["pixel_values"] = singles[changed]["pixel_values"] * -1.5 + 0.3
    anchors = fusion.needs_prompt and not fusion.is_identity
    if not anchors:
        ids = singles[changed]["input_ids"]
        ids[ids != IMAGE] = ids[ids != IMAGE] % 50 + 5
    after = samples_of(logits(model, packed(singles), use_cache=False), singles)
    for number, (a, b) in enumerate(zip(before, after, strict=True)):
        if number == changed:
            assert not torch.allclose(a, b, atol=1e-3)
        elif anchors:  # the number of copies, and with it every shape, may have changed
            assert_close(a, b, atol=1e-6)
        else:
            assert torch.equal(a, b)


@each_fusion
def test_restarting_positions_are_read_as_packing(fusion):
    """As transformers reads them: 2-D positions that restart, no mask, no cache. Stock LLaVA for insertion."""
    model, singles = fused(fusion), prepared(fusion)
    row = packed(singles)
    del row["segment_ids"]
    row["position_ids"] = torch.cat([torch.arange(s["input_ids"].shape[1]) for s in singles])[None]
    out = logits(model, row, use_cache=False)
    for sample, single in zip(samples_of(out, singles), singles, strict=True):
        assert_close(sample, logits(model, single)[0])


@each_fusion
def test_packed_rows_refuse_a_cache(fusion):
    model, singles = fused(fusion), prepared(fusion)
    with pytest.raises(ValueError, match="use_cache=False"):
        model(**packed(singles), use_cache=True)


def test_packed_rows_longer_than_a_sliding_window_are_refused():
    model = xf.fuse(llava("mistral", sliding_window=12), xf.CrossAttention())
    singles = prepared(xf.CrossAttention())
    with pytest.raises(ValueError, match=r"sliding window of 12; pack shorter rows"):
        logits(model, packed(singles), use_cache=False)
    assert PATCHES > 12  # image tokens do not count: the text of one sample alone fits
    logits(model, packed(singles[:1]), use_cache=False)
