"""Checkpoints in other projects' layouts are refused in one line that names ones that work."""

import json

import pytest

import crossfuse as xf
from crossfuse.loading import read_config


@pytest.mark.parametrize(
    ("config", "working"),
    [
        ({"model_type": "tinyllava", "architectures": ["TinyLlavaForConditionalGeneration"]}, "tiny-llava-v1-hf"),
        ({"model_type": "tiny_llava_phi", "architectures": ["TinyLlavaPhiForCausalLM"]}, "tiny-llava-v1-hf"),
        ({"model_type": "llava_llama", "architectures": ["LlavaLlamaForCausalLM"]}, "llava-1.5-7b-hf"),
        ({"model_type": "llava", "architectures": ["LlavaLlamaForCausalLM"]}, "llava-1.5-7b-hf"),
    ],
)
@pytest.mark.parametrize("load", [read_config, xf.from_pretrained])
def test_i2_foreign_layouts_name_supported_checkpoints(tmp_path, load, config, working):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=working) as error:
        load(str(tmp_path))
    assert config["model_type"] in str(error.value)
    assert "\n" not in str(error.value)


def test_i2_known_layouts_are_not_touched(embedded, tmp_path):
    embedded[0].config.save_pretrained(tmp_path)
    assert read_config(str(tmp_path)).model_type == "llava"
