"""The oracle: windowed attention from the dense mask, written as plainly as possible. Only tests import it.

Shape legend: T queries, N image tokens, K text keys, Hq and Hkv heads, D head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .windows import Windows


def reference_attention(
    q: Tensor,
    k_image: Tensor,
    v_image: Tensor,
    windows: Windows,
    k_text: Tensor | None = None,
    v_text: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Same arguments and result as `windowed_attention`; memory and time grow with T x (N + K)."""
    queries, heads, width = q.shape
    texts = 0 if k_text is None else k_text.shape[0]
    mask, text_mask = windows.dense_mask(queries, k_image.shape[0], texts)
    keys, values = k_image, v_image
    if k_text is not None and v_text is not None and text_mask is not None:
        keys, values = torch.cat((k_image, k_text)), torch.cat((v_image, v_text))
        mask = torch.cat((mask, text_mask), dim=1)
    mask = mask.to(q.device)
    group = heads // keys.shape[1]
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, keys) * (1 / math.sqrt(width) if scale is None else scale)
    # Rows without a key are opened, so that their softmax is finite, and closed again after it.
    keyless = ~mask.any(dim=1, keepdim=True)
    weights = scores.masked_fill(~(mask | keyless), float("-inf")).softmax(dim=-1) if mask.shape[1] else scores
    weights = weights.masked_fill(~mask, 0.0)
    return torch.einsum("hqk,khd->qhd", weights, values)
