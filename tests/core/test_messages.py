"""Bad input gets one line with the value, the limit and the remedy."""

from __future__ import annotations

import math

import pytest
import torch

import crossfuse as xf
from matrix import CONFIGURATIONS, EACH, each_fusion, name_of
from tiny import IMAGE, PATCHES, I, batch, fused, generate, labelled, llava, logits

changing = pytest.mark.parametrize("fusion", [f for f in EACH if not f.is_identity], ids=name_of)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"threshold": -0.2}, r"threshold must be at least 0 \(1 or more switches anchors off\); got -0\.2"),
        ({"threshold": math.nan}, r"threshold must be at least 0 .*; got nan"),
        ({"threshold": "0.1"}, "threshold must be at least 0"),
        ({"share": 1.5}, r"share must be above 0 and at most 1 .*; got 1\.5"),
        ({"share": 0.0}, r"share must be above 0 and at most 1 .*; got 0\.0"),
        ({"share": math.nan}, "share must be above 0 and at most 1"),
        ({"copy_order": "reverse"}, "copy_order must be one of algorithm, prompt; got 'reverse'"),
        ({"positions": "shared"}, "positions must be one of sequential, inherit; got 'shared'"),
        ({"treshold": 0.1}, r"no field 'treshold' \(did you mean 'threshold'\?\)"),
    ],
)
def test_fields_of_text_anchors(fields, message):
    with pytest.raises(ValueError, match=message):
        xf.make_fusion("text-anchors", **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"every": 0}, r"every must be at least 1 .*; got 0"),
        ({"replace": True}, r"replace=True with every=1 is refused.*use every=2 or more"),
        ({"history": 0}, r"history must be at least 1 \(or None for every earlier image\); got 0"),
        ({"gate": "sigmoid"}, "gate must be one of none, tanh; got 'sigmoid'"),
        ({"video_windows": "clip"}, "video_windows must be one of frame, all; got 'clip'"),
        ({"joint": True}, r"no field 'joint' \(did you mean 'joint_text'\?\)"),
    ],
)
def test_fields_of_cross_attention(fields, message):
    with pytest.raises(ValueError, match=message):
        xf.make_fusion("cross-attention", **fields)


def test_more_blocks_between_cross_attention_than_there_are():
    with pytest.raises(ValueError, match="every must be at most the number of blocks, 3; got 4"):
        xf.fuse(llava(), xf.CrossAttention(every=4))


def test_unknown_fusions_and_compressions_name_the_nearest():
    with pytest.raises(ValueError, match=r"unknown fusion 'text-anchor' \(did you mean 'text-anchors'\?\); known: "):
        xf.make_fusion("text-anchor")
    with pytest.raises(ValueError, match="unknown fusion 'zzz'; known: insertion, "):
        xf.make_fusion("zzz")
    with pytest.raises(ValueError, match="unknown compression 'max-pool'"):
        xf.make_fusion("insertion", compress={"name": "max-pool"})


@pytest.mark.parametrize("k", [0, 2, 3, -4, 2.5, True])
def test_mean_pool_takes_square_numbers(k):
    with pytest.raises(ValueError, match=r"MeanPool k must be a square number \(1, 4, 9, 16, \.\.\.\); got"):
        xf.MeanPool(k)


def test_mean_pool_must_divide_the_patch_grid():
    with pytest.raises(ValueError, match=r"MeanPool\(9\) needs a patch grid divisible by 3; got 4 x 4"):
        logits(fused(xf.Insertion(compress=xf.MeanPool(9))), batch([1, I, 2]))


@pytest.mark.parametrize("fusion", CONFIGURATIONS, ids=name_of)
def test_fields_survive_json(fusion):
    import json

    fields = json.loads(json.dumps(fusion.to_dict()))
    assert xf.make_fusion(**fields) == fusion


def test_fusions_are_frozen():
    import dataclasses

    with pytest.raises(dataclasses.FrozenInstanceError):
        xf.TextAnchors().threshold = 0.5


# ---------------------------------------------------------------- inputs
@each_fusion
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_pixels_that_are_not_finite_name_the_image(fusion, value):
    model, inputs = fused(fusion), batch([1, I, 2], [1, I, 2])
    inputs["pixel_values"][1, 0, 3, 3] = value
    message = r"pixel_values\[1\] holds NaN or infinite values; check how the input was decoded"
    with pytest.raises(ValueError, match=message):
        model(**inputs)
    with pytest.raises(ValueError, match=message):
        generate(model, inputs, 2)


@each_fusion
def test_t2_fewer_placeholders_than_image_tokens(fusion):
    """Truncation cut into the image of row 1: never a mismatch deep inside, never a run without the image."""
    model, inputs = fused(fusion), labelled(batch([2, I, 6], [6, I, 2]), 2)
    cut = {n: (v[:, :20] if v.ndim == 2 else v) for n, v in inputs.items()}
    if fusion.is_identity:
        with pytest.raises(ValueError, match="Image features and image tokens do not match"):
            model(**cut)
        return
    left = int((cut["input_ids"][1] == IMAGE).sum())
    assert left < PATCHES
    message = rf"row 1 holds {left} placeholders.*raise max_length where truncation cut an image"
    with pytest.raises(ValueError, match=message):
        model(**cut)


@changing
def test_t4_placeholders_typed_into_the_text(fusion):
    model, inputs = fused(fusion), batch([2, I, 6])
    inputs["input_ids"][0, 20] = IMAGE
    with pytest.raises(ValueError, match=r"17 image placeholders for 1 images of 16 tokens.*out of the text"):
        model(**inputs)
    with pytest.raises(ValueError, match="keep the placeholder string out of the text"):
        generate(model, inputs, 2)


@each_fusion
def test_t4_a_typed_placeholder_without_any_image_is_text(fusion):
    model, inputs = fused(fusion), batch([8])
    inputs["input_ids"][0, 3] = IMAGE
    assert torch.isfinite(logits(model, inputs)).all()
    assert generate(model, inputs, 2).shape == (1, 2)


@changing
def test_more_images_than_placeholders(fusion):
    model, inputs = fused(fusion), batch([2, I, 6])
    inputs["pixel_values"] = inputs["pixel_values"].repeat(2, 1, 1, 1)
    with pytest.raises(ValueError, match=r"16 image placeholders for 2 images of 32 tokens.*one image per placeholder"):
        model(**inputs)


@pytest.mark.parametrize("fusion", [xf.TextAnchors(threshold=0.1), xf.CrossAttention()], ids=lambda f: f.name)
def test_input_embeddings_alone_are_refused(fusion):
    model, inputs = fused(fusion), batch([2, I, 6])
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    with pytest.raises(ValueError, match="needs input_ids; inputs_embeds alone hide the images"):
        model(inputs_embeds=embeds)


def test_masks_with_four_dimensions_are_refused():
    model, inputs = fused(xf.CrossAttention()), batch([2, I, 6])
    inputs["attention_mask"] = torch.ones(1, 1, 24, 24)
    with pytest.raises(ValueError, match="attention_mask must have 2 dimensions in a fused model; got 4"):
        model(**inputs)


@pytest.mark.parametrize("fields", [{"variant": "big"}])
def test_load_embedded_knows_two_variants(fields):
    with pytest.raises(ValueError, match="variant must be 'model' or 'start'; got 'big'"):
        xf.load_embedded(**fields)
