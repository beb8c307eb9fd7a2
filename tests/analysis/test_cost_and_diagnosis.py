"""Cost against PyTorch's own counter on real runs; the three failure conditions on models made to meet them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import crossfuse as xf
from crossfuse.analysis.anchor_cost import anchor_cost
from crossfuse.analysis.anchor_precision import anchor_precision
from crossfuse.analysis.diagnose import diagnose
from crossfuse.analysis.word_patches import scene_records
from crossfuse.data.collate import Collator
from tiny import I, batch, llava


def operations(model, inputs) -> int:
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(**inputs, use_cache=True, logits_to_keep=1)
    return counter.get_total_flops()


@pytest.mark.parametrize("keep", [None, 0.5])
def test_counted_operations_are_those_of_pytorchs_counter(keep):
    inputs = batch([2, I, 9])
    given = {**inputs, "prompt_mask": torch.ones_like(inputs["input_ids"]).bool()}
    fusion = xf.TextAnchors(threshold=0.15, keep_image_tokens=keep)
    model = xf.fuse(llava(), fusion)
    with torch.no_grad():
        cache = model(**given, use_cache=True).cache
    added = cache.get_seq_length(0) - inputs["input_ids"].shape[1]
    words = int((inputs["input_ids"] > 2).sum())  # candidates: no bos, pad or placeholder
    with torch.device("meta"):
        weightless = type(llava())(llava().config)
    cost = anchor_cost(weightless, text_tokens=11, image_tokens=16, copies=added)
    matching = 2 * words * 16 * 32 * (1 if keep is None else 2)  # pruning matches in the other direction too
    plain = llava()
    for network in (model, plain):  # the CPU's fused attention kernel is not in the counter's list
        network.set_attn_implementation("eager")
    extra = operations(model, given) - operations(plain, inputs)
    assert extra == cost.added_operations + matching
    assert cost.matching_operations == 2 * 11 * 16 * 32
    held = sum(t.numel() * 4 for layer in cache.layers for t in (layer.keys, layer.values))
    unfused = 2 * 3 * inputs["input_ids"].shape[1] * 16 * 4  # layers, tokens, key width
    assert cost.added_cache_bytes == held - unfused
    with pytest.raises(ValueError, match="without storage"):
        anchor_cost(llava(), text_tokens=1, image_tokens=1, copies=0)


def test_pruning_makes_the_counted_prompt_cheaper():
    from crossfuse.analysis.cost import prompt_cost

    with torch.device("meta"):
        model = type(llava())(llava().config)
    whole, pruned = (
        prompt_cost(model, xf.TextAnchors(keep_image_tokens=keep), text_tokens=9, image_tokens=16)
        for keep in (None, 0.5)
    )
    assert pruned.prefill < whole.prefill
    assert pruned.decode < whole.decode


@pytest.fixture(scope="module")
def scenes():
    return list(scene_records("test", 24, kinds=("colour", "shape", "relation")))


def test_diagnosis_of_the_embedded_model_names_each_condition(embedded, scenes):
    model, processor = embedded
    found = diagnose(model, processor, scenes, 0.1, attention_samples=3)
    assert [f.name for f in found.findings] == [
        "cosines below the threshold", "cosines not tied to meaning", "attention well placed already"
    ]  # fmt: skip
    assert found.promising == (not any(f.met for f in found.findings))
    assert found.precision.words > 20
    high = diagnose(model, processor, scenes, 0.999, attention_samples=1).findings[0]
    assert high.met
    assert "lower τ or use share=0.10" in high.sentence
    assert high.numbers["share"] == 0


def test_image_tokens_that_ignore_the_image_are_found_out(embedded, scenes):
    """A projector of zero weight gives every image the same tokens: no cosine can depend on the picture."""
    model, processor = copy.deepcopy(embedded[0]), embedded[1]
    model.model.multi_modal_projector.linear_2.weight.data.zero_()
    meaning = diagnose(model, processor, scenes, 0.1, attention_samples=1).findings[1]
    assert meaning.met
    assert meaning.numbers["difference"] == pytest.approx(0, abs=1e-6)
    batch_of = Collator(processor, prompt_only=True)(scenes)
    blind = anchor_precision(model, processor, scenes, batch_of)
    assert blind.hits == blind.shuffled_hits
    assert blind.difference.low <= 0 <= blind.difference.high


def test_attention_that_is_placed_already_is_found_out(embedded, scenes):
    """Queries and keys that are the (unrotated) states themselves at a large scale attend to what resembles them."""
    model, processor = embedded
    ratio = diagnose(model, processor, scenes, 0.1, attention_samples=4).findings[2].numbers["ratio"]
    blunt = copy.deepcopy(model)
    for layer in blunt.model.language_model.layers:
        layer.self_attn.q_proj.weight.data.zero_()  # every key scores the same: attention is uniform
    uniform = diagnose(blunt, processor, scenes, 0.1, attention_samples=4).findings[2]
    assert uniform.numbers["ratio"] == pytest.approx(1, abs=1e-4)
    assert not uniform.met
    assert ratio != pytest.approx(1, abs=1e-3)
