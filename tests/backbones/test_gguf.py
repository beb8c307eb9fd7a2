"""U2: which GGUF files can be composed is known from the header, before anything is loaded."""

from __future__ import annotations

import struct

import pytest
import torch
from composed_models import tower
from transformers import LlamaConfig, LlamaForCausalLM

import crossfuse as xf
from crossfuse.backbones.gguf import check_text_gguf, read_header


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(architecture: str, fields: int = 0) -> bytes:
    """Arrays and scalars first, so that the reader has to skip them."""
    array = text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc")
    scores = text("tokenizer.ggml.scores") + struct.pack("<IIQ3f", 9, 6, 3, 0.0, 1.0, 2.0)
    scalar = text("general.alignment") + struct.pack("<II", 4, 32)
    named = text("general.architecture") + struct.pack("<I", 8) + text(architecture)
    tensor = text("token_embd.weight") + struct.pack("<IQQIQ", 2, 8, 5, 0, 0)
    return b"GGUF" + struct.pack("<IQQ", 3, 1, 4) + array + scores + scalar + named + tensor


def test_the_header_tells_architecture_and_size(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(header("llama") + bytes(100))
    found = read_header(path)
    assert (found.architecture, found.parameters, found.file_bytes) == ("llama", 40, path.stat().st_size)
    assert check_text_gguf(path) == found


@pytest.mark.parametrize("architecture", ["qwen2vl", "clip", "bert"])
def test_u2_other_architectures_are_refused_with_what_works(tmp_path, architecture):
    path = tmp_path / "model.gguf"
    path.write_bytes(header(architecture))
    with pytest.raises(
        ValueError, match=rf"{architecture}.*text LLM \(llama, mistral, qwen2, qwen3\) and pair it with"
    ):
        xf.VisionLanguageModel.compose(llm=path, vision=tower("cnn"))


def test_files_that_are_none_or_cut_off_are_refused(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(ValueError, match="is not a GGUF file"):
        read_header(path)
    whole = header("llama")
    for length in (10, 40, 120, len(whole) - 4):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="cut off inside its header"):
            read_header(path)
    path.write_bytes(b"GGUF" + struct.pack("<I", 1) + whole[8:])
    with pytest.raises(ValueError, match="GGUF version 1"):
        read_header(path)


def write_llama(path, model) -> None:
    """A Llama as llama.cpp writes it: float32, query and key rows in its rotary order."""
    gguf = pytest.importorskip("gguf")
    config, state = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    letters = [chr(ord("a") + i) for i in range(26)]
    words = ["<unk>", "<s>", "</s>", *letters, *(a + b for a in letters for b in letters)][: config.vocab_size]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3, 3, 3] + [1] * (len(words) - 3))
    writer.add_token_merges([f"{word[0]} {word[1]}" for word in words[29:]])
    for name, token in (("bos", 1), ("eos", 2), ("unk", 0), ("pad", 0)):
        getattr(writer, f"add_{name}_token_id")(token)
    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", state["model.norm.weight"].numpy())
    writer.add_tensor("output.weight", state["lm_head.weight"].numpy())
    for layer in range(config.num_hidden_layers):
        for own, theirs in names.items():
            weight = state[f"model.layers.{layer}.{own}.weight"]
            if theirs in heads:
                weight = weight.unflatten(0, (heads[theirs], 2, -1)).transpose(1, 2).flatten(0, 2)
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_u2_a_text_gguf_becomes_the_llm_of_a_composed_model(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    source = LlamaForCausalLM(config).eval()
    path = tmp_path / "tiny.gguf"
    write_llama(path, source)
    with pytest.warns(UserWarning, match="dequantised to float32 and take 0 MiB in memory"):
        model = xf.VisionLanguageModel.compose(llm=path, vision=tower("clip")).eval()
    ids = torch.tensor([[1, 5, 9, 33, 60]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[..., :64]
        torch.testing.assert_close(logits, source(ids).logits, atol=1e-5, rtol=1e-5)
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(xf.from_pretrained(tmp_path / "saved").eval()(input_ids=ids).logits[..., :64], logits)
