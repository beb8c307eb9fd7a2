"""Bytes of the key-value cache as images are added to a prompt, read off a real prefill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image

from crossfuse.data.collate import Collator
from crossfuse.data.records import Record
from crossfuse.devices import on_device_of


@torch.inference_mode()
def cache_growth(model: Any, processor: Any, prompt: str, counts: Sequence[int]) -> list[tuple[int, dict[str, int]]]:
    """Bytes by part after prefilling `prompt` behind k images, for each k of `counts` (batch 1).

    The pixels do not matter to the size, so blank pictures are used; their token count is the processor's.
    """
    collate = Collator(processor, prompt_only=True)
    measured = []
    for count in counts:
        blank = [Image.new("RGB", (64, 64), "white")] * count
        inputs = collate([Record.of_question("blank", prompt, images=blank)])
        inputs = on_device_of(model, inputs)
        measured.append((count, cache_bytes_by_part(model(**inputs, use_cache=True).cache)))
    return measured


def cache_bytes_by_part(cache: Any) -> dict[str, int]:
    """Bytes that a cache holds: a fused model's by part, any other's as "self_attention"."""
    if hasattr(cache, "memory"):
        parts: dict[str, int] = cache.memory()
        return parts
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values) if t is not None]
    return {"self_attention": sum(t.numel() * t.element_size() for t in tensors)}
