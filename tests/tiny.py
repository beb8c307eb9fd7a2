"""Tiny random LLaVA models and batches for them, built in-process without network.

A row of a batch is written as a list: a number is that many random text tokens, `I` is an image (16 placeholders).
`batch([2, I, 5], [7])` is a row with one image between 2 and 5 text tokens, and a row of 7 text tokens.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    SiglipVisionConfig,
)

PAD, IMAGE, BOS = 0, 1, 2
VOCABULARY, WIDTH, LAYERS, GRID = 64, 32, 3, 4
PATCHES = GRID * GRID
I = "I"  # noqa: E741 - an image in the layout of a row

TEXT = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "mistral": MistralConfig}
VISION = {"clip": CLIPVisionConfig, "siglip": SiglipVisionConfig}
FAMILIES = [("llama", "clip"), ("llama", "siglip"), ("qwen2", "siglip"), ("qwen3", "clip"), ("mistral", "clip")]


def llava(
    text: str = "llama", vision: str = "clip", seed: int = 0, layers: int = LAYERS, **changes: Any
) -> LlavaForConditionalGeneration:
    """A random model in eval mode whose logits react to every token: weights scaled up, biases and norms drawn."""
    fields = {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": WIDTH // 4, "max_position_embeddings": 512,
        "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": BOS,
    }  # fmt: skip
    if text == "mistral":
        fields["sliding_window"] = None
    if text == "qwen2":
        del fields["head_dim"]
    config = LlavaConfig(
        text_config=TEXT[text](**{**fields, **changes}),
        vision_config=VISION[vision](
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=16,
            patch_size=4,
        ),
        image_token_index=IMAGE,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default" if vision == "clip" else "full",
    )
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(config).eval()
    for name, parameter in model.named_parameters():
        if "vision_tower" in name:
            continue
        if parameter.ndim == 2:
            parameter.data.mul_(6)
        else:
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    generation = model.generation_config
    generation.eos_token_id, generation.pad_token_id, generation.suppress_tokens = None, PAD, [IMAGE, PAD]
    return model


def fused(fusion: Any, **options: Any) -> Any:
    """A fused `llava`, its new weights moved away from the self-attention they were copied from, gates open."""
    import crossfuse as xf

    model = xf.fuse(llava(**options), fusion)
    draw = torch.Generator().manual_seed(7)
    for name, parameter in xf.fusion_parameters(model).items():
        parameter.data.add_(0.5 if name.endswith("gate") else 0.1 * torch.randn(parameter.shape, generator=draw))
    return model


def batch(*rows: list[int | str], padding: str = "left", seed: int = 1) -> dict[str, Tensor]:
    """input_ids, attention_mask (B, L) and, where a row holds an image, pixel_values (images in reading order)."""
    draw = torch.Generator().manual_seed(seed)
    written, images = [], 0
    for row in rows:
        tokens: list[int] = []
        for part in row:
            if part == I:
                tokens += [IMAGE] * PATCHES
                images += 1
            else:
                tokens += torch.randint(3, VOCABULARY, (int(part),), generator=draw).tolist()
        written.append(torch.tensor(tokens))
    pixels = torch.randn(images, 3, 16, 16, generator=draw)
    made = {
        "input_ids": torch.nn.utils.rnn.pad_sequence(written, True, PAD, padding),
        "attention_mask": torch.nn.utils.rnn.pad_sequence([torch.ones_like(r) for r in written], True, 0, padding),
    }
    return {**made, "pixel_values": pixels} if images else made


def rows_of(inputs: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Every row of a batch as a batch of its own, without padding."""
    singles, first = [], 0
    for row in range(len(inputs["input_ids"])):
        real = inputs["attention_mask"][row].bool()
        single = {
            name: value[row : row + 1, real]
            for name, value in inputs.items()
            if value.ndim == 2 and value.shape == inputs["input_ids"].shape
        }
        count = images_in(inputs["input_ids"][row])
        if count:
            single["pixel_values"] = inputs["pixel_values"][first : first + count]
        first += count
        singles.append(single)
    return singles


def images_in(ids: Tensor) -> int:
    return int((ids == IMAGE).sum()) // PATCHES


def labelled(inputs: dict[str, Tensor], answer: int = 2) -> dict[str, Tensor]:
    """The batch with the last ``answer`` real tokens of every row as labels."""
    labels = torch.full_like(inputs["input_ids"], -100)
    for row, mask in enumerate(inputs["attention_mask"].bool()):
        columns = mask.nonzero()[-answer:, 0]
        labels[row, columns] = inputs["input_ids"][row, columns]
    return {**inputs, "labels": labels}


def prompt_mask(inputs: dict[str, Tensor], answer: int) -> Tensor:
    """(B, L) True before the last ``answer`` columns."""
    mask = torch.ones_like(inputs["input_ids"], dtype=torch.bool)
    mask[:, mask.shape[1] - answer :] = False
    return mask


@torch.no_grad()
def logits(model: Any, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    return model(**inputs, **options).logits


@torch.no_grad()
def generate(model: Any, inputs: dict[str, Tensor], tokens: int = 5, **options: Any) -> Tensor:
    """Greedy (or beam) continuation: the new tokens only."""
    return model.generate(**inputs, max_new_tokens=tokens, do_sample=False, **options)[:, -tokens:]


def gradients(model: Any, inputs: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """Gradients of the loss by parameter name (those that got one); the model is left in eval mode."""
    model.train()
    model.zero_grad(set_to_none=True)
    model(**inputs, **options).loss.backward()
    model.eval()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def clone(model: Any) -> Any:
    return copy.deepcopy(model)


def assert_close(actual: Any, expected: Any, **options: Any) -> None:
    torch.testing.assert_close(actual, expected, **{"atol": 1e-5, "rtol": 1e-5, **options})
