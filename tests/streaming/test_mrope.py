"""Streams on Qwen2.5-VL, whose positions have three rows: an image of many tokens moves them by its longer side."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

import crossfuse as xf
import tiny
from crossfuse.streaming.sampling import Decoding
from crossfuse.streaming.session import StreamSession
from matrix import name_of

IMAGE, VIDEO, TOKENS, SPAN = 1, 61, 6, 3  # a grid of 2 x 3 merged tokens spans 3 positions
FUSIONS = [
    None,
    xf.Insertion(),
    xf.CrossAttention(),
    xf.CrossAttention(joint_text=True),
    xf.CrossAttention(gist_tokens=1, joint_text=True),
]
names = [name_of(fusion) if fusion else "unfused" for fusion in FUSIONS]
every_fusion = pytest.mark.parametrize("fusion", FUSIONS, ids=names)


def qwen(fusion: xf.Fusion | None, layers: int = 2) -> Any:
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
            "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": None,
        },
        vision_config={
            "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32,
            "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16,
            "fullatt_block_indexes": [0],
        },
        image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=62, vision_end_token_id=63,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(config).eval()
    for name, parameter in model.named_parameters():
        if "visual" not in name and parameter.ndim == 2:
            parameter.data.mul_(6)
    model.generation_config.eos_token_id = None
    if fusion is not None:
        xf.fuse(model, fusion)
    return model


class GridProcessor:
    """4 x 6 patches of 4 x 4 pixels, twice in time."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def image_processor(self, images: list[Any], return_tensors: str) -> dict[str, torch.Tensor]:
        rows = [
            torch.randn(24, 96, generator=torch.Generator().manual_seed(sum(image.resize((1, 1)).getpixel((0, 0)))))
            for image in images
        ]
        return {"pixel_values": torch.cat(rows), "image_grid_thw": torch.tensor([[1, 4, 6]] * len(images))}


@pytest.fixture
def grids(processor):
    return GridProcessor(processor.tokenizer)


def batch_logits(model: Any, ids: list[int], images: list[Any], processor: GridProcessor) -> torch.Tensor:
    inputs: dict[str, Any] = {"input_ids": torch.tensor([ids]), **processor.image_processor(images, "pt")}
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE).int()
    with torch.no_grad():
        return model(**inputs, use_cache=False).logits[0, -1]


@every_fusion
def test_stream_equals_one_forward(fusion, grids, picture):
    model = qwen(fusion)
    session = StreamSession(model, grids, decoding=Decoding(max_new_tokens=3))
    ids, images = [2, 7, 8], []
    session.add_text(ids)
    for number in range(3):
        images.append(picture(number))
        session.add_frame(images[-1])
        session.add_text([9 + number])
        ids = [*ids, *[IMAGE] * TOKENS, *session.delimiter_ids, 9 + number]
        tiny.assert_close(session.forward(), batch_logits(model, ids, images, grids), atol=5e-5)
    if fusion is None or not fusion.drops_images:
        assert session.next_position == 3 + 3 * (SPAN + 2)


@every_fusion
def test_what_is_left_is_seen_as_a_fresh_prefix(fusion, grids, picture):
    model = qwen(fusion, layers=1)
    session = StreamSession(model, grids, max_text_tokens=30, sink_tokens=2, block_tokens=4)
    session.add_text([2, 7, 8])
    written: list[list[int]] = [[2], [7], [8]]
    images = []
    drops = fusion is not None and fusion.drops_images
    for number in range(8):
        images.append(picture(number))
        session.add_frame(images[-1])
        session.add_text([10 + number, 20 + number])
        written += [[IMAGE] * TOKENS, *[[token] for token in (*session.delimiter_ids, 10 + number, 20 + number)]]
        logits = session.forward()
        assert session.stream.cached_tokens == session.stream.cache.fused_length <= 30
    if drops and fusion.gist_tokens:
        return  # gists leave one by one: no fresh sequence has an image without its gist
    runs = session.stream.runs
    kept = sum(1 if run.is_image else run.tokens for run in runs) - 2
    tail = [item for item in written if not (drops and item[0] == IMAGE)]
    left = [*written[:2], *tail[len(tail) - kept :]]
    if drops:  # the one image that is still seen stands before its window's text
        left.insert(len(left) - 3, [IMAGE] * TOKENS)
    ids = [token for item in left for token in item]
    seen = images[-1:] if drops else images[len(images) - sum(item[0] == IMAGE for item in left) :]
    tiny.assert_close(logits, batch_logits(model, ids, seen, grids), atol=5e-5)
