"""Pruned insertion at the cost of cross-attention, and what compression and copies in windows add to the count."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import crossfuse as xf
from crossfuse.analysis.axes import added_parameters, cache_bytes
from crossfuse.analysis.cost import prompt_cost
from crossfuse.analysis.equal_cost import equal_cost, total
from crossfuse.cli.main import main
from tiny import fused, llava


@pytest.fixture(scope="module")
def shape():
    """A decoder of SmolLM2's proportions, without storage."""
    text = LlamaConfig(
        vocab_size=1000, hidden_size=576, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=9,
        num_key_value_heads=3,
    )  # fmt: skip
    vision = CLIPVisionConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1)
    with torch.device("meta"):
        return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text))


@pytest.mark.parametrize("answer", [0, 40])
@pytest.mark.parametrize("target", [xf.CrossAttention(), xf.CrossAttention.preset("CA+FFN")], ids=["CA", "CA+FFN"])
def test_one_more_image_token_would_exceed_the_target(shape, target, answer):
    sizes = {"text_tokens": 50, "image_tokens": 576}
    found = equal_cost(shape, target, xf.TextAnchors(share=0.2), answer_tokens=answer, **sizes)
    assert 1 <= found.kept < 576
    assert found.fusion.keep_image_tokens == found.kept / 576
    assert found.target_operations == total(prompt_cost(shape, target, **sizes), answer)
    assert found.operations == total(prompt_cost(shape, found.fusion, **sizes), answer) <= found.target_operations
    more = dataclasses.replace(found.fusion, keep_image_tokens=(found.kept + 1) / 576)
    assert total(prompt_cost(shape, more, **sizes), answer) > found.target_operations
    assert found.ratio > 0.98


def test_all_image_tokens_may_stay_where_the_target_is_insertion_itself(shape):
    none = xf.TextAnchors(threshold=1.0)
    assert equal_cost(shape, xf.Insertion(), none, text_tokens=20, image_tokens=64).kept == 64


def test_what_cannot_be_is_said(shape):
    shrunk = xf.CrossAttention.preset("CA-feather", compress=xf.QFormer(queries=1, layers=1, width=32))
    with pytest.raises(ValueError, match="no share of image tokens is as cheap"):
        equal_cost(shape, shrunk, text_tokens=50, image_tokens=4)
    with pytest.raises(ValueError, match="the share of image tokens is what is looked for"):
        equal_cost(shape, xf.CrossAttention(), xf.TextAnchors(keep_image_tokens=0.5))


def test_a_q_former_is_counted():
    compress = xf.QFormer(queries=4, layers=2)
    with torch.device("meta"):
        empty = LlavaForConditionalGeneration(llava().config)
    for fusion in (xf.Insertion(compress=compress), xf.CrossAttention(compress=compress)):
        new = sum(p.numel() for p in xf.fusion_parameters(fused(fusion)).values())
        assert added_parameters(empty, fusion) == new
        bare = dataclasses.replace(fusion, compress=None)
        assert cache_bytes(empty, fusion, 5, 16, 3) == cache_bytes(empty, bare, 5, 4, 3)
        cost, short = prompt_cost(empty, fusion, image_tokens=16), prompt_cost(empty, bare, image_tokens=4)
        assert cost.image_tokens == 4
        products = 0  # multiply-adds of one Q-Former block, d = 32, by hand
        for _ in range(2):
            products += 4 * 4 * 32 * 32 + 2 * 4 * 4 * 32  # self-attention of the queries
            products += 2 * 4 * 32 * 32 + 2 * 16 * 32 * 32 + 2 * 4 * 16 * 32  # attention to 16 image tokens
            products += 2 * 4 * 32 * 128
        assert cost.prefill - short.prefill == 2 * (products + 4 * 32 * 32)
        assert cost.decode == short.decode


def test_copies_in_windows_are_counted(shape):
    plain = prompt_cost(shape, xf.CrossAttention(), text_tokens=50, image_tokens=100)
    anchored = xf.CrossAttention(anchors=xf.TextAnchors(share=0.2))
    cost = prompt_cost(shape, anchored, text_tokens=50, image_tokens=100)
    longer = prompt_cost(shape, xf.CrossAttention(), text_tokens=50, image_tokens=110)
    assert cost.prefill == longer.prefill + 2 * 50 * 100 * 576
    assert plain.decode < cost.decode == longer.decode


def test_the_command_writes_what_it_shows(tmp_path, capsys):
    out = tmp_path / "equal.json"
    with pytest.raises(SystemExit) as done:
        main(["bench", "equal-cost", "--text-tokens", "20", "--out", str(out)])
    assert done.value.code == 0
    assert "at equal operations" in capsys.readouterr().out
    rows = {row["target"]: row for row in json.loads(out.read_text())["rows"]}
    assert 0 < rows["CA"]["keep_image_tokens"] < 1
    assert rows["CA"]["pruned_operations"] <= rows["CA"]["operations"]
