"""Both papers at once: copies of the prompt inside the windows of cross-attention, against the literal definition."""

from __future__ import annotations

import pytest
import torch

import crossfuse as xf
from matrix import anchored_windows, name_of
from oracles import cross_attention_logits, image_tokens
from tiny import IMAGE, LAYERS, I, assert_close, batch, fused, generate, llava, logits, rows_of

ANCHORS = xf.TextAnchors(threshold=0.1)
AXES = [
    xf.CrossAttention(anchors=ANCHORS),
    xf.CrossAttention(anchors=ANCHORS, joint_text=True),
    xf.CrossAttention(anchors=xf.TextAnchors(threshold=0.1, positions="inherit", copy_order="prompt"), joint_text=True),
    xf.CrossAttention(anchors=ANCHORS, share_projections=True, joint_text=True, history=None),
    xf.CrossAttention(anchors=ANCHORS, every=2, replace=True, joint_text=True),
    xf.CrossAttention(anchors=ANCHORS, update_images=True, history=2),
    xf.CrossAttention(anchors=ANCHORS, gist_tokens=2, joint_text=True),
    xf.CrossAttention(anchors=xf.TextAnchors(threshold=0.1, positions="inherit"), gist_tokens=1, joint_text=True),
    xf.CrossAttention(anchors=ANCHORS, compress=xf.MeanPool(4), joint_text=True),
]
# No image, one first and one last, two adjacent images, images apart: text before, between and after.
ROWS = [[3, I, 2], [4], [I, 2, I], [1, I, I, 1, I, 4]]


def oracle(model, fusion, row, prompt=None):
    pool = 1 if fusion.compress is None else fusion.compress.k
    ids = row["input_ids"][0].tolist()
    return cross_attention_logits(model, fusion, ids, image_tokens(model, row.get("pixel_values"), pool), prompt)


@pytest.mark.parametrize("fusion", AXES, ids=name_of)
def test_logits_and_gradients_equal_the_definition(fusion):
    padding = ("left", "right")[AXES.index(fusion) % 2]
    model, inputs = fused(fusion), batch(*ROWS, padding=padding)
    real = inputs["attention_mask"].bool()
    actual = model(**inputs, use_cache=False).logits[real]
    rows = rows_of(inputs)
    expected = torch.cat([oracle(model, fusion, row) for row in rows])
    assert_close(actual, expected)
    bare = xf.fuse(llava(), xf.CrossAttention(**{**vars(fusion), "anchors": None}))
    bare.load_state_dict(model.state_dict())
    assert not torch.allclose(bare(**inputs, use_cache=False).logits[real], actual, atol=1e-3)  # there are copies
    weight = torch.randn(actual.shape, generator=torch.Generator().manual_seed(3)) / 50
    wanted = {
        n: p for n, p in model.named_parameters() if ("language_model" in n or "projector" in n) and p.requires_grad
    }
    found = [
        torch.autograd.grad((out * weight).sum(), list(wanted.values()), allow_unused=True)
        for out in (actual, expected)
    ]
    for name, mine, own in zip(wanted, *found, strict=True):
        mine, own = (torch.zeros_like(wanted[name]) if g is None else g for g in (mine, own))
        assert_close(mine, own, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("fusion", AXES[1:3], ids=name_of)
def test_only_the_prompt_is_copied(fusion):
    """What stands behind the first label is in no window, and another answer changes nothing before it."""
    model, inputs = fused(fusion), batch([2, I, 3, I, 4])
    prompt = torch.ones_like(inputs["input_ids"], dtype=torch.bool)
    prompt[:, 20:] = False
    assert_close(logits(model, inputs, prompt_mask=prompt)[0], oracle(model, fusion, inputs, prompt=20))
    other = inputs["input_ids"].clone()
    other[:, -3:] = (other[:, -3:] - 3 + 7) % 60 + 3
    before = logits(model, inputs, prompt_mask=prompt)[0, :-3]
    assert torch.equal(logits(model, {**inputs, "input_ids": other}, prompt_mask=prompt)[0, :-3], before)
    labels = torch.full_like(inputs["input_ids"], -100)
    labels[:, 20], labels[:, -3:] = other[:, 20], other[:, -3:]
    assert_close(model.train()(**inputs, labels=labels, use_cache=False).logits[0, :-3], before)
    with pytest.raises(ValueError, match="cannot tell the prompt from the answer"):
        model(**inputs, use_cache=False)


@pytest.mark.parametrize("joint_text", [False, True])
def test_x4_copies_stay_in_their_window(joint_text):
    """Another image 1 or another text of window 2 leaves every other window as it was, bit by bit."""
    fusion = xf.CrossAttention(every=LAYERS, joint_text=joint_text, anchors=ANCHORS)
    model, inputs = fused(fusion), batch([1, I, 2, I, 2])
    text = inputs["input_ids"][0] != IMAGE
    before = logits(model, inputs)[0, text]
    pixels = inputs["pixel_values"].clone()
    pixels[0] = 0.5 - pixels[0]
    after = logits(model, {**inputs, "pixel_values": pixels})[0, text]
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True, False, False, True, True]
    ids = inputs["input_ids"].clone()
    ids[0, -1] = (ids[0, -1] - 3 + 11) % 60 + 3
    after = logits(model, {**inputs, "input_ids": ids})[0, text]
    assert torch.equal(before[:3], after[:3])


@pytest.mark.parametrize("fusion", AXES, ids=name_of)
def test_a_stream_equals_the_definition(fusion):
    """Standing instructions reach the frames of later calls; rows are at different places of their windows."""
    model = fused(fusion)
    calls = [batch([3], [2]), batch([I, 2], [1, I, 1]), batch([1], [1]), batch([I, 1], [I, 2]), batch([2], [I, 1])]
    prompts = [True, True, False, False, False]
    rows = [[rows_of(call)[b] for call in calls] for b in range(2)]
    expected = []
    for own in rows:
        ids = torch.cat([part["input_ids"] for part in own], 1)
        whole = {"input_ids": ids, "pixel_values": torch.cat([p["pixel_values"] for p in own if "pixel_values" in p])}
        prompt = sum(part["input_ids"].shape[1] for part in own[:2])
        expected.append(oracle(model, fusion, whole, prompt))
    cache, mask, done = xf.new_cache(model), torch.zeros(2, 0, dtype=torch.long), [0, 0]
    for part, prompt in zip(calls, prompts, strict=True):
        past = mask.shape[1]
        mask = torch.cat([mask, part["attention_mask"]], 1)
        told = torch.nn.functional.pad(part["attention_mask"].bool() & prompt, (past, 0), value=False)
        out = logits(model, {**part, "attention_mask": mask}, cache=cache, prompt_mask=told)
        for b, single in enumerate(rows_of(part)):
            got = out[b][part["attention_mask"][b].bool()]
            text = single["input_ids"][0] != IMAGE
            assert_close(got[text], expected[b][done[b] : done[b] + len(got)][text])
            done[b] += len(got)


@anchored_windows
def test_the_self_attention_cache_holds_text_only(fusion):
    model, inputs = fused(fusion), batch([3, I, 2, I, 4])
    bare = fused(xf.CrossAttention(**{**vars(fusion), "anchors": None}))
    caches = []
    for each in (model, bare):
        with torch.no_grad():
            caches.append(each(**inputs, use_cache=True).cache)
    anchored, plain = (cache.memory() for cache in caches)
    assert anchored["self_attention"] == plain["self_attention"]
    assert anchored["images"] > plain["images"]
    assert caches[0].fused_length == caches[1].fused_length


def test_a_copy_is_not_where_its_threshold_is_one():
    off = xf.CrossAttention(joint_text=True, anchors=xf.TextAnchors(threshold=1.0))
    inputs = batch([3, I, 2], [2])
    assert torch.equal(logits(fused(off), inputs), logits(fused(xf.CrossAttention(joint_text=True)), inputs))
    assert not off.needs_prompt


def test_prompt_lookup_and_beams_move_what_was_remembered():
    fusion = xf.CrossAttention(anchors=ANCHORS, joint_text=True)
    model = fused(fusion)
    cache = xf.new_cache(model)
    logits(model, batch([3], [4]), cache=cache)
    logits(model, batch([2], [2], seed=2), cache=cache)
    remembered = cache.prompt_ids.clone()
    cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(cache.prompt_ids, remembered[[1, 0]])
    cache.crop(-1)
    assert torch.equal(cache.prompt_ids, remembered[[1, 0], :-1])
    cache.reset()
    assert cache.prompt_ids is None


@pytest.mark.parametrize(
    ("anchors", "message"),
    [
        (xf.ImageAnchors(), "anchors must be TextAnchors; got ImageAnchors"),
        (xf.TextAnchors(compress=xf.MeanPool(4)), "compress belongs to CrossAttention"),
        (xf.TextAnchors(keep_image_tokens=0.5), r"keep_image_tokens .* got 0\.5: shorten the windows with compress"),
    ],
)
def test_anchors_that_do_not_fit_are_refused(anchors, message):
    with pytest.raises(ValueError, match=message):
        xf.CrossAttention(anchors=anchors)


def test_the_configuration_survives_json(tmp_path):
    fusion = xf.CrossAttention(anchors=xf.TextAnchors(threshold=0.2, exclude_token_ids=(5, 6)), joint_text=True)
    model = fused(fusion)
    xf.save_fusion(model, tmp_path)
    loaded = xf.load_fusion(llava(), tmp_path)
    assert xf.fusion_of(loaded) == fusion
    inputs = batch([3, I, 2])
    assert torch.equal(generate(loaded, inputs), generate(model, inputs))
