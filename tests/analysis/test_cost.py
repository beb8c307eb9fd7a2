"""Counts without running against counts of real forwards of the same model."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import crossfuse as xf
from crossfuse.analysis.cost import parameters_by_part, prompt_cost
from crossfuse.analysis.flops import count_operations

TEXT = 20


@pytest.fixture(scope="module")
def models():
    """(embedded model, the same without storage, one prompt of an image and TEXT tokens)."""
    model, _ = xf.load_embedded()
    with torch.device("meta"):
        empty = type(model)(model.config)
    image = torch.full((1, 64), model.config.image_token_id)
    text = torch.arange(10, 10 + TEXT)[None]
    inputs = {
        "input_ids": torch.cat([image, text], dim=1),
        "attention_mask": torch.ones(1, 64 + TEXT, dtype=torch.long),
        "pixel_values": torch.rand(1, 3, 96, 96, generator=torch.Generator().manual_seed(0)),
    }
    return model, empty, inputs


def counted(model, inputs) -> int:
    """Operations of a real forward. The counter does not see the CPU's fused attention, so plain attention runs."""
    with sdpa_kernel(SDPBackend.MATH):
        return count_operations(lambda: model(**inputs, use_cache=False, logits_to_keep=1))


def test_parameters_add_up(models):
    model, empty, _ = models
    assert sum(parameters_by_part(empty).values()) == sum(p.numel() for p in model.parameters())
    assert parameters_by_part(empty) == parameters_by_part(model)


def test_insertion_is_what_the_counter_sees(models):
    model, empty, inputs = models
    cost = prompt_cost(empty, xf.Insertion(), text_tokens=TEXT)
    assert cost.image_tokens == 64
    assert cost.vision + cost.prefill == counted(model, inputs)


@pytest.mark.parametrize(
    "fusion",
    [
        xf.CrossAttention(),
        xf.CrossAttention(share_projections=True),
        xf.CrossAttention(every=2),
        xf.CrossAttention(every=2, replace=True),
        xf.CrossAttention(update_images=True),
        xf.CrossAttention(gist_tokens=2),
    ],
)
def test_cross_attention_is_what_the_counter_sees(models, fusion):
    model, empty, inputs = models
    cost = prompt_cost(empty, fusion, text_tokens=TEXT)
    with xf.fused(model, fusion):
        assert cost.vision + cost.prefill == pytest.approx(counted(model, inputs), rel=0.01)


def test_anchors_cost_their_copies_and_one_product(models):
    _, empty, _ = models
    plain = prompt_cost(empty, xf.Insertion(), text_tokens=TEXT)
    assert prompt_cost(empty, xf.TextAnchors(threshold=1.0), text_tokens=TEXT) == plain
    longer = prompt_cost(empty, xf.Insertion(), text_tokens=TEXT + 2)
    anchored = prompt_cost(empty, xf.TextAnchors(share=0.1), text_tokens=TEXT)
    width = empty.config.get_text_config().hidden_size
    assert anchored.prefill == longer.prefill + 2 * 64 * TEXT * width


def test_image_anchors_copy_image_tokens(models):
    _, empty, _ = models
    longer = prompt_cost(empty, xf.Insertion(), text_tokens=TEXT + 6 + 3)
    anchored = prompt_cost(empty, xf.ImageAnchors(share=0.1, pause_tokens=3), text_tokens=TEXT)
    width = empty.config.get_text_config().hidden_size
    assert anchored.prefill == longer.prefill + 2 * 64 * TEXT * width


def test_compression_shortens_the_prompt(models):
    _, empty, _ = models
    assert prompt_cost(empty, xf.Insertion(compress=xf.MeanPool(4)), text_tokens=TEXT).image_tokens == 16


def test_models_with_weights_are_refused(models):
    with pytest.raises(ValueError, match="without storage"):
        prompt_cost(models[0], xf.Insertion())
