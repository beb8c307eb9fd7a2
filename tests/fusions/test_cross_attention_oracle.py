"""Cross-attention against eq. 1-4 of CASA, written as loops over tokens: logits and every gradient."""

from __future__ import annotations

import pytest
import torch

import crossfuse as xf
from matrix import name_of
from oracles import cross_attention_logits, image_tokens
from tiny import I, assert_close, batch, fused, logits, rows_of

AXES = [
    xf.CrossAttention(),
    xf.CrossAttention(joint_text=True),
    xf.CrossAttention(share_projections=True),
    xf.CrossAttention(share_projections=True, joint_text=True),
    xf.CrossAttention(every=2),
    xf.CrossAttention(every=2, replace=True),
    xf.CrossAttention(every=2, replace=True, joint_text=True),
    xf.CrossAttention(every=2, replace=True, joint_text=True, share_projections=True),
    xf.CrossAttention(history=2),
    xf.CrossAttention(history=None),
    xf.CrossAttention(history=2, joint_text=True),
    xf.CrossAttention(history=None, joint_text=True),
    xf.CrossAttention(gate="tanh"),
    xf.CrossAttention(gate="tanh", joint_text=True, share_projections=True),
    xf.CrossAttention(compress=xf.MeanPool(4)),
    xf.CrossAttention(compress=xf.MeanPool(4), joint_text=True, history=2),
    xf.CrossAttention(update_images=True),
    xf.CrossAttention(update_images=True, share_projections=True, joint_text=True, every=2),
    xf.CrossAttention(gist_tokens=2),
    xf.CrossAttention(gist_tokens=1, joint_text=True),
    xf.CrossAttention(gist_tokens=2, joint_text=True, history=2, share_projections=True),
    xf.CrossAttention(gist_tokens=1, joint_text=True, every=2, replace=True, history=None),
    xf.CrossAttention(gist_tokens=1, update_images=True, compress=xf.MeanPool(4)),
]
# No image, one first and one last, two adjacent images, images apart: text before, between and after.
ROWS = [[3, I, 2], [4], [I, 2, I], [1, I, I, 1, I, 2]]


def oracle_logits(model, fusion, inputs):
    """[(L_b, V)] of the unpadded rows."""
    pool = 1 if fusion.compress is None else fusion.compress.k
    return [
        cross_attention_logits(
            model, fusion, row["input_ids"][0].tolist(), image_tokens(model, row.get("pixel_values"), pool)
        )
        for row in rows_of(inputs)
    ]


def compare_with_gradients(model, fusion, inputs):
    """Logits at every real position, and the gradient of a random projection of them, at 1e-5."""
    real = inputs["attention_mask"].bool()
    weight = torch.randn(int(real.sum()), model.lm_head.out_features, generator=torch.Generator().manual_seed(3)) / 50
    model.train()
    actual = model(**inputs, use_cache=False).logits[real]
    expected = torch.cat(oracle_logits(model, fusion, inputs))
    assert_close(actual, expected)
    parameters = dict(model.named_parameters())
    wanted = [n for n, p in parameters.items() if p.requires_grad]
    found = []
    for out in (actual, expected):
        found.append(torch.autograd.grad((out * weight).sum(), [parameters[n] for n in wanted], allow_unused=True))
    assert sum(g is not None for g in found[1]) > 20
    for name, mine, oracle in zip(wanted, *found, strict=True):
        mine, oracle = (torch.zeros_like(parameters[name]) if g is None else g for g in (mine, oracle))
        assert_close(mine, oracle, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("fusion", AXES, ids=name_of)
def test_logits_and_gradients_equal_the_equations(fusion):
    padding = ("left", "right")[AXES.index(fusion) // 2 % 2]
    compare_with_gradients(fused(fusion), fusion, batch(*ROWS, padding=padding))


@pytest.mark.parametrize("text", ["qwen2", "qwen3"])
@pytest.mark.parametrize("fusion", AXES[:4], ids=name_of)
def test_attention_biases_and_query_key_norms_take_part(fusion, text):
    compare_with_gradients(fused(fusion, text=text, vision="siglip"), fusion, batch([1, I, 2], [I, 1, I, 2]))


@pytest.mark.parametrize("fusion", AXES, ids=name_of)
def test_every_split_of_a_stream_equals_the_equations(fusion):
    """Invariants 4 and 8: text and images in any pieces on one cache, rows at different places in their windows."""
    model = fused(fusion)
    parts = [batch([3], [2, I, 1]), batch([I, 1], [1, I]), batch([1], [1]), batch([I, I, 1, I], [2, I, 3])]
    parts += [batch([2], [2]), batch([I, 1], [3]), batch([1], [1])]
    for seed, part in enumerate(parts):
        again = batch(*_rows_like(part), seed=seed)
        part.update(again)
    whole = [
        {
            "input_ids": torch.cat([rows_of(p)[b]["input_ids"] for p in parts], 1),
            "pixel_values": torch.cat(
                [rows_of(p)[b]["pixel_values"] for p in parts if "pixel_values" in rows_of(p)[b]]
            ),
        }
        for b in range(2)
    ]
    pool = 1 if fusion.compress is None else fusion.compress.k
    expected = [
        cross_attention_logits(model, fusion, w["input_ids"][0].tolist(), image_tokens(model, w["pixel_values"], pool))
        for w in whole
    ]
    cache, mask, done = xf.new_cache(model), torch.zeros(2, 0, dtype=torch.long), [0, 0]
    for part in parts:
        mask = torch.cat([mask, part["attention_mask"]], 1)
        out = logits(model, {**part, "attention_mask": mask}, cache=cache)
        for b in range(2):
            got = out[b][part["attention_mask"][b].bool()]
            want = expected[b][done[b] : done[b] + len(got)]
            # A placeholder is read out from the text before it, which a later call no longer holds.
            text = rows_of(part)[b]["input_ids"][0] != 1
            assert_close(got[text], want[text])
            done[b] += len(got)


def _rows_like(part):
    rows = []
    for row in rows_of(part):
        ids, written = row["input_ids"][0].tolist(), []
        while ids:
            if ids[0] == 1:
                written.append(I)
                ids = ids[16:]
            else:
                written.append(1)
                ids = ids[1:]
        rows.append(written)
    return rows
