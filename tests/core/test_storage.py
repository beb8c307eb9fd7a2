"""Saving and loading: a new process gives the same bits; what does not fit is named (invariant 10)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import crossfuse as xf
from matrix import EACH, cross_attention, each_fusion
from tiny import I, batch, fused, labelled, llava, logits

# Runs without the test helpers: only the package and what lies on the disk.
READER = """
import sys, torch, crossfuse as xf
from pathlib import Path
from safetensors.torch import load_file, save_file
torch.set_num_threads(1)
inputs = load_file(Path(sys.argv[1]) / "inputs.safetensors")
for folder in sorted(p for p in Path(sys.argv[1]).iterdir() if p.is_dir()):
    model = xf.from_pretrained(folder, dtype=torch.float32).eval()
    name = xf.fusion_of(model).name
    with torch.no_grad():
        out = model(**inputs, use_cache=False).logits
    save_file({n: t.contiguous().clone() for n, t in model.state_dict().items()} | {"logits of " + name: out},
              folder / "read.safetensors")
"""


def test_a_new_process_reads_the_same_bits_of_every_fusion(tmp_path):
    inputs = labelled(batch([2, I, 4], [1, I, 1, I, 3]))
    save_file(inputs, tmp_path / "inputs.safetensors")
    expected = {}
    for number, fusion in enumerate(EACH):
        model, folder = fused(fusion), tmp_path / f"{number:02}"
        model.save_pretrained(folder)
        expected[folder] = {n: t.clone() for n, t in model.state_dict().items()}
        expected[folder]["logits of " + fusion.name] = logits(model, inputs, use_cache=False)
    done = subprocess.run(
        [sys.executable, "-c", READER, str(tmp_path)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for folder, tensors in expected.items():
        read = load_file(folder / "read.safetensors")
        assert set(read) == set(tensors)
        assert all(torch.equal(read[n], t) for n, t in tensors.items())


@each_fusion
def test_what_save_pretrained_writes(fusion, tmp_path):
    """The unfused model in its own format, and the fusion in two files beside it: no pickle, no leftovers."""
    model = fused(fusion)
    model.save_pretrained(tmp_path)
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "fusion.safetensors", "fusion.json"}
    new = xf.fusion_parameters(model)
    assert set(load_file(tmp_path / "fusion.safetensors")) == set(new)
    base = load_file(tmp_path / "model.safetensors")
    assert not any(".cross." in n for n in base)
    llava().save_pretrained(tmp_path / "plain")
    assert set(base) == set(load_file(tmp_path / "plain" / "model.safetensors"))
    description = json.loads((tmp_path / "fusion.json").read_text())
    assert description["fusion"] == json.loads(json.dumps(fusion.to_dict()))
    assert description["keys"] == sorted(new)
    assert set(description["versions"]) == {"crossfuse", "torch", "transformers"}


@each_fusion
def test_save_fusion_and_load_fusion(fusion, tmp_path):
    model, inputs = fused(fusion), labelled(batch([2, I, 4]))
    xf.save_fusion(model, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"fusion.safetensors", "fusion.json"}
    base = llava()
    assert xf.load_fusion(base, tmp_path) is base
    assert xf.fusion_of(base) == fusion
    assert torch.equal(logits(base, inputs), logits(model, inputs))


@cross_attention
def test_stock_transformers_reads_the_base_beside_a_fusion(fusion, tmp_path):
    from transformers import LlavaForConditionalGeneration

    fused(fusion).save_pretrained(tmp_path)
    loaded = LlavaForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32).eval()
    inputs = batch([2, I, 4])
    assert torch.equal(logits(loaded, inputs), logits(llava(), inputs))


@pytest.mark.parametrize("options", [{"low_cpu_mem_usage": True}, {"device_map": "cpu"}], ids=["memory", "device_map"])
@pytest.mark.parametrize("fusion", [xf.CrossAttention(gate="tanh"), xf.CrossAttention()], ids=["gate", "plain"])
def test_no_weight_is_left_uninitialised_or_on_the_meta_device(fusion, options, tmp_path):
    model, inputs = fused(fusion), batch([2, I, 4])
    model.save_pretrained(tmp_path)
    loaded = xf.from_pretrained(tmp_path, dtype=torch.float32, **options).eval()
    state = model.state_dict()
    assert all(not t.is_meta and torch.equal(t, state[n]) for n, t in loaded.state_dict().items())
    assert torch.equal(logits(loaded, inputs), logits(model, inputs))


def test_a_directory_without_a_fusion_gives_the_plain_model(tmp_path):
    llava().save_pretrained(tmp_path)
    loaded = xf.from_pretrained(tmp_path, dtype=torch.float32)
    assert xf.fusion_of(loaded) is None
    with pytest.raises(FileNotFoundError, match=r"holds no fusion\.json; save a fused model there"):
        xf.load_fusion(loaded, tmp_path)
    with pytest.raises(ValueError, match="not fused; there is no fusion to save"):
        xf.save_fusion(loaded, tmp_path)


KEY = "model.language_model.layers.1.self_attn.cross.q_proj.weight"


def broken(folder: Path, change) -> Path:
    xf.save_fusion(fused(xf.CrossAttention()), folder)
    tensors = load_file(folder / "fusion.safetensors")
    change(tensors)
    save_file(tensors, folder / "fusion.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(KEY), r"1 missing \(model\.language_model\.layers\.1\.self_attn\.cross\.q_proj\.weight\)"),
        (lambda t: t.update({"model.extra.cross.x": torch.ones(1)}), r"1 unexpected \(model\.extra\.cross\.x\)"),
        (lambda t: t.update({KEY: torch.ones(2, 3)}), rf"{KEY} has shape \(2, 3\), the model needs \(32, 32\)"),
    ],
    ids=["missing", "unexpected", "mis-shaped"],
)
def test_keys_that_do_not_fit_are_named_and_the_model_is_left_unfused(change, message, tmp_path):
    model, inputs = llava(), batch([2, I, 4])
    before = logits(model, inputs)
    with pytest.raises(ValueError, match=message):
        xf.load_fusion(model, broken(tmp_path, change))
    assert xf.fusion_of(model) is None
    assert torch.equal(logits(model, inputs), before)


def test_a_fusion_of_another_size_is_refused(tmp_path):
    xf.save_fusion(fused(xf.CrossAttention()), tmp_path)
    with pytest.raises(ValueError, match=r"18 missing \(.*, \.\.\.\)|missing"):
        xf.load_fusion(llava(layers=5), tmp_path)
    (tmp_path / "fusion.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no fusion\.safetensors"):
        xf.load_fusion(llava(), tmp_path)


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    import os

    xf.save_fusion(fused(xf.CrossAttention()), tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def full(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        xf.save_fusion(fused(xf.CrossAttention(joint_text=True)), tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_saved_adapter_keeps_its_dtype(tmp_path):
    model = xf.fuse(llava().bfloat16(), xf.CrossAttention())
    xf.save_fusion(model, tmp_path)
    assert {t.dtype for t in load_file(tmp_path / "fusion.safetensors").values()} == {torch.bfloat16}
    loaded = xf.load_fusion(llava().bfloat16(), tmp_path)
    assert all(torch.equal(p, model.state_dict()[n]) for n, p in xf.fusion_parameters(loaded).items())


def test_fusion_parameters_are_the_new_ones_only():
    for fusion in (xf.Insertion(), xf.TextAnchors(), xf.CrossAttention(share_projections=True)):
        assert xf.fusion_parameters(xf.fuse(llava(), fusion)) == {}
    new = xf.fusion_parameters(xf.fuse(llava("qwen2"), xf.CrossAttention(every=2, gate="tanh")))
    prefix = "model.language_model.layers.1.self_attn.cross."
    parts = [f"{k}_proj.{p}" for k in "qkv" for p in ("weight", "bias")] + ["o_proj.weight", "norm.weight", "gate"]
    assert set(new) == {prefix + part for part in parts}
    shared = xf.fusion_parameters(xf.fuse(llava(), xf.CrossAttention(share_projections=True, gate="tanh")))
    assert {n.rpartition(".")[2] for n in shared} == {"gate"}


@cross_attention
def test_new_weights_start_as_copies_of_the_self_attention(fusion):
    model = xf.fuse(llava("qwen3"), fusion)
    state = model.state_dict()
    for name, parameter in xf.fusion_parameters(model).items():
        part = name.rpartition(".cross.")[2]
        if part.startswith(("gate", "gist", "compressor")):
            continue
        origin = name.replace(".cross.", ".")
        if part.startswith("norm."):
            origin = name.replace("self_attn.cross.norm", "input_layernorm")
        assert torch.equal(parameter, state[origin]), name
        assert parameter.data_ptr() != state[origin].data_ptr()
