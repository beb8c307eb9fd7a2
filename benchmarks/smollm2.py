"""SmolLM2-135M's shape with random weights behind a convolution as encoder: what several benchmarks measure on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import crossfuse as xf

VOCABULARY, CHANNELS, STRIDE, BLOCKS = 49152, 112, 16, 30


def compose(blocks: int, image_size: int) -> Any:
    """The unfused model, float32, its encoder frozen: one image token for each 16 × 16 pixels."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=576, intermediate_size=1536, num_hidden_layers=blocks,
        num_attention_heads=9, num_key_value_heads=3, head_dim=64, max_position_embeddings=8192,
        tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    tower = nn.Conv2d(3, CHANNELS, STRIDE, stride=STRIDE).requires_grad_(False)
    return xf.VisionLanguageModel.compose(LlamaForCausalLM(config), tower, image_size=image_size)
