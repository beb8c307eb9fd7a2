"""Windowed attention as one variable-length flash attention call (CUDA, half precision).

The keys of a window stand side by side: its image tokens, then its text keys. A causal mask aligned at the bottom right
then shows every query all image tokens and the text up to itself: query i of n sees keys 0 to N + K - n + i, and
K >= n. Without joint text every query sees all keys of its window.

Uses `torch.nn.attention.varlen` where torch has it, else the `flash_attn` package.

Shape legend: T queries, N image tokens, K text keys, Hq and Hkv heads, D head width, W windows that have keys.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from .reads import keep_in_graph
from .windows import WindowRange, Windows

# (q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, scale, causal) -> (T, Hq, D)
Flash = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, float | None, bool], Tensor]

MAX_HEAD_WIDTH = 256


@dataclass(frozen=True)
class VarlenPlan:
    """Index tensors of a layout, on the device of the call.

    Attributes:
        query_rows: rows of q in windows with keys; None when these are all rows.
        key_rows: rows of the keys (image keys, then text keys) in window order; None where the keys lie so already.
        key_range: (start, length) of the image keys where `key_rows` is None.
        query_offsets, key_offsets: cumulative lengths, int32, (W + 1,).
        max_queries, max_keys: the longest window's.
    """

    query_rows: Tensor | None
    key_rows: Tensor | None
    key_range: tuple[int, int]
    query_offsets: Tensor
    key_offsets: Tensor
    max_queries: int
    max_keys: int


def unavailable(q: Tensor) -> str | None:
    """Why the backend cannot run on `q`, as one line with the remedy; None where it can."""
    if not q.is_cuda:
        return f"varlen attention needs CUDA tensors; got {q.device.type} (use backend='bucketed')"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"varlen attention needs float16 or bfloat16; got {q.dtype} (use backend='bucketed')"
    if q.shape[-1] % 8 or q.shape[-1] > MAX_HEAD_WIDTH:
        return (
            f"varlen attention needs a head width that is a multiple of 8 and at most {MAX_HEAD_WIDTH}; "
            f"got {q.shape[-1]} (use backend='bucketed')"
        )
    if torch.cuda.get_device_capability(q.device)[0] < 8:
        return "varlen attention needs a GPU of compute capability 8.0 or more (use backend='bucketed')"
    if _flash() is None:
        return "varlen attention needs torch.nn.attention.varlen or the flash_attn package (use backend='bucketed')"
    return None


def varlen_attention(
    q: Tensor,
    k_image: Tensor,
    v_image: Tensor,
    windows: Windows,
    k_text: Tensor | None = None,
    v_text: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Same arguments and result as `windowed_attention`; raises RuntimeError where flash attention cannot run."""
    reason = unavailable(q)
    flash = _flash()
    if reason is not None or flash is None:
        raise RuntimeError(reason or "no flash attention was found")
    return attend(flash, q, k_image, v_image, windows, k_text, v_text, scale)


def attend(
    flash: Flash,
    q: Tensor,
    k_image: Tensor,
    v_image: Tensor,
    windows: Windows,
    k_text: Tensor | None = None,
    v_text: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """`windowed_attention` by one call of `flash`, any function of that signature."""
    key = ("varlen", q.device, k_image.shape[0])
    plan = windows.plans.get(key)
    if plan is None:
        plan = windows.plans[key] = make_plan(windows, k_image.shape[0], q.device)
    inputs = [tensor for tensor in (q, k_image, v_image, k_text, v_text) if tensor is not None]
    if plan.max_queries == 0:
        return keep_in_graph(torch.zeros_like(q), inputs)
    keys, values = _in_window_order(plan, k_image, k_text), _in_window_order(plan, v_image, v_text)
    queries = q if plan.query_rows is None else q.index_select(0, plan.query_rows)
    out = flash(
        queries,
        keys,
        values,
        plan.query_offsets,
        plan.key_offsets,
        plan.max_queries,
        plan.max_keys,
        scale,
        windows.joint_text,
    )
    if plan.query_rows is None:
        return out
    return torch.zeros_like(q).index_copy(0, plan.query_rows, out)


def make_plan(windows: Windows, images: int, device: torch.device) -> VarlenPlan:
    """Works out the index tensors; `images` is N, where text keys begin in the joined key array."""
    live = [w for w in windows.ranges if w.query_length and w.image_length + w.text_length]
    queries = [w.query_length for w in live]
    keys = [w.image_length + w.text_length for w in live]
    query_rows = None
    if sum(queries) != windows.query_count:
        query_rows = _rows([(w.query_start, w.query_length) for w in live]).to(device)
    key_rows = None
    if windows.joint_text or not _consecutive(live):
        spans = [(w.image_start, w.image_length) for w in live], [(images + w.text_start, w.text_length) for w in live]
        key_rows = _rows([span for pair in zip(*spans, strict=True) for span in pair]).to(device)
    return VarlenPlan(
        query_rows,
        key_rows,
        (live[0].image_start if live else 0, sum(keys)),
        torch.tensor([0, *accumulate(queries)], dtype=torch.int32).to(device),
        torch.tensor([0, *accumulate(keys)], dtype=torch.int32).to(device),
        max(queries, default=0),
        max(keys, default=0),
    )


def _consecutive(live: list[WindowRange]) -> bool:
    return all(a.image_start + a.image_length == b.image_start for a, b in pairwise(live))


def _rows(spans: list[tuple[int, int]]) -> Tensor:
    """The rows of (start, length) spans, one after the other."""
    if not spans:
        return torch.zeros(0, dtype=torch.int64)
    starts, lengths = torch.tensor(spans).unbind(1)
    shift = starts - (lengths.cumsum(0) - lengths)
    return torch.arange(int(lengths.sum())) + shift.repeat_interleave(lengths)


def _in_window_order(plan: VarlenPlan, image: Tensor, text: Tensor | None) -> Tensor:
    if plan.key_rows is None:
        return image.narrow(0, *plan.key_range)
    return (image if text is None else torch.cat((image, text))).index_select(0, plan.key_rows)


@cache
def _flash() -> Flash | None:
    return _torch_flash() or _package_flash()


def _torch_flash() -> Flash | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    if not {"scale", "window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys():
        return None  # the first releases had neither grouped heads nor a scale

    def flash(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        scale: float | None,
        causal: bool,
    ) -> Tensor:
        out = varlen_attn(
            q, k, v, cu_q, cu_k, max_q, max_k,
            scale=scale, window_size=(-1, 0) if causal else (-1, -1), enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out

    return flash


def _package_flash() -> Flash | None:
    if importlib.util.find_spec("flash_attn") is None:
        return None
    flash_attn_varlen_func = importlib.import_module("flash_attn").flash_attn_varlen_func

    def flash(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        scale: float | None,
        causal: bool,
    ) -> Tensor:
        out: Tensor = flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale=scale, causal=causal)
        return out

    return flash
