"""What holds for every fusion: fuse and unfuse, batches, caches, threads (invariants 1, 2, 4, 12; X3, B2, B3)."""

from __future__ import annotations

import threading

import pytest
import torch

import crossfuse as xf
from matrix import CONFIGURATIONS, adds_tokens, each_fusion, every_fusion, identities, name_of
from tiny import FAMILIES, I, assert_close, batch, clone, fused, generate, labelled, llava, logits, prompt_mask, rows_of

ROWS = [[3, I, 4], [6], [2, I, I, 1, I, 3]]


def with_prompt(inputs, fusion, answer=2):
    """Direct forwards of an anchor fusion need the end of the prompt."""
    return {**inputs, "prompt_mask": prompt_mask(inputs, answer)} if fusion.needs_prompt else inputs


def real_rows(out, inputs):
    return [row[mask.bool()] for row, mask in zip(out, inputs["attention_mask"], strict=True)]


# ---------------------------------------------------------------- 1: fuse and unfuse
@every_fusion
def test_fuse_then_unfuse_is_exact(fusion):
    model, inputs = llava(), batch(*ROWS)
    model.lm_head.weight.requires_grad_(False)
    before = logits(model, inputs)
    model(**inputs, use_cache=False, output_hidden_states=True)  # transformers installs its recording hooks once
    storage = {n: (p.data_ptr(), p.requires_grad) for n, p in model.named_parameters()}
    keys, classes = list(model.state_dict()), [type(m) for m in model.modules()]
    attributes = [set(m.__dict__) for m in model.modules()]
    assert xf.fuse(model, fusion) is model
    assert xf.fusion_of(model) == fusion
    assert [k for k in model.state_dict() if k not in xf.fusion_parameters(model)] == keys
    logits(model, inputs)
    model(**inputs, use_cache=False, output_hidden_states=True)
    assert xf.unfuse(model) is model
    assert xf.fusion_of(model) is None
    assert {n: (p.data_ptr(), p.requires_grad) for n, p in model.named_parameters()} == storage
    assert list(model.state_dict()) == keys
    assert [type(m) for m in model.modules()] == classes
    assert [set(m.__dict__) for m in model.modules()] == attributes
    assert torch.equal(logits(model, inputs), before)


@identities
@pytest.mark.parametrize("padding", ["left", "right"])
def test_identity_configurations_equal_the_unfused_model_exactly(fusion, padding):
    """Forward, loss and generate; padded rows included."""
    plain, inputs = llava(), batch(*ROWS, padding=padding)
    model = fused(fusion)
    assert torch.equal(logits(model, inputs), logits(plain, inputs))
    asked = labelled(inputs)
    assert torch.equal(model(**asked).loss, plain(**asked).loss)
    if padding == "left":
        assert torch.equal(generate(model, inputs), generate(plain, inputs))


@pytest.mark.parametrize(
    "fusion", [f for f in CONFIGURATIONS if not getattr(f, "replace", False) and not adds_tokens(f)], ids=name_of
)
def test_x3_rows_without_an_image_equal_the_language_model(fusion):
    """Mixed batches work without a dummy image. (With `replace` or pause tokens nothing can equal the plain LLM.)"""
    model, inputs = fused(fusion), batch(*ROWS)
    text = rows_of(inputs)[1]
    out = logits(model, with_prompt(inputs, fusion))
    plain = llava()
    alone = plain.lm_head(plain.model.language_model(text["input_ids"]).last_hidden_state)
    assert_close(real_rows(out, inputs)[1], alone[0])
    assert torch.equal(logits(model, with_prompt(text, fusion)), logits(plain, text))


# ---------------------------------------------------------------- 2: batches
@every_fusion
@pytest.mark.parametrize("padding", ["left", "right"])
def test_batched_equals_one_by_one(fusion, padding):
    model, inputs = fused(fusion), batch(*ROWS, padding=padding)
    mask = torch.ones_like(inputs["input_ids"], dtype=torch.bool)
    if fusion.needs_prompt:
        inputs["prompt_mask"] = mask
    out = real_rows(logits(model, inputs), inputs)
    for row, single in zip(out, rows_of(inputs), strict=True):
        assert_close(row, logits(model, single)[0])
    swapped = batch(*ROWS, padding=padding)
    order, images = [2, 0, 1], [1, 2, 3, 0]
    swapped = {
        "input_ids": swapped["input_ids"][order],
        "attention_mask": swapped["attention_mask"][order],
        "pixel_values": swapped["pixel_values"][images],
    }
    if fusion.needs_prompt:
        swapped["prompt_mask"] = mask
    permuted = real_rows(logits(model, swapped), swapped)
    for place, row in zip(permuted, order, strict=True):
        assert_close(place, out[row])


@pytest.mark.parametrize(("text", "vision"), FAMILIES, ids=lambda pair: str(pair))
@pytest.mark.parametrize("fusion", CONFIGURATIONS[1:3] + CONFIGURATIONS[6:8] + CONFIGURATIONS[12:13], ids=name_of)
def test_b3_families_batched_cached_and_single_agree(fusion, text, vision):
    """Every text and vision tower: greedy ids in a batch, one by one, and with the cache off."""
    model, inputs = fused(fusion, text=text, vision=vision), batch(*ROWS)
    ids = generate(model, inputs)
    assert torch.equal(ids, torch.cat([generate(model, single) for single in rows_of(inputs)]))
    assert torch.equal(ids, generate(model, inputs, use_cache=False))


@every_fusion
def test_b2_right_padded_generation(fusion):
    """Prompts of 6 and 40 tokens, padded on the right: the same ids as one by one."""
    model = fused(fusion)
    inputs = batch([2, I, 4], [20, I, 20], padding="right")
    alone = torch.cat([generate(model, single, 12) for single in rows_of(inputs)])
    assert torch.equal(generate(model, inputs, 12), alone)


# ---------------------------------------------------------------- 4: caches
@every_fusion
def test_token_by_token_with_the_cache_equals_one_forward(fusion):
    model, inputs = fused(fusion), batch(*ROWS)
    answer = 3
    whole = logits(model, with_prompt(inputs, fusion, answer))
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    length = ids.shape[1] - answer
    cache = xf.new_cache(model) if not fusion.is_identity else None
    parts, end = [], 0
    for step in (length, 1, 1, 1):
        part = {"input_ids": ids[:, end : end + step], "attention_mask": mask[:, : end + step]}
        if end == 0:
            part["pixel_values"] = inputs["pixel_values"]
        if fusion.needs_prompt:
            part["prompt_mask"] = torch.ones_like(ids[:, :length], dtype=torch.bool)
        with torch.no_grad():
            out = model(**part, cache=cache, use_cache=True)
        cache = out.cache
        parts.append(out.logits)
        end += step
    for stepped, once in zip(real_rows(torch.cat(parts, 1), inputs), real_rows(whole, inputs), strict=True):
        assert_close(stepped, once)
    assert cache.get_seq_length() == ids.shape[1]


# ---------------------------------------------------------------- 12: no state on modules
@each_fusion
def test_two_threads_interleaved_equal_two_runs_apart(fusion):
    """Two models that share generated classes, and two streams on one model."""
    one, two = fused(fusion, seed=0), fused(fusion, seed=5)
    assert type(one) is type(two)
    assert type(one.model) is type(two.model)
    work = [(one, batch([2, I, 3], seed=1)), (two, batch([1, I, 1, I, 2], seed=2)), (one, batch([4, I, I, 2], seed=3))]
    apart = [generate(model, inputs, 6) for model, inputs in work]
    together = [[] for _ in work]
    barrier = threading.Barrier(len(work))

    def run(number):
        barrier.wait()
        for _ in range(3):
            together[number].append(generate(*work[number], 6))

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for alone, repeats in zip(apart, together, strict=True):
        assert len(repeats) == 3
        assert all(torch.equal(alone, ids) for ids in repeats)


@each_fusion
def test_two_streams_stepped_in_turn_on_one_model(fusion):
    model = fused(fusion)
    streams = [batch([2, I, 3], seed=1), batch([1, I, 1, I, 3], seed=2)]

    def steps(inputs):
        cache, ids, mask = None, inputs["input_ids"], inputs["attention_mask"]
        options = {"pixel_values": inputs["pixel_values"]}
        if fusion.needs_prompt:
            options["prompt_mask"] = torch.ones_like(ids, dtype=torch.bool)
        for _ in range(4):
            with torch.no_grad():
                out = model(ids, attention_mask=mask, cache=cache, use_cache=True, **options)
            cache, ids = out.cache, out.logits[:, -1:].argmax(-1)
            mask, options = torch.nn.functional.pad(mask, (0, 1), value=1), {}
            yield out.logits[:, -1]

    apart = [list(steps(s)) for s in streams]
    together = list(zip(*(steps(s) for s in streams), strict=True))
    for number, alone in enumerate(apart):
        assert all(torch.equal(a, pair[number]) for a, pair in zip(alone, together, strict=True))


@each_fusion
def test_deep_copies_are_independent(fusion):
    model, inputs = fused(fusion), with_prompt(batch(*ROWS), fusion)
    before = logits(model, inputs)
    copy = clone(model)
    assert torch.equal(logits(copy, inputs), before)
    xf.unfuse(copy)
    for parameter in copy.parameters():
        parameter.data.zero_()
    assert torch.equal(logits(model, inputs), before)
