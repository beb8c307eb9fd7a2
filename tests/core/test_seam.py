"""The seam between crossfuse and transformers: signatures, classes, copies, refusals (design §2)."""

from __future__ import annotations

import functools
import inspect
import io
import json
import pickle

import pytest
import torch
from transformers import DynamicCache, LlavaForConditionalGeneration

import crossfuse as xf
from matrix import each_fusion, keeps_length
from tiny import IMAGE, I, batch, clone, fused, generate, labelled, llava, logits, rows_of

ROWS = [[2, I, 4], [3, I, 1, I, 4]]


# ---------------------------------------------------------------- signature, names, copies
@each_fusion
def test_the_signature_keeps_every_name_and_adds_ours(fusion):
    """`generate` looks for mm_encoder_outputs, `Trainer` drops columns that are not named, `pipeline` refuses them."""
    model = fused(fusion)
    for given in (inspect.signature(type(model).forward), inspect.signature(model.forward)):
        stock = list(inspect.signature(LlavaForConditionalGeneration.forward).parameters)
        names = [n for n in given.parameters if n in stock]
        assert names == [n for n in stock if n in given.parameters]
        assert set(stock) - {"self"} <= set(given.parameters)
        assert {"anchor_mask", "prompt_mask", "segment_ids", "return_logits"} <= set(given.parameters)
    assert "mm_encoder_outputs" in inspect.signature(model.forward).parameters
    assert model._supports_mm_encoder_outputs()


@each_fusion
def test_class_names_and_modules_are_those_of_the_base(fusion):
    plain, model = llava(), fused(fusion)
    for stock, swapped in zip(plain.modules(), (m for n, m in model.named_modules() if ".cross" not in n), strict=True):
        a, b = type(stock), type(swapped)
        assert (a.__name__, a.__qualname__, a.__module__) == (b.__name__, b.__qualname__, b.__module__)
        assert isinstance(swapped, a)
    assert all(m.__class__ is type(m) for m in model.modules())
    decoder = model.model.language_model
    assert {type(layer) for layer in decoder.layers} == {type(layer) for layer in plain.model.language_model.layers}


@each_fusion
def test_pickle_deepcopy_and_torch_save_keep_the_fusion(fusion):
    """Before the first forward: after it, transformers' own recording hooks cannot be pickled (stock LLaVA neither)."""
    model, inputs = fused(fusion), labelled(batch(*ROWS))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    before = logits(model, inputs)
    for copy in (*copies, clone(model)):
        assert type(copy) is type(model)
        assert xf.fusion_of(copy) == fusion
        assert torch.equal(logits(copy, inputs), before)
        xf.unfuse(copy)
        assert type(copy) is LlavaForConditionalGeneration


def test_fused_is_a_context_that_always_unfuses():
    model, inputs = llava(), batch(*ROWS)
    before = logits(model, inputs)
    with xf.fused(model, xf.CrossAttention()) as same:
        assert same is model
        assert not torch.allclose(logits(model, inputs), before, atol=1e-3)
    assert xf.fusion_of(model) is None
    with pytest.raises(ZeroDivisionError), xf.fused(model, xf.CrossAttention()):
        1 / 0  # noqa: B018
    assert torch.equal(logits(model, inputs), before)


@each_fusion
def test_fusing_again_after_unfusing_gives_the_same_model(fusion):
    model, inputs = llava(), labelled(batch(*ROWS))
    torch.manual_seed(0)  # some fusions draw their new weights
    xf.fuse(model, fusion)
    first = logits(model, inputs)
    xf.unfuse(model)
    torch.manual_seed(0)
    xf.fuse(model, fusion)
    assert torch.equal(logits(model, inputs), first)


# ---------------------------------------------------------------- what fuse refuses
def test_fusing_a_fused_model_is_refused():
    model = xf.fuse(llava(), xf.TextAnchors())
    with pytest.raises(ValueError, match=r"already fused with text-anchors; call crossfuse\.unfuse\(model\) first"):
        xf.fuse(model, xf.Insertion())
    assert isinstance(xf.fusion_of(model), xf.TextAnchors)


def test_unfusing_a_plain_model_is_refused():
    with pytest.raises(ValueError, match="not fused; there is nothing to take off"):
        xf.unfuse(llava())


def test_a_family_that_is_not_supported_is_refused_by_name():
    with pytest.raises(ValueError, match=r"LlamaModel is not supported; crossfuse fuses .*LlavaForCond"):
        xf.fuse(llava().model.language_model, xf.Insertion())
    with pytest.raises(ValueError, match="Linear is not supported"):
        xf.fuse(torch.nn.Linear(2, 2), xf.Insertion())


def test_a_fusion_class_instead_of_a_fusion_is_refused():
    with pytest.raises(TypeError, match=r"fusion must be a crossfuse fusion such as crossfuse.TextAnchors\(\)"):
        xf.fuse(llava(), "text-anchors")


def dispatched(model):
    from accelerate import dispatch_model

    parts = [f"model.{name}" for name, _ in model.model.named_children()] + ["lm_head"]
    return dispatch_model(model, device_map=dict.fromkeys(parts, "cpu"), main_device="cpu", force_hooks=True)


@each_fusion
def test_instance_level_forwards_are_refused(fusion):
    """After `dispatch_model` the swapped class would be ignored without a word."""
    model = dispatched(llava())
    state = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=r"instance-level forward.*before dispatching"):
        xf.fuse(model, fusion)
    assert [type(m) for m in model.modules()] == state
    model = dispatched(fused(fusion))
    with pytest.raises(ValueError, match="instance-level forward"):
        xf.unfuse(model)
    assert xf.fusion_of(model) == fusion


@each_fusion
def test_dispatching_after_fusing_works(fusion):
    model, inputs = fused(fusion), labelled(batch(*ROWS))
    before = logits(model, inputs)
    assert torch.equal(logits(dispatched(model), inputs), before)


@pytest.mark.parametrize("fusion", [xf.CrossAttention(), xf.CrossAttention(every=3)], ids=["every", "every=3"])
def test_one_instance_level_forward_deep_inside_leaves_the_model_untouched(fusion):
    model = llava()
    attention = model.model.language_model.layers[2].self_attn
    attention.forward = functools.partial(type(attention).forward, attention)
    keys, classes = list(model.state_dict()), [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match="LlamaAttention carries an instance-level forward"):
        xf.fuse(model, fusion)
    assert list(model.state_dict()) == keys
    assert [type(m) for m in model.modules()] == classes
    assert xf.fusion_of(model) is None


def test_fully_sharded_models_are_refused(monkeypatch):
    """FSDP2 swaps classes as crossfuse does; below or above it the order matters."""

    class FSDPModule:
        pass

    model = llava()
    stock = type(model)
    model.__class__ = type("FSDPLlavaForConditionalGeneration", (FSDPModule, stock), {})
    with pytest.raises(ValueError, match="fuse, then PEFT, then FSDP"):
        xf.fuse(model, xf.Insertion())
    model.__class__ = stock
    body = model.model
    body.__class__ = type("FSDPLlavaModel", (FSDPModule, type(body)), {})
    with pytest.raises(ValueError, match="fuse, then PEFT, then FSDP"):
        xf.fuse(model, xf.Insertion())


# ---------------------------------------------------------------- caches
@each_fusion
@pytest.mark.parametrize("kind", ["static", "quantized", "offloaded"])
def test_other_kinds_of_cache_are_refused_by_name(fusion, kind):
    if fusion.is_identity:
        assert generate(fused(fusion), batch(*ROWS), 2, cache_implementation="static").shape == (2, 2)
        return
    with pytest.raises(ValueError, match=f"cache_implementation='{kind}' cannot hold the state of {fusion.name}"):
        generate(fused(fusion), batch(*ROWS), 2, cache_implementation=kind)


@each_fusion
def test_a_plain_dynamic_cache_is_refused(fusion):
    model, inputs = fused(fusion), batch(*ROWS)
    if fusion.is_identity:
        assert generate(model, inputs, 2, cache=DynamicCache()).shape == (2, 2)
        return
    with pytest.raises(TypeError, match=r"DynamicCache cannot hold the state of .*crossfuse\.new_cache\(model\)"):
        generate(model, inputs, 2, cache=DynamicCache())
    with pytest.raises(TypeError, match=r"DynamicCache cannot hold the state of .*crossfuse\.new_cache\(model\)"):
        model(**inputs, cache=DynamicCache())
    assert torch.equal(generate(model, inputs, 3, cache=xf.new_cache(model)), generate(model, inputs, 3))


@each_fusion
def test_a_new_cache_filled_step_by_step_equals_no_cache(fusion):
    model, inputs = fused(fusion), rows_of(batch(*ROWS))[1]
    prompt = torch.ones_like(inputs["input_ids"], dtype=torch.bool)
    extra = {"prompt_mask": prompt} if fusion.needs_prompt else {}
    cache = xf.new_cache(model)
    logits(model, inputs, cache=cache, **extra)
    assert cache.get_seq_length() == inputs["input_ids"].shape[1]
    ids = torch.nn.functional.pad(inputs["input_ids"], (0, 1), value=9)
    mask = torch.ones_like(ids)
    stepped = logits(model, {"input_ids": ids[:, -1:], "attention_mask": mask}, cache=cache)
    whole = logits(model, {**inputs, "input_ids": ids, "attention_mask": mask}, use_cache=False, **extra)
    torch.testing.assert_close(stepped[:, -1], whole[:, -1], atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------- outputs
@each_fusion
def test_hidden_states_and_attentions_come_in_fused_length_with_readout(fusion):
    model = llava()
    model.set_attn_implementation("eager")
    xf.fuse(model, fusion)
    inputs = batch(*ROWS)
    length = inputs["input_ids"].shape[1]
    if fusion.needs_prompt:
        inputs["prompt_mask"] = torch.ones_like(inputs["input_ids"], dtype=torch.bool)
    out = model(**inputs, output_hidden_states=True, output_attentions=True, use_cache=False)
    fused_length = out.hidden_states[-1].shape[1]
    assert out.logits.shape[:2] == (2, length)
    if fusion.is_identity:
        assert fused_length == length
        return
    assert (fused_length == length) == keeps_length(fusion)
    assert {h.shape[1] for h in out.hidden_states} == {fused_length}
    kept = [a for a in out.attentions if a is not None]
    assert {a.shape[2:] for a in kept} == {(fused_length, fused_length)}
    assert out.readout.shape == (2, length)
    rows = out.readout.clamp(min=0)[..., None].expand(-1, -1, out.hidden_states[-1].shape[-1])
    read = model.lm_head(out.hidden_states[-1].gather(1, rows))
    read = read.masked_fill(out.readout[..., None] < 0, 0)
    torch.testing.assert_close(read, out.logits)


@each_fusion
def test_return_dict_false_gives_a_tuple(fusion):
    model, inputs = fused(fusion), labelled(batch(*ROWS))
    plain = model(**inputs, use_cache=False)
    loss, out = model(**inputs, use_cache=False, return_dict=False)[:2]
    assert torch.equal(loss, plain.loss)
    assert torch.equal(out, plain.logits)


@each_fusion
def test_logits_to_keep_and_positional_arguments(fusion):
    model, inputs = fused(fusion), labelled(batch(*ROWS))
    labels = inputs.pop("labels")
    extra = {"prompt_mask": labels == -100} if fusion.needs_prompt else {}
    whole = logits(model, inputs, **extra)
    assert torch.equal(model(**inputs, logits_to_keep=2, **extra).logits, whole[:, -2:])
    positional = model(inputs["input_ids"], inputs["pixel_values"], inputs["attention_mask"], **extra)
    assert torch.equal(positional.logits, whole)


def test_importing_the_package_does_not_import_torch():
    import subprocess
    import sys

    code = "import crossfuse, sys; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    code += "; assert 'fuse' in dir(crossfuse)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_public_name_can_be_imported():
    assert set(xf.__all__) <= set(dir(xf))
    assert all(getattr(xf, name) is not None for name in xf.__all__)
    with pytest.raises(AttributeError, match="no attribute 'fuze'"):
        xf.fuze  # noqa: B018


def test_config_architectures_name_the_stock_class(tmp_path):
    model = xf.fuse(llava(), xf.CrossAttention())
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlavaForConditionalGeneration"]
    assert config["image_token_id" if "image_token_id" in config else "image_token_index"] == IMAGE
