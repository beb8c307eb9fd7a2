"""LLaVA: image tokens as transformers computes them, over towers, layers, dtypes and several images a sample."""

from __future__ import annotations

import pytest
import torch

import crossfuse as xf
from crossfuse.backbones import backbone_for, supported_architectures
from matrix import MATRIX
from oracles import cross_attention_logits, image_tokens, text_anchor_logits
from tiny import FAMILIES, IMAGE, PATCHES, I, assert_close, batch, fused, labelled, llava, logits, rows_of

ANCHORS, CROSS = MATRIX["text-anchors"][0], xf.CrossAttention(joint_text=True)


@pytest.mark.parametrize("vision", ["clip", "siglip"])
@pytest.mark.parametrize(("layers", "strategy"), [(-1, None), (-2, None), (1, None), ([-1, 1], None), (-1, "full")])
def test_image_tokens_equal_those_of_transformers(vision, layers, strategy):
    expected_tokens = PATCHES + (strategy == "full" and vision == "clip")  # the class token
    model = llava(vision=vision)
    model.config.vision_feature_layer = layers
    if isinstance(layers, list):
        projector = model.model.multi_modal_projector
        projector.linear_1 = torch.nn.Linear(64, projector.linear_1.out_features)
    if strategy:
        model.config.vision_feature_select_strategy = strategy
    backbone = backbone_for(model)
    pixels = torch.randn(3, 3, 16, 16)
    mine = backbone.encode(model.model, None, {"pixel_values": pixels})
    stock = model.model.get_image_features(pixels, return_dict=True).pooler_output
    assert len(mine.features) == 3
    for a, b in zip(mine.features, stock, strict=True):
        assert len(a) == expected_tokens
        assert torch.equal(a, b)
    assert mine.grids == [(4, 4) if expected_tokens == PATCHES else None] * 3


def test_arguments_of_the_call_win_over_the_config():
    model = llava()
    pixels = torch.randn(1, 3, 16, 16)
    arguments = {"pixel_values": pixels, "vision_feature_layer": 1, "vision_feature_select_strategy": "full"}
    mine = backbone_for(model).encode(model.model, None, arguments)
    stock = model.model.get_image_features(
        pixels, vision_feature_layer=1, vision_feature_select_strategy="full", return_dict=True
    )
    assert torch.equal(mine.features[0], stock.pooler_output[0])


def test_no_images_no_features():
    model = llava()
    assert backbone_for(model).encode(model.model, None, {"pixel_values": None}) is None
    assert backbone_for(model).encode(model.model, {}, {}) is None


@pytest.mark.parametrize(("text", "vision"), FAMILIES, ids=str)
@pytest.mark.parametrize("padding", ["left", "right"])
def test_cross_attention_of_every_family_equals_the_equations(text, vision, padding):
    """Norms over queries and keys, biases, both towers; 0, 1, 2 and adjacent images; both paddings."""
    model, inputs = fused(CROSS, text=text, vision=vision), batch([2], [1, I, 2], [I, I, 1, I, 1], padding=padding)
    out = logits(model, inputs)
    for row, (mask, single) in enumerate(zip(inputs["attention_mask"].bool(), rows_of(inputs), strict=True)):
        with torch.no_grad():
            images = image_tokens(model, single.get("pixel_values"))
            expected = cross_attention_logits(model, CROSS, single["input_ids"][0].tolist(), images)
        assert_close(out[row][mask], expected)


@pytest.mark.parametrize(("text", "vision"), FAMILIES, ids=str)
@pytest.mark.parametrize("padding", ["left", "right"])
def test_text_anchors_of_every_family_equal_the_expansion(text, vision, padding):
    inputs = batch([3], [2, I, 3], [I, I, 1, I, 2], padding=padding)
    model, plain = fused(ANCHORS, text=text, vision=vision), llava(text, vision)
    out = logits(model, inputs)
    for row, (mask, single) in enumerate(zip(inputs["attention_mask"].bool(), rows_of(inputs), strict=True)):
        ids = single["input_ids"][0].tolist()
        words = [j for j, token in enumerate(ids) if token != IMAGE]
        with torch.no_grad():
            images = image_tokens(plain, single.get("pixel_values"))
            expected = text_anchor_logits(plain, ANCHORS, ids, images, words, len(ids))
        assert_close(out[row][mask], expected)


@pytest.mark.parametrize(("text", "vision"), FAMILIES, ids=str)
def test_insertion_of_every_family_equals_the_unfused_model_exactly(text, vision):
    inputs = labelled(batch([3], [2, I, 3], [I, I, 1, I, 2]))
    model, plain = fused(xf.Insertion(), text=text, vision=vision), llava(text, vision)
    assert torch.equal(logits(model, inputs), logits(plain, inputs))
    assert torch.equal(model(**inputs).loss, plain(**inputs).loss)


def test_insertion_of_pooled_tokens_equals_a_shorter_sequence():
    """MeanPool(4) before insertion: the plain decoder over text and 4 tokens an image, by hand."""
    fusion = xf.Insertion(compress=xf.MeanPool(4))
    model, plain, inputs = fused(fusion), llava(), batch([2, I, 3], [I, 1, I, 2])
    out = logits(model, inputs)
    for row, (mask, single) in enumerate(zip(inputs["attention_mask"].bool(), rows_of(inputs), strict=True)):
        with torch.no_grad():
            images = image_tokens(plain, single["pixel_values"], 4)
            fusionless = xf.TextAnchors(threshold=1.0)
            expected = text_anchor_logits(plain, fusionless, single["input_ids"][0].tolist(), images, [], 0)
        assert_close(out[row][mask], expected)


def test_supported_architectures_are_listed():
    assert "LlavaForConditionalGeneration" in supported_architectures()


def test_a_decoder_without_rotary_layers_is_refused():
    model = llava()
    del model.model.language_model.rotary_emb
    with pytest.raises(ValueError, match=r"LlamaModel has no rotary layers; supported are decoders built like Llama"):
        xf.fuse(model, xf.Insertion())


def test_special_ids_are_bos_eos_pad_and_placeholder():
    model = llava()
    assert set(backbone_for(model).special_ids(model.model)) == {0, 1, 2}
    model.config.text_config.eos_token_id = [2, 9]
    assert set(backbone_for(model).special_ids(model.model)) == {0, 1, 2, 9}
