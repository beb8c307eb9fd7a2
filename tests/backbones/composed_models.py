"""Tiny composed models, random and in-process: every kind of encoder with some decoder, and batches for them.

All encoders turn a 16 × 16 picture into 16 tokens, so that the batches of `tiny` fit; `for_model` swaps the placeholder
and, for Qwen2.5-VL's tower, cuts pictures into flat patches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    CLIPVisionConfig,
    HeliumConfig,
    LlamaConfig,
    Qwen2Config,
    SiglipVisionConfig,
)
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

import crossfuse as xf
from tiny import IMAGE, PAD, PATCHES, VOCABULARY, WIDTH

PAIRS = [("helium", "clip"), ("qwen2", "siglip"), ("llama", "cnn"), ("helium", "qwen")]
_TEXT = {"helium": HeliumConfig, "qwen2": Qwen2Config, "llama": LlamaConfig}


def llm(name: str = "llama", seed: int = 0, layers: int = 3, **changes: Any) -> Any:
    """A random causal LM whose logits react to every token, in eval mode."""
    fields = {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "pad_token_id": PAD, "bos_token_id": 2, "eos_token_id": 2,
    }  # fmt: skip
    if name == "helium":
        fields["head_dim"] = WIDTH // 4
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(_TEXT[name](**{**fields, **changes})).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(6)
        else:
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    model.generation_config.eos_token_id = None
    return model


def cnn() -> nn.Module:
    """(B, 3, 16, 16) -> (B, 24, 4, 4), with BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 24, 3, stride=2, padding=1)
    )


def tower(name: str, seed: int = 1) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    if name in ("clip", "siglip"):
        cls = CLIPVisionConfig if name == "clip" else SiglipVisionConfig
        return AutoModel.from_config(cls(image_size=16, patch_size=4, **sizes)).eval()
    if name == "qwen":
        config = Qwen2_5_VLVisionConfig(
            depth=2, hidden_size=32, intermediate_size=48, num_heads=4, patch_size=2, out_hidden_size=40,
            fullatt_block_indexes=[1], window_size=8,
        )  # fmt: skip
        return Qwen2_5_VisionTransformerPretrainedModel._from_config(config).eval()
    return cnn().eval()


def composed(text: str = "llama", vision: str = "cnn", **options: Any) -> Any:
    changes = {key: options.pop(key) for key in ("layers", "tie_word_embeddings") if key in options}
    model = xf.VisionLanguageModel.compose(llm(text, **changes), tower(vision), image_size=16, **options).eval()
    for parameter in model.model.multi_modal_projector.parameters():
        parameter.data.mul_(6)
    return model


def for_model(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """A batch of `tiny` with the placeholder and the kind of pixels that ``model`` takes."""
    made = dict(inputs)
    if (inputs["input_ids"] == IMAGE).any():
        made["input_ids"] = inputs["input_ids"].masked_fill(inputs["input_ids"] == IMAGE, model.config.image_token_id)
    if "labels" in made:
        made["labels"] = made["labels"].masked_fill(made["labels"] == IMAGE, -100)
    pixels = made.get("pixel_values")
    if pixels is not None and model.config.image_size is None:
        made["pixel_values"] = pixels.reshape(len(pixels) * 4 * PATCHES, 12).repeat(1, 2)
        made["image_grid_thw"] = torch.tensor([[1, 8, 8]] * len(pixels))
    return made
