"""Attention gain, distance bias and mutual information against transformers' own attention weights and formulas."""

from __future__ import annotations

import math

import pytest
import tiny_qwen
import torch

import crossfuse as xf
import tiny
from crossfuse.analysis.attention_gain import attention_gain, summarise
from crossfuse.analysis.attention_scores import attended
from crossfuse.analysis.mutual_information import information_change, mutual_information
from crossfuse.analysis.rope_bias import rope_distance_bias
from tiny import I, assert_close, batch, llava

ANCHORS = xf.TextAnchors(threshold=0.15)


def cases():
    yield llava, batch([2, I, 9])
    yield lambda: llava("qwen3", "siglip"), batch([2, I, I, 6])
    yield tiny_qwen.qwen, tiny_qwen.batch([2, (4, 6), 8])


def eager(make):
    model = make()
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("fused", [False, True])
def test_masses_equal_the_attention_weights_that_transformers_returns(fused):
    for make, inputs in cases():
        model = eager(make)
        given = dict(inputs)
        if fused:
            xf.fuse(model, ANCHORS)
            given["prompt_mask"] = torch.ones_like(inputs["input_ids"]).bool()
        with torch.no_grad():
            weights = model(**given, output_attentions=True, use_cache=False).attentions
        found = attended(model, inputs)
        for layer, expected in zip(found.layers, weights, strict=True):
            for row in range(expected.shape[-1]):
                assert_close(layer.mass(row), expected[0, :, row, : row + 1])
        assert len(found.source) == weights[0].shape[-1]
        assert (len(found.source) > inputs["input_ids"].shape[1]) == fused


def test_gains_are_those_of_the_two_runs_and_the_bound_is_the_score_difference():
    for make, inputs in cases():
        model = xf.fuse(eager(make), ANCHORS)
        gains = attention_gain(model, inputs)
        assert xf.fusion_of(model) == ANCHORS
        assert len(gains) == len(xf.explain_anchors(model, inputs)[0]) > 0
        with torch.no_grad():
            plain = eager(make)(**inputs, output_attentions=True, use_cache=False).attentions
        for anchor in gains:
            if anchor.token_index > anchor.image_column:
                expected = torch.stack([w[0, :, anchor.token_index, anchor.image_column] for w in plain])
                assert_close(anchor.mass_without, expected)
                # Layer 0, copy and original: the same query and the same keys at two places.
                assert_close(
                    anchor.bound, (anchor.scores_copy[0] - anchor.scores_original[0]).exp(), atol=1e-4, rtol=1e-4
                )
                assert (anchor.gain > 0).all()
            assert anchor.distance_copy <= anchor.distance_without + len(gains)
        summary = summarise(gains)
        assert summary.anchors == len(gains)
        assert len(summary.layers) == 3
        assert 0 <= summary.bound_reached <= 1
    assert summarise([]) is None


def test_gain_equals_the_bound_where_only_the_score_of_the_image_token_changes():
    """One image token and one copy: over the common keys gain = bound · Z(original) / Z(copy), by definition."""
    model = xf.fuse(llava(), ANCHORS)
    run = attended(model, batch([2, I, 9]))
    for anchor in attention_gain(model, batch([2, I, 9])):
        copy, original = run.copy(anchor.token_index), run.original(anchor.token_index)
        if copy > original:
            continue
        layer = run.layers[0]
        z = [layer.scores(row, copy + 1).exp().sum(-1) for row in (original, copy)]
        assert_close(anchor.gain, anchor.bound * z[0] / z[1], atol=1e-4, rtol=1e-4)


def test_distance_bias_is_the_mean_cosine_of_the_models_frequencies():
    model = llava()
    theta = model.config.text_config.rope_parameters["rope_theta"]
    frequencies = [theta ** (-i / 4) for i in range(4)]  # head width 8
    distances = [0, 1, 5, 40]
    expected = torch.tensor([sum(math.cos(d * f) for f in frequencies) / 4 for d in distances])
    assert_close(rope_distance_bias(model, distances)["sequence"], expected)
    fused = rope_distance_bias(xf.fuse(model, ANCHORS), distances)["sequence"]
    assert_close(fused, expected)


def test_distance_bias_of_mrope_follows_its_sections():
    """Sections 1, 1, 2 of four frequencies: time turns the first, height the second, width the last two."""
    found = rope_distance_bias(tiny_qwen.qwen(), [0, 1, 7])
    frequencies = [1e4 ** (-i / 4) for i in range(4)]
    sections = {"time": [0], "height": [1], "width": [2, 3], "sequence": [0, 1, 2, 3]}
    for axis, turned in sections.items():
        expected = [
            sum(math.cos(d * f) if i in turned else 1 for i, f in enumerate(frequencies)) / 4 for d in (0, 1, 7)
        ]
        assert_close(found[axis], torch.tensor(expected))


def test_mutual_information_of_known_distributions():
    assert mutual_information(torch.ones(3, 5)) == pytest.approx(0, abs=1e-12)
    assert mutual_information(torch.eye(4) * 7) == pytest.approx(math.log(4))
    skewed = torch.tensor([[0.5, 0.0], [0.25, 0.25]])
    expected = 0.5 * math.log(0.5 / (0.5 * 0.75)) + 0.25 * math.log(0.25 / (0.5 * 0.75)) + 0.25 * math.log(2)
    assert mutual_information(skewed) == pytest.approx(expected)
    with pytest.raises(ValueError, match="must be at least 0"):
        mutual_information(torch.tensor([[-1.0, 2.0]]))


def test_information_without_anchors_is_the_same_before_and_after():
    model, inputs = llava(), batch([2, I, 6])
    change = information_change(xf.fuse(model, xf.TextAnchors(threshold=1.0)), inputs)
    assert change.anchors == 0
    assert change.local_with is None
    assert change.global_with == change.global_without
    xf.unfuse(model)
    change = information_change(xf.fuse(model, ANCHORS), inputs)
    assert change.anchors > 0
    assert change.global_with != change.global_without
    assert change.local_without >= 0


def test_a_batch_is_refused():
    with pytest.raises(ValueError, match="one unpadded sample at a time; got a batch of 2"):
        attended(llava(), batch([2, I, 3], [4]))
    with pytest.raises(ValueError, match="compares a model with and without TextAnchors"):
        attention_gain(tiny.llava(), batch([2, I, 3]))
