"""The alignment loss: its value, where its gradient goes, its labels, and a recipe that uses it."""

from __future__ import annotations

import copy
import math

import pytest
import tiny_qwen
import torch
from hypothesis import given
from hypothesis import strategies as st

import crossfuse as xf
from crossfuse.analysis.word_patches import scene_records
from crossfuse.data.collate import Collator
from crossfuse.fusions.anchors.alignment import (
    AlignedCollator,
    aligned_forward,
    alignment_loss,
    named_patches,
)
from crossfuse.fusions.anchors.patch_labels import ClipLabeller, clip_patch_words
from crossfuse.training.recipe import Recipe, Trainable
from crossfuse.training.trainer import fine_tune, prepare_trainable
from tiny import I, assert_close, batch, labelled, llava


def by_hand(tokens, words, named, sizes):
    """Both directions, one token and one pair at a time."""

    def score(p, w):
        return float(torch.nn.functional.cosine_similarity(tokens[p], words[w], dim=0)) / 0.07

    to_words, to_tokens, start = [], [], 0
    for p in range(len(tokens)):
        names = named[p].nonzero()[:, 0].tolist()
        if names:
            norm = math.log(sum(math.exp(score(p, w)) for w in range(len(words))))
            to_words.append(sum(norm - score(p, w) for w in names) / len(names))
    for size in sizes:
        own = range(start, start + size)
        for w in range(len(words)):
            shown = [p for p in own if named[p, w]]
            if shown:
                share = sum(math.exp(score(p, w)) for p in shown) / sum(math.exp(score(p, w)) for p in own)
                to_tokens.append(-math.log(share))
        start += size
    return (sum(to_words) / len(to_words) + sum(to_tokens) / len(to_tokens)) / 2


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_the_loss_is_the_mean_of_both_cross_entropies(sizes, seed):
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randn(sum(sizes), 8, generator=draw, requires_grad=True)
    words = torch.randn(4, 8, generator=draw)
    named = torch.rand(sum(sizes), 4, generator=draw) < 0.4
    named[0, 1] = True
    loss = alignment_loss(tokens, words, named, sizes)
    assert loss.item() == pytest.approx(by_hand(tokens.detach(), words, named, sizes), abs=1e-4)
    loss.backward()
    assert bool(tokens.grad.isfinite().all())


def test_the_loss_refuses_labels_that_name_nothing_and_sizes_that_do_not_fit():
    tokens, words = torch.randn(5, 8), torch.randn(4, 8)
    with pytest.raises(ValueError, match="at least one image token with a word that names it"):
        alignment_loss(tokens, words, torch.zeros(5, 4).bool(), [5])
    with pytest.raises(ValueError, match="images of 4 tokens in sum do not hold the 5 tokens"):
        alignment_loss(tokens, words, torch.ones(5, 4).bool(), [4])


def test_a_step_against_the_gradient_brings_the_word_to_its_token():
    """Both ways at once: the token nearer to its word, and the word's own token ahead of the others of its image."""
    draw = torch.Generator().manual_seed(1)
    tokens, words = torch.randn(6, 8, generator=draw, requires_grad=True), torch.randn(6, 8, generator=draw)
    named = torch.zeros(6, 6).bool()
    named[0, 0] = named[4, 1] = True

    def own_and_others(tokens):
        cosine = torch.nn.functional.normalize(tokens, dim=-1) @ torch.nn.functional.normalize(words, dim=-1).T
        return cosine[[0, 4], [0, 1]], torch.stack([cosine[1:3, 0].max(), cosine[[3, 5], 1].max()])

    with torch.no_grad():
        before, others_before = own_and_others(tokens)
    alignment_loss(tokens, words, named, [3, 3]).backward()
    with torch.no_grad():
        after, others_after = own_and_others(tokens - 0.05 * tokens.grad)
    assert (after > before).all()
    assert (after - others_after > before - others_before).all()


LABELS = {
    "alignment_tokens": torch.tensor([0, 5, 20]),
    "alignment_words": torch.tensor([[9, -1], [12, 30], [9, -1]]),
    "alignment_others": torch.tensor([40, 41]),
}


@pytest.mark.parametrize("family", ["llava", "qwen"])
def test_one_forward_holds_both_losses_and_encodes_the_images_once(family):
    if family == "llava":
        model, inputs = llava(), labelled(batch([3, I, 6], [2, I, 5]))
        tower = model.model.vision_tower
    else:
        model, inputs = tiny_qwen.qwen(), labelled(tiny_qwen.batch([3, (4, 8), 6], [2, (8, 8), 5]))
        tower = model.model.visual
    xf.fuse(model, xf.TextAnchors(threshold=0.1)).train()
    plain = model(**inputs, use_cache=False).loss
    calls = []
    hook = tower.register_forward_hook(lambda *a: calls.append(1))
    out = aligned_forward(model, {**inputs, **LABELS, "use_cache": False}, weight=2.0)
    hook.remove()
    assert len(calls) == 1
    assert_close(out["loss"], plain + 2.0 * out["alignment_loss"])
    assert float(out["alignment_loss"]) > 0
    model.get_input_embeddings().weight.grad = None
    out["alignment_loss"].backward()
    assert model.get_input_embeddings().weight.grad is None  # words do not move
    projector = "multi_modal_projector" if family == "llava" else "visual.merger"
    assert any(projector in name and p.grad is not None for name, p in model.named_parameters())
    assert aligned_forward(model, {**inputs, **LABELS, "use_cache": False}, weight=0.0).loss == plain


def test_labels_come_from_the_boxes_of_a_scene(embedded):
    _, processor = embedded
    records = list(scene_records("train", 6))
    made = AlignedCollator(Collator(processor), word_ids=[50])(records)
    tokens, words = made["alignment_tokens"], made["alignment_words"]
    assert len(tokens) == len(words) > 10
    assert made["alignment_others"].tolist() == [50]
    for record_number, record in enumerate(records):
        own = (tokens // 64) == record_number
        labels = named_patches(processor, record, (8, 8))
        assert set((tokens[own] % 64).tolist()) == set(labels)
        known = {word for item in record.meta["objects"] for word in item["name"].split()}
        for patch, ids in labels.items():
            names = {processor.tokenizer.decode([i]).strip() for i in ids}
            assert names <= known
            assert len(names) >= 2, patch  # a colour and a kind
    pairs = records[0].model_copy(update={"meta": {"patch_words": [[3, "red"], [3, "circle"]]}})
    assert {processor.tokenizer.decode([i]).strip() for i in named_patches(processor, pairs, (8, 8))[3]} == {
        "red",
        "circle",
    }
    with pytest.raises(ValueError, match="names patch 99, outside the grid of 8 x 8"):
        named_patches(processor, records[0].model_copy(update={"meta": {"patch_words": [[99, "red"]]}}), (8, 8))


def test_a_recipe_trains_with_it_and_raises_the_cosines(embedded):
    model, processor = copy.deepcopy(embedded[0]), embedded[1]
    records = list(scene_records("train", 8))
    collator = AlignedCollator(Collator(processor))
    probe = collator(records)
    xf.fuse(model, xf.TextAnchors(threshold=0.2))

    def aligned(network):
        with torch.no_grad():
            return float(aligned_forward(network, {**probe, "use_cache": False}, 1.0)["alignment_loss"])

    before = aligned(model)
    recipe = Recipe(
        steps=4,
        batch_size=8,
        learning_rate=3e-3,
        warmup_steps=0,
        alignment_weight=1.0,
        trainable=Trainable(projector="full"),
    )
    trained = prepare_trainable(model, recipe)
    fine_tune(trained, records, collator, recipe)
    trained.eval()
    assert aligned(trained) < before - 0.05
    with pytest.raises(ValueError, match=r"the projector is frozen; set trainable\.projector to full"):
        Recipe(alignment_weight=1.0)


def test_a_clip_model_labels_patches_over_a_word_list():
    """A random CLIP whose text side is replaced by directions of known patches: each patch gets its own word."""
    from types import SimpleNamespace

    from transformers import CLIPConfig, CLIPModel

    sides = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={**sides, "vocab_size": 20, "projection_dim": 12, "eos_token_id": 2, "bos_token_id": 1},
        vision_config={**sides, "image_size": 16, "patch_size": 8, "projection_dim": 12},
        projection_dim=12,
    )
    torch.manual_seed(0)
    clip = CLIPModel(config).eval()
    pixels = torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        hidden = clip.vision_model(pixels).last_hidden_state[0, 1:]
        patches = clip.visual_projection(clip.vision_model.post_layernorm(hidden))
    clip.get_text_features = lambda **given: patches[[2, 0, 3, 1]]
    processor = SimpleNamespace(
        image_processor=lambda images, return_tensors: {"pixel_values": pixels},
        tokenizer=lambda words, padding, return_tensors: {},
    )
    words = ["two", "zero", "three", "one"]
    assert clip_patch_words(clip, processor, None, words, (2, 2), least=0.0) == [
        [0, "zero"], [1, "one"], [2, "two"], [3, "three"]
    ]  # fmt: skip
    assert len(clip_patch_words(clip, processor, None, words, (4, 4), least=0.0)) == 16
    assert clip_patch_words(clip, processor, None, words, (2, 2), least=1.1) == []


def test_a_labeller_names_what_has_no_boxes_and_leaves_given_pairs_alone(monkeypatch):
    from crossfuse.data.records import Record
    from crossfuse.fusions.anchors import patch_labels

    _, processor = xf.load_embedded()
    seen = []

    def label(model, clip_processor, image, words, grid, least):
        seen.append(image.size)
        return [[3, words[0]], [5, words[1]]]

    monkeypatch.setattr(patch_labels, "clip_patch_words", label)
    labeller = ClipLabeller(None, None, ["circle", "square"])
    scene = next(iter(scene_records("test", 1)))
    bare = Record.of_question("bare", "what is this?", "circle", scene.images)
    grid = (8, 8)
    found = named_patches(processor, bare, grid, labeller)
    circle = set(processor.tokenizer.encode(" circle", add_special_tokens=False))
    assert found.keys() == {3, 5}
    assert circle & found[3]
    named_patches(processor, bare, grid, labeller)
    assert len(seen) == 1  # a second epoch costs nothing
    assert named_patches(processor, scene, grid, labeller) == named_patches(processor, scene, grid)
    with pytest.raises(ValueError, match="at least 2 words; got 1"):
        ClipLabeller(None, None, ["circle"])
    with pytest.raises(ValueError, match="got 0 label_words"):
        Recipe(alignment_weight=1.0, trainable=Trainable(projector="full"), label_model="somewhere")
