"""Invariants 1 to 4, 9 and 10 on Qwen2.5-VL, whose positions have three rows, for what changes positions or order."""

from __future__ import annotations

import pytest
import torch
from tiny_qwen import IMAGE, VIDEO, batch, qwen, rows_of
from torch import Tensor

import crossfuse as xf
from crossfuse.prompt import prompt_before_labels
from matrix import name_of

ROWS = [[3, (4, 8), 4], [6], [2, (4, 4), 3, (2, 4, 4), 5]]  # an image; text; an image and a video of two frames
FUSIONS = [
    xf.ModalityRoPE(),
    xf.ModalityRoPE(layers=None),
    xf.CircleRoPE(),
    xf.CircleRoPE(alternate=True, alpha=1.0, radius=None),
    xf.CircleRoPE(layers=(1,), alpha=0.0),
    xf.CircleRoPE(compress=xf.MeanPool(4)),
    xf.ModalityRoPE(layers=None, compress=xf.MeanPool(4)),
    xf.GumbelReorder(width=16, depth=1, noise=0.0, final_temperature=1.0),
]
NEUTRAL = [xf.ModalityRoPE(layers=()), xf.CircleRoPE(layers=()), xf.GumbelReorder(score="identity")]
every = pytest.mark.parametrize("fusion", FUSIONS, ids=name_of)
SEQUENCE = ("input_ids", "mm_token_type_ids", "labels")


@torch.no_grad()
def logits(model, inputs, **options) -> Tensor:
    return model(**inputs, **options).logits


def generate(model, inputs, tokens=6, **options) -> Tensor:
    return model.generate(**inputs, max_new_tokens=tokens, do_sample=False, **options)[:, -tokens:]


def labelled(inputs, answer=2):
    """The last tokens of every row as labels, and where the prompt ends."""
    labels = torch.full_like(inputs["input_ids"], -100)
    for row, mask in enumerate(inputs["attention_mask"].bool()):
        columns = mask.nonzero()[-answer:, 0]
        labels[row, columns] = inputs["input_ids"][row, columns]
    return {**inputs, "labels": labels, "prompt_mask": prompt_before_labels(labels, None)}


def packed_row(singles, others):
    row = {n: torch.cat([s[n] for s in singles], 1) for n in SEQUENCE}
    row["segment_ids"] = torch.cat([torch.full_like(s["input_ids"], i) for i, s in enumerate(singles)], 1)
    fills = {"segment_ids": -1, "labels": -100}
    row = {n: torch.nn.functional.pad(v, (0, 3), value=fills.get(n, 0)) for n, v in row.items()}
    return row | {n: v for n, v in others.items() if "grid" in n or "pixel" in n}


def gradients(model, inputs) -> dict[str, Tensor]:
    model.train().zero_grad(set_to_none=True)
    model(**inputs, use_cache=False).loss.backward()
    model.eval()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@every
def test_fuse_then_unfuse_is_exact(fusion):
    model, inputs = qwen(), batch(*ROWS)
    before, keys = logits(model, inputs, use_cache=False), list(model.state_dict())
    xf.fuse(model, fusion)
    fused = logits(model, inputs, use_cache=False)
    xf.unfuse(model)
    assert list(model.state_dict()) == keys
    assert torch.equal(logits(model, inputs, use_cache=False), before)
    real = inputs["attention_mask"].bool()
    real[1] = False  # the row without an image
    assert (fused - before)[real].abs().max() > 1e-3


@pytest.mark.parametrize("fusion", NEUTRAL, ids=name_of)
def test_the_neutral_setting_equals_the_unfused_model_exactly(fusion):
    plain, model = qwen(), xf.fuse(qwen(), fusion)
    inputs = batch(*ROWS)
    assert not xf.fusion_parameters(model)
    assert torch.equal(logits(model, inputs), logits(plain, inputs))
    assert torch.equal(generate(model, inputs), generate(plain, inputs))
    asked = labelled(inputs)
    labels = {n: v for n, v in asked.items() if n != "prompt_mask"}
    assert torch.equal(model(**labels).loss, plain(**labels).loss)


@every
@pytest.mark.parametrize("padding", ["left", "right"])
def test_batched_equals_one_by_one(fusion, padding):
    inputs = batch(*ROWS, padding=padding)
    model = xf.fuse(qwen(), fusion)
    out = logits(model, inputs)
    for row, (together, single) in enumerate(zip(out, rows_of(inputs), strict=True)):
        real = inputs["attention_mask"][row].bool()
        torch.testing.assert_close(together[real], logits(model, single)[0], atol=1e-5, rtol=1e-5)


@every
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_r4_packed_equals_padded(fusion, attention):
    inputs = labelled(batch(*ROWS))
    model = qwen()
    model.set_attn_implementation(attention)
    xf.fuse(model, fusion)
    singles = rows_of(inputs)
    row = packed_row(singles, inputs)
    out = logits(model, row, use_cache=False)[0]
    begin = 0
    for single in singles:
        length = single["input_ids"].shape[1]
        alone = logits(model, single, use_cache=False)[0]
        torch.testing.assert_close(out[begin : begin + length], alone, atol=1e-5, rtol=1e-5)
        begin += length
    whole, parts = gradients(model, inputs), gradients(model, row)
    assert set(whole) == set(parts)
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, atol=2e-5, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}")


@every
def test_generation_is_the_same_one_by_one_with_beams_and_with_the_cache_off(fusion):
    model, inputs = xf.fuse(qwen(), fusion), batch(*ROWS)
    ids = generate(model, inputs)
    assert torch.equal(ids, generate(model, inputs, use_cache=False))
    assert torch.equal(ids, torch.cat([generate(model, single) for single in rows_of(inputs)]))
    beams = generate(model, inputs, 3, num_beams=2)
    assert torch.equal(beams, torch.cat([generate(model, s, 3, num_beams=2) for s in rows_of(inputs)]))


@every
def test_token_by_token_equals_one_forward(fusion):
    model, inputs = xf.fuse(qwen(), fusion), batch(*ROWS)
    answer = 3
    length = inputs["input_ids"].shape[1] - answer
    inputs["prompt_mask"] = torch.ones_like(inputs["input_ids"]).bool()
    inputs["prompt_mask"][:, length:] = False
    whole = logits(model, inputs, use_cache=False)
    first = {n: v[:, :length] if n in (*SEQUENCE, "attention_mask", "prompt_mask") else v for n, v in inputs.items()}
    with torch.no_grad():
        out = model(**first, use_cache=True)
        parts = [out.logits]
        for column in range(length, length + answer):
            out = model(
                input_ids=inputs["input_ids"][:, column : column + 1], cache=out.cache, use_cache=True,
                attention_mask=inputs["attention_mask"][:, : column + 1],
            )  # fmt: skip
            parts.append(out.logits)
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(torch.cat(parts, 1)[real], whole[real], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("fusion", [f for f in FUSIONS if not f.needs_prompt], ids=name_of)
def test_c4_a_second_turn_with_an_image_equals_a_prefill_of_the_whole_chat(fusion):
    """The image of a later turn goes on from the cache. (Reordering decides over one prompt and is left out.)"""
    model, inputs = xf.fuse(qwen(), fusion), batch([3, (4, 8), 4, (4, 4), 3])
    whole = logits(model, inputs, use_cache=False)
    ids = inputs["input_ids"]
    images = ((ids[0] == IMAGE).long().diff() == 1).nonzero()[:, 0] + 1
    cut = int(images[1]) - 2  # inside the text between the two
    patches = int(inputs["image_grid_thw"][0].prod())
    with torch.no_grad():
        one = model(
            input_ids=ids[:, :cut], mm_token_type_ids=inputs["mm_token_type_ids"][:, :cut],
            pixel_values=inputs["pixel_values"][:patches], image_grid_thw=inputs["image_grid_thw"][:1], use_cache=True,
        )  # fmt: skip
        two = model(
            input_ids=ids[:, cut:], mm_token_type_ids=inputs["mm_token_type_ids"][:, cut:], cache=one.cache,
            pixel_values=inputs["pixel_values"][patches:], image_grid_thw=inputs["image_grid_thw"][1:], use_cache=True,
        )  # fmt: skip
    torch.testing.assert_close(torch.cat([one.logits, two.logits], 1), whole, atol=1e-5, rtol=1e-5)


@every
def test_save_then_load_gives_the_same_bits(fusion, tmp_path):
    model, inputs = xf.fuse(qwen(), fusion), batch(*ROWS)
    for parameter in xf.fusion_parameters(model).values():
        parameter.data.add_(0.05)
    model.save_pretrained(tmp_path)
    read = xf.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert xf.fusion_of(read) == fusion
    assert torch.equal(logits(read, inputs), logits(model, inputs))
    xf.save_fusion(model, tmp_path / "fusion")
    assert torch.equal(logits(xf.load_fusion(qwen(), tmp_path / "fusion"), inputs), logits(model, inputs))


@every
def test_checkpointing_changes_no_gradient(fusion):
    inputs = labelled(batch(*ROWS))
    whole = gradients(xf.fuse(qwen(), fusion), inputs)
    model = xf.fuse(qwen(), fusion)
    model.activation_checkpointing_enable({"use_reentrant": False})
    parts = gradients(model, inputs)
    assert set(whole) == set(parts)
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, atol=1e-5, rtol=1e-5)


@every
def test_x6_a_prefill_that_splits_images_is_refused(fusion):
    model = xf.fuse(qwen(), fusion)
    with pytest.raises(ValueError, match=r"use (prefill_chunk_size=)?None"):
        generate(model, batch([2, (4, 6), 5]), prefill_chunk_size=4)


def test_videos_take_part():
    """The samples above hold a video whose frames the fused models see."""
    inputs = batch(*ROWS)
    assert (inputs["input_ids"] == VIDEO).sum() == 8
    for fusion in FUSIONS:
        model = xf.fuse(qwen(), fusion)
        changed = {**inputs, "pixel_values_videos": -inputs["pixel_values_videos"]}
        moved = (logits(model, changed) - logits(model, inputs)).abs().amax((1, 2))
        assert moved[2] > 1e-3, fusion
        assert moved[:2].max() == 0, fusion
