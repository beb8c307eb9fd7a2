"""Small data sets and recipes for tests of the trainer: rows of `tiny`, mixed with and without images."""

from __future__ import annotations

from typing import Any

import torch

import crossfuse as xf
from crossfuse.training.recipe import Recipe
from crossfuse.training.trainable import prepare_trainable
from tiny import I, batch, images_in, labelled, llava


class Rows(torch.utils.data.Dataset):
    """`count` samples of different length; every `text_only`-th has no image. Answers take 1 to 5 tokens."""

    def __init__(self, count: int = 12, text_only: int = 0, seed: int = 0, name: str = "row") -> None:
        self.rows = []
        for i in range(count):
            layout = [6 + i % 3] if text_only and i % text_only == text_only - 1 else [1 + i % 2, I, 7 + i % 4]
            row = labelled(batch(layout, seed=1000 * seed + i), answer=1 + i % 5)
            self.rows.append({n: v[0] if n != "pixel_values" else v for n, v in row.items()} | {"id": f"{name}-{i}"})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Right-padded rows (B, L), and the images of those that have one."""
    fills = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    made: dict[str, Any] = {
        name: torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], True, fill) for name, fill in fills.items()
    }
    pixels = [row["pixel_values"] for row in rows if "pixel_values" in row]
    if pixels:
        made["pixel_values"] = torch.cat(pixels)
    made["id"] = [row["id"] for row in rows]
    return made


def lengths(rows: Rows) -> tuple[list[int], list[int]]:
    images = [16 * images_in(row["input_ids"]) for row in rows.rows]
    return [len(row["input_ids"]) - image for row, image in zip(rows.rows, images, strict=True)], images


def recipe(**fields: Any) -> Recipe:
    """A recipe for a tiny model: 4 steps of 2 samples, a rate at which something moves."""
    return Recipe(**{"steps": 4, "batch_size": 2, "learning_rate": 1e-2, "warmup_steps": 0, **fields})


def model_for(fusion: xf.Fusion, chosen: Recipe, seed: int = 0, **options: Any) -> Any:
    """A fused tiny LLaVA, prepared for the recipe; its LoRA matrices depend on nothing but the seed."""
    model = xf.fuse(llava(seed=seed, **options), fusion)
    torch.manual_seed(seed)
    return prepare_trainable(model, chosen)


FULL = {"llm": "full", "projector": "full", "fusion": True}
EVERYTHING = {"llm": "lora", "projector": "full", "fusion": True, "vision_blocks": 1}
