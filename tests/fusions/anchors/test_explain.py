"""`explain_anchors` tells exactly what the decoder gets, in both directions and for several images."""

from __future__ import annotations

import pytest
import tiny_qwen
import torch

import crossfuse as xf
import tiny
from crossfuse.analysis.attention_scores import attended
from crossfuse.fusions.cross_attention import context

CASES = {
    "llava": (tiny.llava, tiny.batch([2, tiny.I, 4, tiny.I, 5])),
    "qwen": (tiny_qwen.qwen, tiny_qwen.batch([2, (4, 6), 3, (6, 4), 5])),
    "qwen-video": (tiny_qwen.qwen, tiny_qwen.batch([2, (2, 4, 6), 5])),
}


@pytest.mark.parametrize("fusion", [xf.TextAnchors(threshold=0.1), xf.ImageAnchors(threshold=0.12)])
@pytest.mark.parametrize("family", CASES)
def test_explained_anchors_are_the_inserted_ones(family, fusion):
    make, inputs = CASES[family]
    model = xf.fuse(make(), fusion)
    run = attended(model, inputs)
    inserted = {(s, h) for s, h in zip(run.source, run.host, strict=True) if s != h}
    found = xf.explain_anchors(model, inputs)[0]
    images = run.sequence.is_image[0].nonzero()[:, 0].tolist()
    starts = [0]
    for length in run.sequence.image_lengths:
        starts.append(starts[-1] + length)
    told = set()
    for anchor in found:
        place = images[starts[anchor.image_index] + anchor.patch_index]
        text = anchor.token_index
        told.add((text, place) if isinstance(fusion, xf.TextAnchors) else (place, text))
        assert anchor.row * anchor.grid[1] + anchor.column == anchor.patch_index
        assert anchor.row < anchor.grid[0]
        assert anchor.token_id == int(inputs["input_ids"][0, text])
        unit = torch.nn.functional.normalize(run.sequence.embeds[0, [text, place]].float(), dim=-1)
        assert anchor.cosine == pytest.approx(float(unit[0] @ unit[1]), abs=1e-5)
    assert told == inserted
    assert len(found) > 0


NESTED = [
    xf.CrossAttention(anchors=xf.TextAnchors(threshold=0.1)),
    xf.CrossAttention(joint_text=True, gist_tokens=1, anchors=xf.TextAnchors(threshold=0.15, copy_order="prompt")),
    xf.CrossAttention(video_windows="all", anchors=xf.TextAnchors(threshold=0.1)),
    xf.CrossAttention(anchors=xf.TextAnchors(threshold=1.0)),
]


@pytest.mark.parametrize("fusion", NESTED, ids=repr)
@pytest.mark.parametrize("family", CASES)
def test_explained_anchors_are_those_that_windows_get(family, fusion, monkeypatch):
    """Read from the image tokens that the windows really hold: what is no image token is a copy of the one before."""
    make, inputs = CASES[family]
    model, given, plain = xf.fuse(make(), fusion), [], []

    def spy(anchors, body, fused, *rest):
        made = anchored_images(anchors, body, fused, *rest)
        plain.append(fused.sequence)
        given.append(fused.sequence if made is None else made.fused.sequence)
        return made

    anchored_images = context.anchored_images
    monkeypatch.setattr(context, "anchored_images", spy)
    with torch.no_grad():
        model(**inputs)
    found = xf.explain_anchors(model, inputs)[0]
    if fusion.active_anchors is None:
        assert (given, found) == ([], [])
        return
    table = model.get_input_embeddings().weight
    images, held = plain[0].image_features, given[0].image_features
    got, place = [], -1
    for token in held:
        if place + 1 < len(images) and torch.equal(token, images[place + 1]):
            place += 1
        else:
            (word,) = (table == token).all(1).nonzero().flatten().tolist()
            got.append((word, place))
    assert place == len(images) - 1
    starts = [sum(plain[0].image_lengths[:i]) for i in range(len(plain[0].image_lengths))]
    assert sorted((a.token_id, starts[a.image_index] + a.patch_index) for a in found) == sorted(got)
    assert len(got) > 0
    for anchor in found:
        assert anchor.token_id == int(inputs["input_ids"][0, anchor.token_index])
        assert anchor.row * anchor.grid[1] + anchor.column == anchor.patch_index


def test_windows_of_a_batch_are_explained_as_one_by_one():
    model = xf.fuse(tiny.llava(), xf.CrossAttention(anchors=xf.TextAnchors(threshold=0.1)))
    inputs = tiny.batch([2, tiny.I, 4], [6], [3, tiny.I, 2, tiny.I, 4])
    together = xf.explain_anchors(model, inputs)
    assert together[1] == []
    assert {a.image_index for a in together[2]} == {0, 1}
    for row, single in enumerate(tiny.rows_of(inputs)):
        offset = inputs["input_ids"].shape[1] - single["input_ids"].shape[1]
        alone = xf.explain_anchors(model, single)[0]
        assert [(a.token_index + offset, a.image_index, a.patch_index) for a in alone] == [
            (a.token_index, a.image_index, a.patch_index) for a in together[row]
        ]
    with pytest.raises(ValueError, match=r"CrossAttention\(anchors=\.\.\.\)"):
        xf.explain_anchors(xf.fuse(tiny.llava(), xf.CrossAttention()), inputs)


def test_a_batch_counts_images_within_each_sample():
    model = xf.fuse(tiny.llava(), xf.TextAnchors(threshold=0.1))
    inputs = tiny.batch([2, tiny.I, 4], [6], [3, tiny.I, 2, tiny.I, 4])
    together = xf.explain_anchors(model, inputs)
    for row, single in enumerate(tiny.rows_of(inputs)):
        offset = inputs["input_ids"].shape[1] - single["input_ids"].shape[1]
        alone = xf.explain_anchors(model, single)[0]
        assert [(a.token_index + offset, a.image_index, a.patch_index) for a in alone] == [
            (a.token_index, a.image_index, a.patch_index) for a in together[row]
        ]


def test_calibration_reaches_its_share_in_both_directions():
    batches = [tiny.batch([2, tiny.I, 30], seed=seed) for seed in range(4)]
    for fusion in (None, xf.ImageAnchors()):
        model = tiny.llava() if fusion is None else xf.fuse(tiny.llava(), fusion)
        found = xf.calibrate_threshold(model, batches, share=0.25)
        assert found.achieved == pytest.approx(0.25, abs=0.01)
        assert found.n_samples == 4
        if fusion is not None:
            xf.unfuse(model)
        used = found.fusion()
        assert used.name == ("text-anchors" if fusion is None else "image-anchors")
        assert used.share == 0.25
        xf.fuse(model, used)
        copies = sum(len(xf.explain_anchors(model, batch)[0]) for batch in batches)
        assert copies == round(found.achieved * found.n_tokens)


def test_tokens_that_are_not_finite_are_reported_and_get_no_anchor():
    model, inputs = xf.fuse(tiny.llava(), xf.TextAnchors(threshold=0.1)), tiny.batch([2, tiny.I, 9])
    word = int(inputs["input_ids"][0, -1])
    model.get_input_embeddings().weight.data[word] = float("nan")
    with pytest.warns(UserWarning, match="tokens hold NaN or infinite values; their cosines count as -1"):
        found = xf.explain_anchors(model, inputs)[0]
    assert found
    assert all(anchor.token_id != word for anchor in found)
