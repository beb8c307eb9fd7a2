"""`windowed_attention`: the one entry to every backend."""

from __future__ import annotations

import difflib

import torch
from torch import Tensor

from .windows import Windows

BACKENDS = ("auto", "bucketed", "varlen", "flex")


@torch.compiler.disable
def windowed_attention(
    q: Tensor,
    k_image: Tensor,
    v_image: Tensor,
    windows: Windows,
    k_text: Tensor | None = None,
    v_text: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention of flat text queries over the image tokens, and text keys, of their own window (CASA, eqs. 2 and 4).

    Tokens are flattened and unpadded over the batch. One softmax covers image and text keys. A query without any key
    gives exactly 0, with zero gradients. Query heads h and key heads h // (Hq / Hkv) belong together.

    Args:
        q: (T, Hq, D) queries, window after window.
        k_image, v_image: (N, Hkv, D) image keys and values; Hq is a multiple of Hkv.
        windows: which keys each query sees; pass the same object to all layers of a forward, plans are kept in it.
        k_text, v_text: (K, Hkv, D) text keys and values, exactly where `windows` has text ranges.
        scale: factor of the scores; None is 1 / sqrt(D).
        backend: "bucketed" (batched SDPA, any device), "varlen" (flash attention on CUDA, half precision), "flex"
            (FlexAttention), or "auto": varlen where it runs, else bucketed.

    Returns:
        (T, Hq, D), dtype and device of `q`.

    Raises:
        ValueError: where shapes do not fit each other or the windows, or for an unknown backend.
        RuntimeError: where the named backend cannot run on these tensors.
    """
    _check(q, k_image, v_image, windows, k_text, v_text)
    if backend == "bucketed" or (backend == "auto" and not q.is_cuda):
        from .bucketed import bucketed_attention

        return bucketed_attention(q, k_image, v_image, windows, k_text, v_text, scale)
    if backend == "auto":
        from . import varlen

        if varlen.unavailable(q) is None:
            return varlen.varlen_attention(q, k_image, v_image, windows, k_text, v_text, scale)
        from .bucketed import bucketed_attention

        return bucketed_attention(q, k_image, v_image, windows, k_text, v_text, scale)
    if backend == "varlen":
        from .varlen import varlen_attention

        return varlen_attention(q, k_image, v_image, windows, k_text, v_text, scale)
    if backend == "flex":
        from .flex import flex_windowed_attention

        return flex_windowed_attention(q, k_image, v_image, windows, k_text, v_text, scale)
    near = difflib.get_close_matches(backend, BACKENDS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}{hint}")


def _check(
    q: Tensor, k_image: Tensor, v_image: Tensor, windows: Windows, k_text: Tensor | None, v_text: Tensor | None
) -> None:
    if q.ndim != 3 or k_image.ndim != 3:
        raise ValueError(
            f"q and k_image are flat (tokens, heads, width) tensors; got {tuple(q.shape)} and {tuple(k_image.shape)}"
        )
    if k_image.shape != v_image.shape:
        raise ValueError(f"v_image must have the shape of k_image {tuple(k_image.shape)}; got {tuple(v_image.shape)}")
    if q.shape[2] != k_image.shape[2]:
        raise ValueError(f"q and k_image must have one head width; got {q.shape[2]} and {k_image.shape[2]}")
    if q.shape[1] % k_image.shape[1]:
        raise ValueError(
            f"query heads must be a multiple of the key heads ({k_image.shape[1]}); got {q.shape[1]} query heads"
        )
    if windows.query_count != q.shape[0]:
        raise ValueError(f"windows partition {windows.query_count} queries; got q with {q.shape[0]} rows")
    if windows.image_count > k_image.shape[0]:
        raise ValueError(f"windows reach image token {windows.image_count - 1}; k_image has {k_image.shape[0]} rows")
    if windows.joint_text:
        if k_text is None or v_text is None:
            raise ValueError("windows have text ranges: pass k_text and v_text, or build windows without joint text")
        if k_text.shape != v_text.shape or k_text.shape[1:] != k_image.shape[1:]:
            raise ValueError(
                f"k_text and v_text must be (K, {k_image.shape[1]}, {k_image.shape[2]}) like k_image; "
                f"got {tuple(k_text.shape)} and {tuple(v_text.shape)}"
            )
        if windows.text_count > k_text.shape[0]:
            raise ValueError(f"windows reach text key {windows.text_count - 1}; k_text has {k_text.shape[0]} rows")
    elif k_text is not None or v_text is not None:
        raise ValueError("text keys were given but windows have no text ranges: build them with joint text")
