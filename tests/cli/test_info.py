"""`crossfuse info`: numbers that agree with the model itself, from a configuration alone."""

import json
import re

import pytest
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import crossfuse as xf


def numbers(text: str, label: str) -> list[int]:
    (line,) = [line for line in text.splitlines() if line.strip().startswith(label)]
    return [int(n.replace(",", "")) for n in re.findall(r"\b\d[\d,]*\b(?!\.|%)", line)]


def test_parameters_of_the_embedded_model(run):
    code, out, err = run("info")
    assert code == 0, err
    model, _ = xf.load_embedded()
    assert numbers(out, "weights")[0] == sum(p.numel() for p in model.parameters())
    for name in xf.FUSIONS:
        if f"{name} does not fit" in out:  # m-RoPE alone
            assert name == "circle-rope"
            continue
        with xf.fused(model, xf.make_fusion(name)):
            added = sum(p.numel() for p in xf.fusion_parameters(model).values())
        assert numbers(out, name)[0] == added


def big_config() -> LlavaConfig:
    """LLaVA-1.5-7B's shape."""
    text = LlamaConfig(
        vocab_size=32064, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32
    )
    vision = CLIPVisionConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        image_size=336,
        patch_size=14,
        projection_dim=768,
    )
    return LlavaConfig(
        text_config=text, vision_config=vision, architectures=[LlavaForConditionalGeneration.__name__], dtype="float16"
    )


def test_a_configuration_is_enough(run, tmp_path):
    """A model of seven billion parameters is described without its weights."""
    big_config().save_pretrained(tmp_path)
    code, out, err = run("info", str(tmp_path))
    assert code == 0, err
    assert 7.0e9 < numbers(out, "weights")[0] < 7.1e9
    assert "13.2 GiB in float16" in out
    assert "image of 576 tokens" in out
    # Two operations for each weight and token, plus attention: 626 tokens through 6.6 billion weights.
    assert re.search(r"insertion .* 8\.\d\d TFLOP", out), out


def test_saved_fusion_is_named(run, tmp_path):
    model, _ = xf.load_embedded()
    xf.fuse(model, xf.TextAnchors()).save_pretrained(tmp_path)
    _, out, _ = run("info", str(tmp_path))
    assert "saved with     fusion text-anchors" in out


def test_a_fusion_that_does_not_fit_says_why(run, monkeypatch):
    def refuse(*_):
        raise ValueError("OddAttention has no q_proj")

    monkeypatch.setattr(xf.CrossAttention, "check_model", refuse)
    code, out, _ = run("info")
    assert code == 0
    assert "cross-attention does not fit: OddAttention has no q_proj" in out
    assert numbers(out, "insertion")[0] == 0


def test_images_of_any_size(run, tmp_path):
    """Qwen2.5-VL takes images of any size: a number of image tokens is assumed, and said."""
    from transformers import Qwen2_5_VLConfig

    Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 200,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        },
        vision_config={"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32},
        architectures=["Qwen2_5_VLForConditionalGeneration"],
    ).save_pretrained(tmp_path)
    code, out, err = run("info", str(tmp_path))
    assert code == 0, err
    assert "One image of 256 tokens" in out
    for name in xf.FUSIONS:
        assert numbers(out, name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no JSON"),
        (json.dumps({"model_type": "bert", "architectures": ["BertModel"]}), "holds BertModel, which is not supported"),
        (json.dumps({"model_type": "llava"}), "holds a model of type 'llava', which is not supported"),
    ],
)
def test_bad_configurations(run, tmp_path, content, message):
    (tmp_path / "config.json").write_text(content)
    code, out, err = run("info", str(tmp_path))
    assert code == 2
    assert out == ""
    (line,) = err.splitlines()
    assert message in line
