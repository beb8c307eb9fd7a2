"""Tiny random models of the classes and processors that the paper recipes name, as checkpoints, with their data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    HeliumConfig,
    HeliumForCausalLM,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

WORDS = ["what", "is", "this", "here", "a", "red", "green", "blue", "picture", "the", "colour", ".", "?", "\n", "..."]
_LLAVA = (
    "{% for m in messages %}{{ 'USER:' if m.role == 'user' else 'ASSISTANT:' }}{% for c in m.content %}"
    "{{ '<image>' + '\n' if c.type == 'image' else c.text }}{% endfor %}{% if m.role == 'assistant' %}{{ '</s>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
_QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ '\n' }}{% for c in m.content %}"
    "{{ '<|vision_start|><|' ~ c.type ~ '_pad|><|vision_end|>' if c.type != 'text' else c.text }}{% endfor %}<|im_end|>"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
_TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096,
}  # fmt: skip
_VISION = {"depth": 5, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}


def tokenizer(special: list[str], **options: Any) -> PreTrainedTokenizerFast:
    words = ["<pad>", "<unk>", "</s>", *special, "user", "assistant", *WORDS]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n|\.\.\.|[?.:]|[^\s?.:]+"), behavior="removed", invert=True)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", **{"eos_token": "</s>", **options}
    )
    fast.add_special_tokens({"additional_special_tokens": special})
    return fast


def llava(folder: Path) -> Path:
    """`LlavaForConditionalGeneration` with a CLIP tower of 336 pixels and patches of 14: 576 image tokens."""
    tok = tokenizer(["<image>", "USER:", "ASSISTANT:"])
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=336,
            patch_size=14,
        ),
        text_config=LlamaConfig(vocab_size=len(tok), pad_token_id=0, bos_token_id=None, eos_token_id=2, **_TEXT),
        image_token_index=tok.convert_tokens_to_ids("<image>"),
    )  # fmt: skip
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}),
        tok,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_LLAVA,
    ).save_pretrained(folder)
    return folder


def qwen(folder: Path) -> Path:
    """`Qwen2_5_VLForConditionalGeneration` with patches of 14, merged 2 x 2."""
    special = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tok = tokenizer(special, eos_token="<|im_end|>")
    ids = {name: tok.convert_tokens_to_ids(f"<|{name}|>") for name in ("image_pad", "video_pad", "vision_start")}
    config = Qwen2_5_VLConfig(
        text_config={
            **_TEXT, "vocab_size": len(tok), "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        },
        vision_config={**_VISION, "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [4]},
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=tok.convert_tokens_to_ids("<|vision_end|>"),
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    Qwen2_5_VLProcessor(Qwen2VLImageProcessor(), tok, Qwen2VLVideoProcessor(), chat_template=_QWEN).save_pretrained(
        folder
    )
    return folder


def helium(folder: Path) -> Path:
    """`HeliumForCausalLM`, text only, with a tokenizer that has no chat template."""
    tok = tokenizer([])
    torch.manual_seed(0)
    config = HeliumConfig(vocab_size=len(tok), head_dim=8, pad_token_id=0, bos_token_id=None, eos_token_id=2, **_TEXT)
    HeliumForCausalLM(config).save_pretrained(folder)
    tok.save_pretrained(folder)
    return folder


def llava_json(folder: Path, records: int = 8, side: int = 56) -> tuple[Path, Path]:
    """LLaVA-Instruct-150K's layout: (JSON file, folder of pictures). The last record has no picture."""
    pictures = folder / "train2017"
    pictures.mkdir(parents=True)
    rows = []
    for i, colour in zip(range(records), ["red", "green", "blue"] * records, strict=False):
        Image.new("RGB", (side, side), colour).save(pictures / f"{i:012}.png")
        rows.append(
            {
                "id": f"{i:012}",
                "image": f"{i:012}.png",
                "conversations": [
                    {"from": "human", "value": "<image>\nwhat colour is this picture ?"},
                    {"from": "gpt", "value": f"the picture is {colour} ."},
                ],
            }
        )
    del rows[-1]["image"]
    rows[-1]["conversations"][0]["value"] = "what is red ?"
    file = folder / "llava_instruct_150k.json"
    file.write_text(json.dumps(rows))
    return file, pictures
