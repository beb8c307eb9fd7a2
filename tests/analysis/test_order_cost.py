"""The counts of position fusions and learned reordering, against PyTorch's counter and the tensors of real runs."""

from __future__ import annotations

import dataclasses

import pytest
import tiny_qwen
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlavaForConditionalGeneration

import crossfuse as xf
from crossfuse.analysis.axes import added_parameters, cache_bytes, measure, predict
from crossfuse.analysis.cost import prompt_cost
from crossfuse.analysis.flops import count_operations
from crossfuse.analysis.order_cost import order_cost
from crossfuse.fusions.positions import modality_attention
from crossfuse.fusions.reorder.measures import sinkhorn_bytes
from tiny import PATCHES, WIDTH, I, batch, llava

TEXT, IMAGE = 12, PATCHES
FUSIONS = [
    xf.ModalityRoPE(),
    xf.ModalityRoPE(layers=None),
    xf.ModalityRoPE(layers=()),
    xf.ModalityRoPE(layers=(1, 2), compress=xf.MeanPool(4)),
    xf.GumbelReorder(width=16, depth=3, heads=2),
    xf.GumbelReorder(compress=xf.MeanPool(4)),
    xf.GumbelReorder(score="identity"),
]
ON_A_GRID = [xf.CircleRoPE(), xf.CircleRoPE(alternate=True), xf.ModalityRoPE(layers=(0, 2)), xf.GumbelReorder()]


def empty(model):
    with torch.device("meta"):
        return type(model)(model.config)


def counted(model, inputs) -> int:
    """The counter does not see the CPU's fused attention, so plain attention runs."""
    with sdpa_kernel(SDPBackend.MATH):
        return count_operations(lambda: model(**inputs, use_cache=False, logits_to_keep=1))


def ids(count: int) -> torch.Tensor:
    return torch.arange(5, 5 + count)[None]


@pytest.fixture(scope="module")
def prompt():
    """An image, then TEXT tokens none of which is a special one."""
    inputs = batch([I, TEXT])
    inputs["input_ids"] = torch.cat([inputs["input_ids"][:, -TEXT - IMAGE : -TEXT], ids(TEXT)], 1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    return inputs


@pytest.mark.parametrize("fusion", FUSIONS, ids=repr)
def test_one_row_of_positions_is_what_the_counter_sees(fusion, prompt):
    model = llava()
    plain = counted(model, prompt)
    given = {"text_tokens": TEXT, "image_tokens": IMAGE}
    cost, insertion = (prompt_cost(empty(model), f, **given) for f in (fusion, xf.Insertion()))
    with xf.fused(model, fusion):
        assert counted(model, prompt) - plain == cost.prefill - insertion.prefill


@pytest.mark.parametrize("fusion", ON_A_GRID, ids=repr)
def test_three_rows_of_positions_are_what_the_counter_sees(fusion):
    model = tiny_qwen.qwen()
    inputs = tiny_qwen.batch([(4, 6), 5])
    known = ~torch.isin(inputs["input_ids"][0], torch.tensor([tiny_qwen.START, tiny_qwen.END]))  # special: never moved
    for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
        inputs[name] = inputs[name][:, known]
    images = int((inputs["input_ids"] == tiny_qwen.IMAGE).sum())
    given = {"text_tokens": inputs["input_ids"].shape[1] - images, "image_tokens": images}
    cost, insertion = (prompt_cost(empty(model), f, **given) for f in (fusion, xf.Insertion()))
    plain = counted(model, inputs)
    with xf.fused(model, fusion):
        assert counted(model, inputs) - plain == cost.prefill - insertion.prefill
    if isinstance(fusion, xf.CircleRoPE):
        assert cost == insertion


@pytest.mark.parametrize("fusion", [f for f in FUSIONS if f.compress is None], ids=repr)
def test_the_table_of_axes_holds_them(fusion):
    model = llava()
    row = predict(empty(model), "", fusion, TEXT, IMAGE, [1, 3])
    row = measure(model, row, fusion, TEXT, [1, 3])
    with xf.fused(model, fusion):
        assert row.added_parameters == sum(p.numel() for p in xf.fusion_parameters(model).values())
    assert row.cache_bytes == row.measured_cache_bytes
    assert row.prefill == pytest.approx(row.measured_prefill, rel=0.05)
    assert row.decode == pytest.approx(row.measured_decode, rel=0.05)
    if not isinstance(fusion, xf.GumbelReorder):  # the counter leaves Sinkhorn's iterations out
        assert row.training == pytest.approx(row.measured_training, rel=0.05)


def test_a_soft_order_is_counted_in_training(prompt):
    fusion = xf.GumbelReorder(width=16, depth=1, iterations=7)
    model = xf.fuse(llava(), fusion)
    told = {**prompt, "prompt_mask": torch.ones_like(prompt["input_ids"]).bool()}
    hard = counted(model, told)
    product = counted(model.train(), told) - hard
    cost = order_cost(empty(llava()).model.language_model, fusion, IMAGE, TEXT)
    tokens = IMAGE + TEXT
    assert product == 2 * tokens**2 * WIDTH
    assert cost.training - product == 7 * 2 * 5 * tokens**2
    shape = empty(llava())
    row = predict(shape, "", fusion, TEXT, IMAGE, [1])
    assert row.training == 3 * (row.prefill + cost.training)
    assert cost.call_bytes == 4 * tokens**2
    assert cost.saved_bytes == sinkhorn_bytes(tokens, iterations=7)


def test_bytes_of_a_call_are_those_of_its_tensors(prompt, monkeypatch):
    made = []

    def spy(vision, *given):
        wide = widened(vision, *given)
        tables = [t for rope in (vision.within_rope, vision.between_rope) for t in rope]
        made.append(sum(t.numel() * t.element_size() for t in [*tables, *wide]))
        return wide

    widened = modality_attention._widened
    monkeypatch.setattr(modality_attention, "_widened", spy)
    fusion = xf.ModalityRoPE(layers=(1,))
    with torch.no_grad(), xf.fused(llava(), fusion) as model:
        model(**prompt)
    cost = order_cost(empty(llava()).model.language_model, fusion, IMAGE, TEXT)
    assert made == [cost.call_bytes]


def test_a_new_order_is_no_part_of_what_others_cost():
    with torch.device("meta"):
        shape = LlavaForConditionalGeneration(llava().config)
    for fusion in (xf.Insertion(), xf.TextAnchors(), xf.CircleRoPE(layers=()), xf.GumbelReorder(score="identity")):
        cost = order_cost(shape.model.language_model, fusion, IMAGE, TEXT)
        assert not any(dataclasses.astuple(cost))
        assert added_parameters(shape, fusion) == 0
        assert cache_bytes(shape, fusion, TEXT, IMAGE, 2) == cache_bytes(shape, xf.Insertion(), TEXT, IMAGE, 2)
