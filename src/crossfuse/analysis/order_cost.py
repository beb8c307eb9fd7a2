"""What other positions and a learned order add to insertion: operations and bytes of one prompt, without running it.

Letters: F tokens of the prompt, K of them that may change places, d model width, D head size, a = query heads x head
size, b = key heads x head size.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from crossfuse.analysis.flops import count_operations
from crossfuse.fusion import Fusion
from crossfuse.fusions.positions import CircleRoPE, ModalityRoPE
from crossfuse.fusions.reorder import GumbelReorder

FLOAT32, INT64 = 4, 8
_NORMALISATION = 5  # of one element: maximum, difference, exponential, sum, difference


@dataclasses.dataclass(frozen=True)
class OrderCost:
    """Added to insertion by one prompt of batch 1, and by the first token after it. All 0 for other fusions."""

    prefill: int = 0
    decode: int = 0
    training: int = 0  # in a training forward, beyond the prefill's
    call_bytes: int = 0  # of the prefill, while it runs: see `rotary_cost` and `reorder_cost`
    saved_bytes: int = 0  # kept for the backward by a training forward, in the order alone
    cache_bytes: int = 0  # a token, over all blocks


def order_cost(decoder: Any, fusion: Fusion, image_tokens: int, text_tokens: int) -> OrderCost:
    """For one image (tokens after compression), then text; ``decoder`` is on the device "meta" and not fused."""
    if isinstance(fusion, GumbelReorder):
        width = decoder.get_input_embeddings().weight.shape[1]
        return reorder_cost(fusion, image_tokens + text_tokens, width)
    if isinstance(fusion, ModalityRoPE | CircleRoPE):
        return rotary_cost(decoder, fusion, image_tokens + text_tokens)
    return OrderCost()


def rotary_cost(decoder: Any, fusion: ModalityRoPE | CircleRoPE, tokens: int) -> OrderCost:
    """Of rotary positions in some blocks.

    CircleRoPE makes one more pair of rotary tables where there is an image, and no further product. ModalityRoPE makes
    two pairs, and in its blocks a query of the prompt is four times as wide (two rotations for each of two modalities
    that ask), of later text twice; of the cached keys it holds a second rotation, and each token's indices. The
    prompt's ``call_bytes`` are the tables, and for ModalityRoPE the wide queries and keys of one block. Tables and
    rotations are made element by element and not counted as operations.
    """
    chosen = fusion.layer_indices(len(decoder.layers))
    if not chosen:
        return OrderCost()
    element = next(decoder.parameters()).dtype.itemsize
    size = decoder.layers[0].self_attn.head_dim
    table = 2 * tokens * size * element  # cosines and sines
    if isinstance(fusion, CircleRoPE):
        return OrderCost(call_bytes=table)
    prefill = decode = wide = cached = 0
    for index in chosen:
        a, b = (getattr(decoder.layers[index].self_attn, f"{kind}_proj").out_features for kind in "qk")
        prefill += (4 - 1) * 2 * a * tokens * tokens
        decode += (2 - 1) * 2 * a * (tokens + 1)
        wide = max(wide, 4 * tokens * (a + b) * element)
        cached += b * element + (_position_rows(decoder) + 2) * INT64
    return OrderCost(prefill, decode, call_bytes=2 * table + wide, cache_bytes=cached)


def reorder_cost(fusion: GumbelReorder, tokens: int, width: int) -> OrderCost:
    """Of a learned order of K ``tokens`` (all of the prompt: special tokens, which stay, are not told apart).

    The prefill adds the scoring transformer with its K × K scores, and the assignment problem, which is no matter of
    floating-point operations (at most in step with K³, on the CPU). A training forward adds the soft order's product
    with the tokens, 2 K² d, and Sinkhorn's iterations, two normalisations of K² elements each. ``saved_bytes`` are
    those of the iterations: two matrices each, as `crossfuse.fusions.reorder.measures.sinkhorn_bytes` counts them.
    """
    scorer = reorder_module(fusion, width)
    if scorer is None:
        return OrderCost()
    embeds = torch.empty(1, tokens, width, device="meta")
    real = torch.ones(1, tokens, dtype=torch.bool, device="meta")
    square, halves = tokens * tokens, 2 * fusion.iterations
    return OrderCost(
        prefill=count_operations(lambda: scorer(embeds, real, real)),
        training=2 * square * width + halves * _NORMALISATION * square,
        call_bytes=FLOAT32 * square,
        saved_bytes=FLOAT32 * ((halves + 1) * square + halves * tokens) + 2 * square,  # and two masks
    )


def reorder_module(fusion: Fusion, width: int) -> torch.nn.Module | None:
    """The scoring transformer without storage; None where the fusion has none."""
    if not isinstance(fusion, GumbelReorder) or fusion.score == "identity":
        return None
    from crossfuse.fusions.reorder.scorer import ReorderScorer

    with torch.device("meta"):
        return ReorderScorer(fusion, width).eval().requires_grad_(False)


def _position_rows(decoder: Any) -> int:
    """3 under m-RoPE, else 1."""
    rope = getattr(decoder.config, "rope_parameters", None) or {}
    return 3 if rope.get("mrope_section") else 1
