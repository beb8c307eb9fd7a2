"""What anchors cost: operations and bytes of matching, insertion and the longer prefill, without running the model."""

from __future__ import annotations

import dataclasses
from typing import Any

from crossfuse.analysis.flops import count_operations
from crossfuse.backbones import backbone_for

FLOAT32 = 4


@dataclasses.dataclass(frozen=True)
class AnchorCost:
    """One prompt of N text and M image tokens of width d. One multiply-add is two operations."""

    copies: int
    matching_operations: int  # cosines: 2 · N · M · d
    matching_bytes: int  # unit vectors written and read once in float32, and the N × M cosines
    insertion_bytes: int  # the fused row read and written once in the model's dtype
    prefill_operations: int  # decoder without anchors
    added_operations: int  # decoder on the longer row, beyond that
    added_cache_bytes: int  # keys and values of the copies

    @property
    def share(self) -> float:
        """All added operations over those of the prefill without anchors."""
        return (self.matching_operations + self.added_operations) / self.prefill_operations


def anchor_cost(model: Any, *, text_tokens: int, image_tokens: int, copies: int) -> AnchorCost:
    """Count it for one prompt of batch 1. ``copies`` may be negative: pruning shortens the row.

    model: not fused, on the device "meta" (ValueError otherwise); its weights are never needed.
    """
    if next(model.parameters()).device.type != "meta":
        raise ValueError("operations are counted on a model without storage; build it under torch.device('meta')")
    backbone = backbone_for(model)
    decoder = backbone.decoder(backbone.body(model))
    config, length = decoder.config, text_tokens + image_tokens
    width, element = config.hidden_size, next(decoder.parameters()).dtype.itemsize
    plain, longer = (_prefill(decoder, count, width) for count in (length, length + copies))
    heads = decoder.layers[0].self_attn
    cached = 2 * heads.k_proj.out_features * len(decoder.layers) * element
    return AnchorCost(
        copies=copies,
        matching_operations=2 * text_tokens * image_tokens * width,
        matching_bytes=FLOAT32 * (2 * length * width + text_tokens * image_tokens),
        insertion_bytes=2 * (length + copies) * width * element,
        prefill_operations=plain,
        added_operations=longer - plain,
        added_cache_bytes=copies * cached,
    )


def _prefill(decoder: Any, tokens: int, width: int) -> int:
    import torch

    dtype = next(decoder.parameters()).dtype
    embeds = torch.empty(1, tokens, width, dtype=dtype, device="meta")
    # A mask of four dimensions is taken as it is; a smaller one would be looked into, and there is nothing to see.
    mask = torch.empty(1, 1, tokens, tokens, dtype=torch.bool, device="meta")
    positions = torch.empty(1, tokens, dtype=torch.long, device="meta")
    return count_operations(
        lambda: decoder(inputs_embeds=embeds, attention_mask=mask, position_ids=positions, use_cache=False)
    )
