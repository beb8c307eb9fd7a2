"""AttAnchor, text into image: the order against Algorithm 1, logits against an expansion by hand (invariant 11, B2)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import crossfuse as xf
from crossfuse.fusions.anchors import text_into_image
from matrix import text_anchors
from oracles import anchored_order, image_tokens, text_anchor_logits
from tiny import IMAGE, VOCABULARY, I, assert_close, batch, generate, labelled, llava, logits, rows_of

QUIET = settings(deadline=None, max_examples=150, derandomize=True)


# ---------------------------------------------------------------- the order
# Few directions, so that equal cosines (ties) and several copies on one image token are the rule.
DIRECTIONS = [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (1, 1, 0, 0), (1, 1, 1, 1), (-1, 0, 0, 0), (0, 0, 0, 0)]
VECTORS = st.lists(st.sampled_from(DIRECTIONS), min_size=0, max_size=6)


@QUIET
@given(VECTORS, VECTORS, st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.0, 2.0]), st.sampled_from(["algorithm", "prompt"]))
@example([(1, 0, 0, 0), (1, 0, 0, 0)], [(1, 0, 0, 0)] * 3, 0.5, "algorithm")
@example([(1, 0, 0, 0)], [(1, 0, 0, 0), (1, 1, 0, 0)], 0.0, "prompt")
def test_order_equals_list_insertion(images, texts, threshold, copy_order):
    image, text = (torch.tensor(v, dtype=torch.float32).view(-1, 4) for v in (images, texts))
    actual = text_into_image(image, text, threshold, copy_order).tolist()
    count = len(images)

    def cosine(a, b):
        norms = math.hypot(*a) * math.hypot(*b)
        return sum(x * y for x, y in zip(a, b, strict=True)) / norms if norms else 0.0

    table = {(count + n, m): cosine(t, i) for n, t in enumerate(texts) for m, i in enumerate(images)}
    columns = range(count, count + len(texts))
    expected = anchored_order(list(range(count)), list(columns), table, threshold, copy_order)
    assert actual == [source for _, source in expected] + list(columns)


def test_several_copies_on_one_image_token_stand_in_reverse_prompt_order():
    image, text = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.1], [1.0, 0.2], [0.0, 1.0]])
    assert text_into_image(image, text, 0.5).tolist() == [0, 2, 1, 1, 2, 3]
    assert text_into_image(image, text, 0.5, "prompt").tolist() == [0, 1, 2, 1, 2, 3]


def test_the_first_of_equal_image_tokens_wins():
    image, text = torch.tensor([[0.0, 1.0], [2.0, 0.0], [1.0, 0.0]]), torch.tensor([[1.0, 0.0]])
    assert text_into_image(image, text, 0.5).tolist() == [0, 1, 3, 2, 3]


def test_a_cosine_that_is_not_finite_never_wins():
    image = torch.tensor([[torch.nan, 0.0], [torch.inf, 0.0], [1.0, 1.0]])
    assert text_into_image(image, torch.tensor([[1.0, 0.0]]), 0.5).tolist() == [0, 1, 2, 3, 3]
    assert text_into_image(image[:2], torch.tensor([[1.0, 0.0]]), 0.0).tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_cosines_are_float32_in_every_dtype(dtype):
    draw = torch.Generator().manual_seed(0)
    image, text = torch.randn(9, 16, generator=draw).to(dtype), torch.randn(7, 16, generator=draw).to(dtype)
    assert torch.equal(text_into_image(image, text, 0.2), text_into_image(image.float(), text.float(), 0.2))


def test_threshold_one_inserts_nothing_even_for_a_cosine_above_one():
    same = torch.full((1, 7), 0.1)
    assert text_into_image(same, same, 1.0).tolist() == [0, 1]
    assert text_into_image(same, same, 0.999).tolist() == [0, 1, 1]


# ---------------------------------------------------------------- the model
ROWS = [[3, I, 4], [5], [2, I, I, 1, I, 3]]


@text_anchors
@pytest.mark.parametrize("padding", ["left", "right"])
def test_logits_equal_an_expansion_by_hand(fusion, padding):
    model, inputs = xf.fuse(llava(), fusion), batch(*ROWS, padding=padding)
    inputs["prompt_mask"] = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
    for row, mask in enumerate(inputs["attention_mask"].bool()):
        inputs["prompt_mask"][row, mask.nonzero()[:-2, 0]] = True  # the last two tokens are the answer
    out, inserted = logits(model, inputs), 0
    plain = llava()
    for row, (mask, single) in enumerate(zip(inputs["attention_mask"].bool(), rows_of(inputs), strict=True)):
        ids = single["input_ids"][0].tolist()
        reach = len(ids) - 2
        candidates = [j for j, token in enumerate(ids[:reach]) if token != IMAGE]
        pool = 1 if fusion.compress is None else fusion.compress.k
        images = image_tokens(plain, single.get("pixel_values"), pool)
        with torch.no_grad():
            expected = text_anchor_logits(plain, fusion, ids, images, candidates, reach)
            without = text_anchor_logits(plain, fusion, ids, images, [], reach)
        assert_close(out[row][mask], expected)
        inserted += not torch.allclose(expected, without, atol=1e-3)
    assert inserted == 2  # both rows with images received copies


@text_anchors
def test_labels_end_the_prompt_as_the_stated_mask_does(fusion):
    model, inputs = xf.fuse(llava(), fusion), batch(*ROWS)
    asked = labelled(inputs)
    mask = asked["labels"] == -100
    assert torch.equal(logits(model, asked), logits(model, {**inputs, "prompt_mask": mask}))


@text_anchors
def test_nothing_of_the_answer_and_no_later_image_changes_what_stands_before_it(fusion):
    model = xf.fuse(llava(), fusion)
    inputs = labelled(batch([3, I, 4, I, 2]), 0)
    inputs["labels"][0, 21] = inputs["input_ids"][0, 21]  # supervised in the middle: all after it is answer
    before = logits(model, inputs)
    changed = {n: v.clone() for n, v in inputs.items()}
    changed["input_ids"][0, 22:] = torch.where(
        inputs["input_ids"][0, 22:] == IMAGE, IMAGE, inputs["input_ids"][0, 22:] % 50 + 5
    )
    changed["pixel_values"][1] = 0.5
    after = logits(model, changed)
    assert torch.equal(before[:, :22], after[:, :22])
    assert not torch.allclose(before[:, 22:], after[:, 22:], atol=1e-3)


@text_anchors
def test_special_and_excluded_tokens_are_never_copied(fusion):
    import dataclasses

    everything = tuple(range(3, VOCABULARY))
    banned = xf.fuse(llava(), dataclasses.replace(fusion, exclude_token_ids=everything))
    nothing = xf.fuse(llava(), dataclasses.replace(fusion, threshold=1.0))
    inputs = batch(*ROWS)
    assert torch.equal(logits(banned, inputs), logits(nothing, inputs))
    inputs["input_ids"][0, inputs["attention_mask"][0].bool()] = torch.where(
        inputs["input_ids"][0, inputs["attention_mask"][0].bool()] == IMAGE, IMAGE, 2
    )  # bos = eos
    row = rows_of(inputs)[0]
    assert torch.equal(logits(xf.fuse(llava(), fusion), row), logits(nothing, row))


@text_anchors
def test_anchor_mask_narrows_the_candidates(fusion):
    model, inputs = xf.fuse(llava(), fusion), batch([3, I, 5])
    prompt = torch.ones_like(inputs["input_ids"], dtype=torch.bool)
    none = torch.zeros_like(prompt)
    import dataclasses

    nothing = xf.fuse(llava(), dataclasses.replace(fusion, threshold=1.0))
    assert_close(logits(model, inputs, prompt_mask=prompt, anchor_mask=none), logits(nothing, inputs))
    only = none.clone()
    only[:, :3] = True  # the words before the image
    narrowed = logits(model, inputs, prompt_mask=prompt, anchor_mask=only)
    plain = llava()
    with torch.no_grad():
        pool = 1 if fusion.compress is None else fusion.compress.k
        images = image_tokens(plain, inputs["pixel_values"], pool)
        expected = text_anchor_logits(plain, fusion, inputs["input_ids"][0].tolist(), images, [0, 1, 2], 24)
    assert_close(narrowed[0], expected)
    assert not torch.allclose(narrowed, logits(model, inputs), atol=1e-3)


@text_anchors
def test_a_training_forward_without_labels_or_masks_is_refused(fusion):
    model, inputs = xf.fuse(llava(), fusion).train(), batch(*ROWS)
    with pytest.raises(ValueError, match=r"label smoothing.*pass one of them"):
        model(**inputs)
    model(**inputs, anchor_mask=torch.ones_like(inputs["input_ids"], dtype=torch.bool))


@text_anchors
def test_b2_rows_with_different_numbers_of_copies_stay_left_padded(fusion):
    """The last fused column is a real token in every row, and the mask sums are the real lengths."""
    model = xf.fuse(llava(), fusion)
    inputs = batch([2, I, 2], [9, I, 9], padding="right")
    seen = []
    model.model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
    )
    generate(model, inputs, 1)
    mask = seen[0].bool()
    assert mask[:, -1].all()
    kept = [4 if fusion.compress else 16] * 2
    copies = mask.sum(1) - inputs["attention_mask"].sum(1) + 16 - torch.tensor(kept)
    assert copies.min() > 0
    assert copies[0] != copies[1]
    assert torch.equal(mask.long().sort(1).values, mask.long())


@text_anchors
def test_gradients_flow_through_copies(fusion):
    """A token that is copied gets gradient from both of its places."""
    model, inputs = xf.fuse(llava(), fusion).train(), batch([3, I, 4])
    prompt = torch.ones_like(inputs["input_ids"], dtype=torch.bool)
    plain = llava().train()
    ids = inputs["input_ids"][0].tolist()
    weight = torch.randn(len(ids), VOCABULARY, generator=torch.Generator().manual_seed(2)) / 50
    pool = 1 if fusion.compress is None else fusion.compress.k
    candidates = [j for j, token in enumerate(ids) if token != IMAGE]
    expected = text_anchor_logits(
        plain, fusion, ids, image_tokens(plain, inputs["pixel_values"], pool), candidates, len(ids)
    )
    (expected * weight).sum().backward()
    (model(**inputs, prompt_mask=prompt).logits[0] * weight).sum().backward()
    for (name, mine), oracle in zip(model.named_parameters(), plain.parameters(), strict=True):
        if oracle.grad is None:
            assert mine.grad is None or not mine.grad.any(), name
        else:
            assert_close(mine.grad, oracle.grad, msg=lambda text, name=name: f"{name}: {text}")


@text_anchors
def test_a_second_turn_keeps_the_copies_of_the_first(fusion):
    """Images in the cache receive no later text: continuing equals one forward with the first prompt marked."""
    model, inputs = xf.fuse(llava(), fusion), batch([3, I, 8])
    first, ids = 21, inputs["input_ids"]
    cache = xf.new_cache(model)
    prompt = torch.ones(1, first, dtype=torch.bool)
    model(
        ids[:, :first], attention_mask=torch.ones(1, first), pixel_values=inputs["pixel_values"], prompt_mask=prompt,
        cache=cache,
    )  # fmt: skip
    later = logits(model, {"input_ids": ids[:, first:], "attention_mask": inputs["attention_mask"]}, cache=cache)
    marked = torch.nn.functional.pad(prompt, (0, ids.shape[1] - first), value=False)
    assert_close(later, logits(model, {**inputs, "prompt_mask": marked})[:, first:])
