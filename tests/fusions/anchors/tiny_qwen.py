"""Tiny random Qwen2.5-VL models and batches for them: images of any grid, videos, m-RoPE.

A row is a list: a number is that many random text tokens, ``(h, w)`` an image of h × w patches (before merging 2 × 2),
``(t, h, w)`` a video of t frame pairs. Vision items stand between their start and end tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

PAD, BOS, EOS = 0, 2, 3
IMAGE, VIDEO, START, END = 150, 151, 152, 153
VOCABULARY, WIDTH, MERGE = 200, 32, 4
PATCH_WIDTH = 3 * 2 * 14 * 14
Part = int | tuple[int, int] | tuple[int, int, int]


def qwen(seed: int = 0, **changes: Any) -> Qwen2_5_VLForConditionalGeneration:
    """A random model in eval mode whose logits react to every token."""
    torch.manual_seed(seed)
    text = {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": PAD,
        "bos_token_id": BOS, "eos_token_id": EOS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config={**text, **changes},
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": WIDTH,
            "patch_size": 14, "fullatt_block_indexes": [1], "window_size": 56, "tokens_per_second": 2,
        },
        image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END,
    )  # fmt: skip
    model = Qwen2_5_VLForConditionalGeneration(config).eval()
    for parameter in model.model.language_model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(6)
    generation = model.generation_config
    generation.eos_token_id, generation.pad_token_id = None, PAD
    generation.suppress_tokens = [PAD, IMAGE, VIDEO, START, END]
    return model


def batch(*rows: list[Part], padding: str = "left", seconds: float = 1.0, seed: int = 1) -> dict[str, Tensor]:
    """A processor's output: ids, mask, types, and pixels and grids of images and of videos in reading order."""
    draw = torch.Generator().manual_seed(seed)
    written, grids = [], {IMAGE: [], VIDEO: []}
    for row in rows:
        tokens: list[int] = []
        for part in row:
            if isinstance(part, tuple):
                kind, grid = (IMAGE, (1, *part)) if len(part) == 2 else (VIDEO, part)
                tokens += [START] + [kind] * (grid[0] * grid[1] * grid[2] // MERGE) + [END]
                grids[kind].append(list(grid))
            else:
                tokens += torch.randint(4, 140, (part,), generator=draw).tolist()
        written.append(torch.tensor(tokens))
    ids = torch.nn.utils.rnn.pad_sequence(written, True, PAD, padding)
    made = {
        "input_ids": ids,
        "attention_mask": torch.nn.utils.rnn.pad_sequence([torch.ones_like(r) for r in written], True, 0, padding),
        "mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == VIDEO).int(),
    }
    for kind, pixels, name in ((IMAGE, "pixel_values", "image"), (VIDEO, "pixel_values_videos", "video")):
        if grids[kind]:
            grid = torch.tensor(grids[kind])
            made[pixels] = torch.randn(int(grid.prod(-1).sum()), PATCH_WIDTH, generator=draw)
            made[f"{name}_grid_thw"] = grid
    if grids[VIDEO]:
        made["second_per_grid_ts"] = torch.full((len(grids[VIDEO]),), seconds)
    return made


def rows_of(inputs: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Every row of a batch as a batch of its own, without padding."""
    singles, taken = [], {"image": 0, "video": 0}
    for row in range(len(inputs["input_ids"])):
        real = inputs["attention_mask"][row].bool()
        single = {
            n: v[row : row + 1, real] for n, v in inputs.items() if v.ndim == 2 and v.shape == inputs["input_ids"].shape
        }
        for kind, pixels, name in ((IMAGE, "pixel_values", "image"), (VIDEO, "pixel_values_videos", "video")):
            left = int((inputs["input_ids"][row] == kind).sum())
            if not left:
                continue
            grid = inputs[f"{name}_grid_thw"]
            first = last = taken[name]
            while left:
                left -= int(grid[last].prod()) // MERGE
                last += 1
            sizes = grid.prod(-1).tolist()
            single[pixels] = inputs[pixels][sum(sizes[:first]) : sum(sizes[:last])]
            single[f"{name}_grid_thw"] = grid[first:last]
            if name == "video":
                single["second_per_grid_ts"] = inputs["second_per_grid_ts"][first:last]
            taken[name] = last
        singles.append(single)
    return singles


class Seen:
    """Keyword arguments of every call of the decoder while the ``with`` block runs."""

    def __init__(self, model: Any) -> None:
        self.calls: list[dict[str, Any]] = []
        self._decoder = model.model.language_model

    def __enter__(self) -> Seen:
        self._hook = self._decoder.register_forward_pre_hook(self._note, with_kwargs=True)
        return self

    def _note(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.calls.append(kwargs)

    def __exit__(self, *error: object) -> None:
        self._hook.remove()
