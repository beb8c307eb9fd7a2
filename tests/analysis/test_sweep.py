"""Sweeps: every value gets a fresh copy, the best one is marked, and bad values cost nothing."""

from __future__ import annotations

import math

import pytest
import torch

import crossfuse as xf
from crossfuse.analysis.sweep import SweepTable, sweep
from crossfuse.training.recipe import Recipe
from tiny import I, batch, llava, logits

TABLE = SweepTable("threshold", (1, 0.2, 0.1), {"accuracy": (0.5, 0.75, 0.75), "loss": (2.0, 1.0, math.nan)}, False)


def test_tables_mark_the_best_value_of_each_row():
    assert TABLE.best("accuracy") == [1, 2]
    assert TABLE.best("loss") == [1]
    assert TABLE.to_csv() == "threshold,1,0.2,0.1\naccuracy,0.5,0.75,0.75\nloss,2,1,\n"
    assert TABLE.to_markdown().splitlines() == [
        "| threshold | 1 | 0.2 | 0.1 |",
        "|---|---:|---:|---:|",
        "| accuracy | 0.5 | **0.75** | **0.75** |",
        "| loss | 2 | **1** | – |",
    ]
    assert TABLE.to_json()["loss"] == [2.0, 1.0, None]
    assert TABLE.to_png().startswith(b"\x89PNG")


def test_each_value_is_measured_on_a_fresh_copy_of_the_model():
    model, inputs = llava(), batch([2, I, 9])
    given = {**inputs, "prompt_mask": torch.ones_like(inputs["input_ids"]).bool()}
    before = logits(model, inputs)

    def spoiling(network):
        found = float(logits(network, given).sum())
        network.lm_head.weight.data.zero_()
        return {"sum": found, "anchors": float(len(xf.explain_anchors(network, inputs)[0]))}

    values = [1.0, 0.2, 0.1]
    table = sweep(model, xf.TextAnchors(), "threshold", values, spoiling)
    assert torch.equal(logits(model, inputs), before)
    assert xf.fusion_of(model) is None
    for value, total, count in zip(values, table.metrics["sum"], table.metrics["anchors"], strict=True):
        fused = xf.fuse(llava(), xf.TextAnchors(threshold=value))
        assert total == float(logits(fused, given).sum())
        assert count == len(xf.explain_anchors(fused, inputs)[0])
    assert table.metrics["anchors"][0] == 0 < table.metrics["anchors"][-1]


def test_recipe_fields_are_swept_by_training_each_value():
    seen = []

    def train(network, recipe):
        seen.append((xf.fusion_of(network).threshold, recipe.learning_rate))
        return network

    def rate(network):
        return {"rate": seen[-1][1]}

    fusion, recipe = xf.TextAnchors(threshold=0.3), Recipe(steps=3)
    table = sweep(llava(), fusion, "learning_rate", [1e-3, 1e-2], rate, recipe=recipe, train=train)
    assert seen == [(0.3, 1e-3), (0.3, 1e-2)]
    assert table.trained
    assert table.metrics == {"rate": (1e-3, 1e-2)}
    sweep(llava(), fusion, "threshold", [0.2], rate, recipe=recipe, train=train)
    assert seen[-1] == (0.2, 1e-3)


def test_unknown_fields_and_bad_values_are_refused_before_anything_runs():
    def never(network):
        raise AssertionError("must not run")

    with pytest.raises(ValueError, match=r"no field 'treshold' \(did you mean 'threshold'\?\)"):
        sweep(llava(), xf.TextAnchors(), "treshold", [1], never)
    with pytest.raises(ValueError, match="fields of a recipe need --train"):
        sweep(llava(), xf.TextAnchors(), "lora.rank", [1], never)
    with pytest.raises(ValueError, match="threshold must be at least 0"):
        sweep(llava(), xf.TextAnchors(), "threshold", [0.1, -1], never)
    with pytest.raises(ValueError, match="at least one value"):
        sweep(llava(), xf.TextAnchors(), "threshold", [], never)
