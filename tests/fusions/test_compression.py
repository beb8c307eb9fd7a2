"""Token compression: the Q-Former beside every fusion, grids and positions of m-RoPE, and what does not fit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import Blip2QFormerModel

import crossfuse as xf
from crossfuse.compress import make_compression, parse_compression
from oracles import cross_attention_logits, image_tokens, text_anchor_logits
from tiny import I, assert_close, batch, fused, generate, labelled, llava, logits, rows_of

sys.path.append(str(Path(__file__).parent / "anchors"))
import tiny_qwen

QUERIES = xf.QFormer(queries=5, layers=2)


def queries_of(model, row):
    """The queries' answers, straight from transformers' module."""
    own = model.model.cross.compressor
    tokens = image_tokens(model, row.get("pixel_values"))
    return [
        own.projection(
            own.qformer(query_embeds=own.query_tokens[None], encoder_hidden_states=image[None]).last_hidden_state
        )[0]
        for image in tokens
    ]


# ---------------------------------------------------------------- what it is
@torch.no_grad()
@pytest.mark.parametrize("joint_text", [False, True])
def test_windows_of_queries_equal_the_equations(joint_text):
    fusion = xf.CrossAttention(joint_text=joint_text, compress=QUERIES, history=2)
    model, inputs = fused(fusion), batch([1, I, 2], [2, I, I, 1, I, 2])
    assert isinstance(model.model.cross.compressor.qformer, Blip2QFormerModel)
    for out, mask, row in zip(logits(model, inputs), inputs["attention_mask"].bool(), rows_of(inputs), strict=True):
        ids = row["input_ids"][0].tolist()
        assert_close(out[mask], cross_attention_logits(model, fusion, ids, queries_of(model, row)))


@torch.no_grad()
@pytest.mark.parametrize("anchors", [False, True])
def test_inserted_queries_are_a_shorter_sequence(anchors):
    fusion = xf.TextAnchors(threshold=0.1 if anchors else 0.999, compress=QUERIES)
    model, inputs = fused(fusion), batch([2, I, 4])
    ids = inputs["input_ids"][0].tolist()
    texts = [c for c, token in enumerate(ids) if token > 2]
    expected = text_anchor_logits(model, fusion, ids, queries_of(model, inputs), texts, len(ids))
    assert_close(logits(model, inputs)[0], expected)
    plain = logits(fused(xf.Insertion(compress=QUERIES)), inputs)[0]
    assert torch.allclose(plain, expected, atol=1e-5) is not anchors


def test_image_anchors_take_queries():
    fusion = xf.ImageAnchors(threshold=0.05, compress=QUERIES)
    model, inputs = fused(fusion), batch([2, I, 4], [5])
    assert torch.equal(generate(model, inputs), generate(model, inputs, use_cache=False))


def test_weights_are_the_fusions_and_leave_with_it():
    model = llava()
    keys = list(model.state_dict())
    xf.fuse(model, xf.Insertion(compress=QUERIES))
    new = xf.fusion_parameters(model)
    assert new
    assert all(name.startswith("model.cross.compressor.") for name in new)
    assert {n for n in model.state_dict() if n not in keys} == set(new)
    again = xf.fusion_parameters(xf.fuse(llava(), xf.Insertion(compress=QUERIES)))
    assert all(torch.equal(p, again[n]) for n, p in new.items())  # the same start every time
    before = torch.random.get_rng_state()
    xf.unfuse(model)
    xf.fuse(model, xf.CrossAttention(compress=QUERIES))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert set(new) < set(xf.fusion_parameters(model))
    xf.unfuse(model)
    assert list(model.state_dict()) == keys
    assert not hasattr(model.model, "cross")


@pytest.mark.parametrize("options", [{"low_cpu_mem_usage": True}, {"device_map": "cpu"}], ids=["memory", "device_map"])
def test_loading_leaves_nothing_on_the_meta_device(options, tmp_path):
    model, inputs = fused(xf.Insertion(compress=xf.QFormer(queries=4, layers=1, width=16))), batch([2, I, 4])
    model.save_pretrained(tmp_path)
    loaded = xf.from_pretrained(tmp_path, dtype=torch.float32, **options).eval()
    state = model.state_dict()
    assert all(not t.is_meta and torch.equal(t, state[n]) for n, t in loaded.state_dict().items())
    assert torch.equal(logits(loaded, inputs), logits(model, inputs))


def test_a_model_without_storage_is_fused_without_storage():
    from transformers import LlavaForConditionalGeneration

    config = llava().config
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(config)
    xf.fuse(model, xf.CrossAttention(compress=QUERIES))
    assert all(p.is_meta for p in xf.fusion_parameters(model).values())


def test_peft_trains_and_saves_the_queries(tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    base = xf.fuse(llava(), xf.Insertion(compress=QUERIES))
    targets = r".*language_model\.layers\.\d+\.self_attn\.q_proj"
    model = get_peft_model(base, LoraConfig(target_modules=targets, r=2, modules_to_save=["cross"]))
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad and "compressor" in n}
    assert len(trained) == len(xf.fusion_parameters(xf.fuse(llava(), xf.Insertion(compress=QUERIES))))
    inputs = labelled(batch([2, I, 4]))
    model.train()(**inputs, use_cache=False).loss.backward()
    torch.optim.SGD(trained.values(), lr=0.5).step()
    model.eval()
    out = logits(model, batch([2, I, 4]))
    assert not torch.allclose(
        out, logits(xf.fuse(llava(), xf.Insertion(compress=QUERIES)), batch([2, I, 4])), atol=1e-4
    )
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(xf.fuse(llava(), xf.Insertion(compress=QUERIES)), tmp_path).eval()
    assert_close(logits(loaded, batch([2, I, 4])), out)


def test_images_that_are_too_small_are_refused():
    model = xf.fuse(llava(), xf.Insertion(compress=xf.QFormer()))
    with pytest.raises(
        ValueError, match=r"QFormer\(queries=32\) needs images of at least 32 tokens; got 16: use fewer"
    ):
        logits(model, batch([2, I, 4]))


@pytest.mark.parametrize(("field", "value"), [("queries", 0), ("layers", True), ("width", -1)])
def test_bad_fields(field, value):
    with pytest.raises(ValueError, match=f"QFormer {field} must be at least 1; got {value}"):
        xf.QFormer(**{field: value})


def test_names_and_fields_of_the_command_line():
    for text, made in {
        "mean-pool:4": xf.MeanPool(4),
        "q-former": xf.QFormer(),
        "q-former:8:1": xf.QFormer(8, 1),
    }.items():
        assert make_compression(**parse_compression(text)) == made
    with pytest.raises(ValueError, match=r"unknown compression 'qformer' \(did you mean 'q-former'\?\)"):
        parse_compression("qformer:3")
    with pytest.raises(ValueError, match=r"q-former has no field 'query' \(did you mean 'queries'\?\)"):
        xf.make_fusion("insertion", compress={"name": "q-former", "query": 3})


def test_mean_pool_of_one_changes_nothing():
    fusion, inputs = xf.Insertion(compress=xf.MeanPool(1)), batch([2, I, 4], [3])
    assert fusion.is_identity
    assert torch.equal(logits(xf.fuse(llava(), fusion), inputs), logits(llava(), inputs))
    one, none = (xf.CrossAttention(compress=c) for c in (xf.MeanPool(1), None))
    assert torch.equal(logits(fused(one), inputs), logits(fused(none), inputs))


# ---------------------------------------------------------------- m-RoPE
GRIDS = [[2, (8, 12), 3, (4, 4), 2], [4], [(8, 4), 1, (4, 8, 4), 3]]  # merged: 4 x 6, 2 x 2; 4 x 2, two frames of 4 x 2
QWEN = [
    xf.Insertion(compress=xf.MeanPool(4)),
    xf.Insertion(compress=xf.QFormer(queries=3, layers=1)),
    xf.TextAnchors(threshold=0.15, compress=xf.MeanPool(4)),
    xf.CrossAttention(joint_text=True, compress=xf.MeanPool(4)),
    xf.CrossAttention(joint_text=True, compress=xf.QFormer(queries=3, layers=1)),
    xf.CrossAttention(joint_text=True, anchors=xf.TextAnchors(threshold=0.15)),
]
qwen_fusions = pytest.mark.parametrize(
    "fusion", QWEN, ids=lambda f: f"{f.name}-{getattr(f.compress, 'name', 'anchors')}"
)


def qwen_fused(fusion):
    model = xf.fuse(tiny_qwen.qwen(), fusion)
    draw = torch.Generator().manual_seed(7)
    for parameter in xf.fusion_parameters(model).values():
        parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=draw))
    return model


def whole_prompt(inputs):
    return {**inputs, "prompt_mask": torch.ones_like(inputs["input_ids"], dtype=torch.bool)}


def test_a_pooled_image_stands_where_one_of_the_smaller_grid_would():
    """The decoder sees the embeddings and positions of a prompt whose images have half the rows and columns."""
    model = qwen_fused(xf.Insertion(compress=xf.MeanPool(4)))
    inputs = tiny_qwen.batch([2, (8, 12), 3, (4, 8, 4), 2])
    with tiny_qwen.Seen(model) as seen:
        logits(model, inputs, use_cache=False)
    small = tiny_qwen.batch([2, (4, 6), 3, (4, 4, 2), 2])
    plain = tiny_qwen.qwen().model
    kinds = small["mm_token_type_ids"]
    positions, _ = plain.get_rope_index(
        small["input_ids"], kinds, image_grid_thw=small["image_grid_thw"], video_grid_thw=small["video_grid_thw"],
        second_per_grid_ts=small["second_per_grid_ts"], attention_mask=small["attention_mask"],
    )  # fmt: skip
    from crossfuse.backbones.qwen2_5_vl import QwenVLBackbone

    valid = small["attention_mask"].bool()
    positions = QwenVLBackbone().mended_positions(plain, small["input_ids"], positions, valid)
    assert torch.equal(seen.calls[0]["position_ids"][-3:], positions)


@qwen_fusions
def test_m_rope_batched_single_cached_and_uncached_agree(fusion):
    model, inputs = qwen_fused(fusion), tiny_qwen.batch(*GRIDS)
    told = whole_prompt(inputs) if fusion.needs_prompt else inputs
    out = logits(model, told, use_cache=False)
    for row, mask, single in zip(out, inputs["attention_mask"].bool(), tiny_qwen.rows_of(inputs), strict=True):
        own = whole_prompt(single) if fusion.needs_prompt else single
        assert_close(row[mask], logits(model, own, use_cache=False)[0])
    ids = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert torch.equal(ids, model.generate(**inputs, max_new_tokens=4, do_sample=False, use_cache=False))


@qwen_fusions
def test_m_rope_token_by_token_equals_one_forward(fusion):
    model, inputs = qwen_fused(fusion), tiny_qwen.batch([2, (8, 12), 3, (4, 8, 4), 4])
    length = inputs["input_ids"].shape[1]
    prompt = torch.ones_like(inputs["input_ids"], dtype=torch.bool)
    prompt[:, -2:] = False
    whole = logits(model, inputs, use_cache=False, prompt_mask=prompt)
    cache, parts = xf.new_cache(model), []
    for end, start in ((length - 2, 0), (length - 1, length - 2), (length, length - 1)):
        step = {k: v for k, v in inputs.items() if start == 0 and v.shape != inputs["input_ids"].shape}
        step["input_ids"] = inputs["input_ids"][:, start:end]
        step["attention_mask"] = inputs["attention_mask"][:, :end]
        if start == 0:
            step["prompt_mask"] = prompt[:, :end]
        parts.append(logits(model, step, cache=cache))
    assert_close(torch.cat(parts, 1), whole)


@qwen_fusions
def test_m_rope_packed_equals_padded(fusion):
    model, inputs = qwen_fused(fusion), tiny_qwen.batch([2, (8, 12), 3], [4], [(8, 4), 1, (4, 4), 3])
    singles = tiny_qwen.rows_of(inputs)
    ids = torch.cat([s["input_ids"] for s in singles], 1)
    segments = torch.cat([torch.full_like(s["input_ids"], n) for n, s in enumerate(singles)], 1)
    row = {k: inputs[k] for k in ("pixel_values", "image_grid_thw")}
    row |= {"input_ids": ids, "segment_ids": segments}
    if fusion.needs_prompt:
        row, singles = whole_prompt(row), [whole_prompt(s) for s in singles]
    out = logits(model, row, use_cache=False)[0].split([s["input_ids"].shape[1] for s in singles])
    for packed, single in zip(out, singles, strict=True):
        assert_close(packed, logits(model, single, use_cache=False)[0])


def test_a_grid_that_cannot_be_pooled_is_refused_with_its_size():
    model = qwen_fused(xf.Insertion(compress=xf.MeanPool(4)))
    with pytest.raises(ValueError, match="needs a patch grid divisible by 2; got 3 x 2"):
        logits(model, tiny_qwen.batch([2, (6, 4), 2]))
