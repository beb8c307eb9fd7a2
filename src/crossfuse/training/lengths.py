"""Text and image tokens of every sample, for packing: from sizes alone where the samples are records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from crossfuse.data.collate import Collator
from crossfuse.data.lengths import TokenCounter
from crossfuse.data.records import Record


def sample_lengths(
    dataset: Any, collator: Any, image_token_ids: tuple[int, ...], progress: Callable[[int], None] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(text tokens, image tokens) of every sample: two (N,) int64 arrays.

    Records under a `Collator` are only rendered and tokenised, with the size of each image read from its header; what
    else there is goes through the collator one by one. A record that cannot be opened counts as one token: the collator
    stops at it or leaves it out.
    """
    plain = collator
    while not isinstance(plain, Collator) and hasattr(plain, "collator"):
        plain = plain.collator
    counter = TokenCounter(plain.processor, plain.video) if isinstance(plain, Collator) else None
    found = np.zeros((2, len(dataset)), dtype=np.int64)
    for i in range(len(dataset)):
        item = dataset[i]
        if counter is not None and isinstance(item, Record):
            try:
                found[:, i] = counter(item)
            except (OSError, ValueError):
                found[:, i] = 1, 0
        else:
            found[:, i] = _from_batch(collator([item]), image_token_ids)
        if progress is not None:
            progress(1)
    return found[0], found[1]


def _from_batch(batch: dict[str, Any], image_token_ids: tuple[int, ...]) -> tuple[int, int]:
    ids = batch["input_ids"]
    mask = batch.get("attention_mask")
    ids = ids[mask.bool()] if mask is not None else ids.flatten()
    images = sum(int((ids == token).sum()) for token in image_token_ids)
    return ids.numel() - images, images
