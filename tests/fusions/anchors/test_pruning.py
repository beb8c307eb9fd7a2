"""`TextAnchors(keep_image_tokens=...)`: which image tokens stay, and that everything else still holds."""

from __future__ import annotations

import math

import pytest
import tiny_qwen
import torch
from tiny_qwen import Seen
from torch.nn.functional import cosine_similarity

import crossfuse as xf
import tiny
from tiny import I, assert_close, batch, generate, labelled, llava, logits, rows_of

ROWS = [[3, I, 4], [6], [2, I, I, 1, I, 3]]
FUSIONS = [
    xf.TextAnchors(threshold=0.1, keep_image_tokens=0.5),
    xf.TextAnchors(threshold=0.2, keep_image_tokens=0.3, positions="inherit"),
    xf.TextAnchors(threshold=1.0, keep_image_tokens=0.25),
    xf.TextAnchors(threshold=0.1, keep_image_tokens=0.5, compress=xf.MeanPool(4)),
]
every = pytest.mark.parametrize("fusion", FUSIONS, ids=["half", "third-inherit", "no-anchors", "pooled"])


def whole_prompt(inputs):
    return {**inputs, "prompt_mask": torch.ones_like(inputs["input_ids"], dtype=torch.bool)}


def literal(model, single, fusion) -> list[int]:
    """Columns of the fused row of one unpadded LLaVA sample, copies as the column that is copied."""
    ids = single["input_ids"][0].tolist()
    with torch.no_grad():
        embeds = model.get_input_embeddings()(single["input_ids"])[0].clone()
        images = list(model.model.get_image_features(single["pixel_values"]).pooler_output)
    runs = torch.tensor([c for c, token in enumerate(ids) if token == tiny.IMAGE]).view(len(images), -1)
    embeds[runs.flatten()] = torch.cat(images)
    text = [c for c, token in enumerate(ids) if token > tiny.BOS]
    likeness = {
        m: {n: float(cosine_similarity(embeds[n], embeds[m], dim=0)) for n in text} for m in runs.flatten().tolist()
    }
    host = {n: max(likeness, key=lambda m, n=n: likeness[m][n]) for n in text}
    copies = [n for n in text if likeness[host[n]][n] >= fusion.threshold and fusion.threshold < 1]
    kept = {host[n] for n in copies}
    for run in runs.tolist():
        best = sorted(run, key=lambda m: -max(likeness[m].values()))
        kept |= set(best[: math.ceil(fusion.keep_image_tokens * len(run))])
    order = [c for c in range(len(ids)) if c in kept or ids[c] != tiny.IMAGE]
    for n in copies:
        order.insert(order.index(host[n]) + 1, n)
    return order


@pytest.mark.parametrize("fusion", FUSIONS[:3], ids=["half", "third-inherit", "no-anchors"])
def test_the_image_tokens_most_like_the_prompt_and_the_anchored_ones_stay(fusion):
    for single in (rows_of(batch(*ROWS))[k] for k in (0, 2)):
        order = literal(llava(), single, fusion)
        plain = llava()
        with Seen(plain) as stock:
            logits(plain, single)
        model = xf.fuse(llava(), fusion)
        with Seen(model) as seen:
            out = logits(model, whole_prompt(single))
        fused = seen.calls[0]["inputs_embeds"]
        assert len(order) < single["input_ids"].shape[1]
        assert torch.equal(fused[0], stock.calls[0]["inputs_embeds"][0, order])
        assert out.shape[:2] == single["input_ids"].shape
        if fusion.positions == "sequential":
            assert seen.calls[0]["position_ids"].tolist() == [list(range(len(order)))]


@every
@pytest.mark.parametrize("padding", ["left", "right"])
def test_batched_equals_one_by_one(fusion, padding):
    model, inputs = xf.fuse(llava(), fusion), batch(*ROWS, padding=padding)
    out, ids = logits(model, whole_prompt(inputs)), generate(model, inputs)
    for row, single in enumerate(rows_of(inputs)):
        assert_close(out[row, inputs["attention_mask"][row].bool()], logits(model, whole_prompt(single))[0])
        assert torch.equal(ids[row : row + 1], generate(model, single))


@every
def test_cache_on_off_and_beams_agree(fusion):
    model, inputs = xf.fuse(llava(), fusion), batch(*ROWS)
    assert torch.equal(generate(model, inputs), generate(model, inputs, use_cache=False))
    beams = {"num_beams": 3, "num_return_sequences": 2}
    alone = torch.cat([generate(model, single, **beams) for single in rows_of(inputs)])
    assert torch.equal(generate(model, inputs, **beams), alone)


@every
def test_packed_equals_padded(fusion):
    model, singles = xf.fuse(llava(), fusion), rows_of(batch(*ROWS))
    packed = {
        "input_ids": torch.cat([s["input_ids"] for s in singles], 1),
        "segment_ids": torch.cat([torch.full_like(s["input_ids"], i) for i, s in enumerate(singles)], 1),
        "pixel_values": torch.cat([s["pixel_values"] for s in singles if "pixel_values" in s]),
    }
    out = logits(model, whole_prompt(packed), use_cache=False)[0]
    assert_close(out, torch.cat([logits(model, whole_prompt(s))[0] for s in singles]))


@every
def test_the_cache_holds_fewer_tokens_and_gradients_reach_the_tower(fusion):
    model, single = xf.fuse(llava(), fusion), rows_of(batch(*ROWS))[2]
    cache = xf.new_cache(model)
    with torch.no_grad():
        model(**whole_prompt(single), cache=cache, use_cache=True)
    assert cache.get_seq_length() == single["input_ids"].shape[1]
    assert cache.get_seq_length(0) < single["input_ids"].shape[1]
    unfused = llava()(**single, use_cache=True).cache
    held = sum(t.numel() for layer in unfused.layers for t in (layer.keys, layer.values)) * 4
    assert cache.memory()["self_attention"] < held
    found = tiny.gradients(model, labelled(single))
    assert any("vision_tower" in name for name in found)
    assert all(torch.isfinite(g).all() for g in found.values())


def test_qwen_keeps_the_positions_of_what_stays():
    fusion = xf.TextAnchors(threshold=0.1, keep_image_tokens=0.5)
    inputs = tiny_qwen.batch([3, (4, 6), 4], [6], [2, (4, 4), 1, (6, 4), 5], [2, (3, 4, 4), 3])
    model, whole = xf.fuse(tiny_qwen.qwen(), fusion), xf.fuse(tiny_qwen.qwen(), xf.TextAnchors(threshold=0.1))
    for single in tiny_qwen.rows_of(inputs):
        with Seen(model) as pruned, Seen(whole) as full, torch.no_grad():
            model(**whole_prompt(single))
            whole(**whole_prompt(single))
        if single["input_ids"].shape[1] == 6:
            continue
        few, many = (
            [(*tuple(p), float(e.sum())) for p, e in zip(
                c["position_ids"][:, 0].T.tolist(), c["inputs_embeds"][0], strict=True
            )]
            for c in (pruned.calls[0], full.calls[0])
        )  # fmt: skip
        left = iter(many)
        assert all(token in left for token in few)  # a subsequence of the unpruned row, positions included
        assert len(few) < len(many)
    ids = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    assert torch.equal(ids, model.generate(**inputs, max_new_tokens=5, do_sample=False, use_cache=False))


def test_keeping_all_is_no_pruning():
    inputs = whole_prompt(batch(*ROWS))
    kept = logits(xf.fuse(llava(), xf.TextAnchors(threshold=0.1, keep_image_tokens=1.0)), inputs)
    assert torch.equal(kept, logits(xf.fuse(llava(), xf.TextAnchors(threshold=0.1)), inputs))
    assert xf.TextAnchors().keep_image_tokens is None


@pytest.mark.parametrize("share", [0, -0.5, 1.5, True, "half"])
def test_a_share_outside_0_to_1_is_refused(share):
    with pytest.raises(ValueError, match=r"keep_image_tokens must be above 0 and at most 1 .*; got"):
        xf.TextAnchors(keep_image_tokens=share)
