"""Speed of windowed attention on a CPU, side by side with an ideal batched SDPA and with a dense mask.

    python benchmarks/bench_attention.py [--threads 2] [--quick]

Competitors take turns in one run; a time is the fastest of many turns, because other work on the machine only ever adds
time. Outputs and gradients are compared with the reference first: without equality nothing is reported. Prints a
table, writes build/bench/attention.json, and exits with 1 when a target is missed or a result is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from crossfuse.attention import Windows, windowed_attention
from crossfuse.attention.reference import reference_attention

OUTPUT = Path("build/bench/attention.json")
MICROSECONDS = 1e6


@dataclass
class Row:
    """One comparison. `ratio` is crossfuse / other for "at most" targets, other / crossfuse for "at least" ones."""

    case: str
    measure: str
    other: str
    crossfuse_us: float
    other_us: float
    ratio: float
    target: str
    met: bool


def fastest(functions: Sequence[Callable[[], object]], seconds: float, least: int = 5) -> list[float]:
    """Runs the functions in turns for about `seconds` and returns the fastest time of each, in seconds."""
    for function in functions:
        function()
    best = [float("inf")] * len(functions)
    turns, end = 0, time.perf_counter() + seconds
    while turns < least or time.perf_counter() < end:
        for index, function in enumerate(functions):
            start = time.perf_counter()
            function()
            best[index] = min(best[index], time.perf_counter() - start)
        turns += 1
    return best


def with_backward(function: Callable[..., Tensor], leaves: Sequence[Tensor]) -> Callable[[], object]:
    """One forward and backward; the upstream gradient is made outside the timing."""
    upstream = torch.randn_like(function(*leaves))
    return lambda: torch.autograd.grad(function(*leaves), leaves, upstream)


def without_gradient(function: Callable[..., Tensor], leaves: Sequence[Tensor]) -> Callable[[], object]:
    def run() -> Tensor:
        with torch.no_grad():
            return function(*leaves)

    return run


def window_by_window(windows: Windows) -> Callable[..., Tensor]:
    """The reference on every window apart, which keeps its dense masks small."""

    def run(q: Tensor, k: Tensor, v: Tensor, kt: Tensor | None = None, vt: Tensor | None = None) -> Tensor:
        parts = []
        for w in windows.ranges:
            images = slice(w.image_start, w.image_start + w.image_length)
            texts = slice(w.text_start, w.text_start + w.text_length)
            fields = [w.query_length, 0, w.image_length, *([0, w.text_length] if windows.joint_text else [])]
            alone = Windows(*(torch.tensor([value]) for value in fields))
            joint = (kt[texts], vt[texts]) if kt is not None and vt is not None else ()
            query = q[w.query_start : w.query_start + w.query_length]
            parts.append(reference_attention(query, k[images], v[images], alone, *joint))
        return torch.cat(parts)

    return run


def check(function: Callable[..., Tensor], windows: Windows, leaves: Sequence[Tensor], case: str) -> None:
    """Ends the run unless outputs and gradients equal the reference."""
    upstream = torch.randn(leaves[0].shape, generator=torch.Generator().manual_seed(1))
    results = []
    for candidate in (function, window_by_window(windows)):
        output = candidate(*leaves)
        results.append((output, *torch.autograd.grad(output, leaves, upstream)))
    for name, actual, expected in zip(
        ("output", "q", "k_image", "v_image", "k_text", "v_text"), *results, strict=False
    ):
        if not torch.allclose(actual, expected, atol=1e-4, rtol=1e-4):
            error = (actual - expected).abs().max().item()
            sys.exit(f"{case}: {name} differs from the reference by {error:.2e}; no speed is reported")


def make_leaves(windows: Windows, heads: int, key_heads: int, width: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(windows.query_count, heads)] + [(windows.image_count, key_heads)] * 2
    shapes += [(windows.text_count, key_heads)] * (2 if windows.joint_text else 0)
    return [torch.randn(*shape, width, generator=generator).requires_grad_() for shape in shapes]


def at_most(case: str, measure: str, other: str, times: Sequence[float], limit: float | None) -> Row:
    ours, theirs = times
    target = "" if limit is None else f"<= {limit:g} x"
    met = limit is None or ours <= limit * theirs
    return Row(case, measure, other, ours * MICROSECONDS, theirs * MICROSECONDS, ours / theirs, target, met)


def at_least(case: str, measure: str, other: str, times: Sequence[float], limit: float | None) -> Row:
    ours, theirs = times
    target = "" if limit is None else f">= {limit:g} x faster"
    met = limit is None or theirs >= limit * ours
    return Row(case, measure, other, ours * MICROSECONDS, theirs * MICROSECONDS, theirs / ours, target, met)


def equal_windows(seconds: float, heads: int, key_heads: int) -> list[Row]:
    """16 windows of 32 x 256, heads of 32: against one SDPA call on ready-made (B, H, L, D) batches."""
    count, queries, images, width = 16, 32, 256, 32
    case = f"16 equal windows 32 x 256, {heads}/{key_heads} heads of {width}"
    windows = Windows.from_lengths([queries] * count, [images] * count)
    leaves = make_leaves(windows, heads, key_heads, width)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return windowed_attention(q, k, v, windows)

    def ideal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, enable_gqa=heads != key_heads)

    check(ours, windows, leaves, case)
    batched = [
        leaf.detach().view(count, -1, leaf.shape[1], width).transpose(1, 2).contiguous().requires_grad_()
        for leaf in leaves
    ]
    rows = []
    for measure, timed in (("forward", without_gradient), ("forward + backward", with_backward)):
        times = fastest((timed(ours, leaves), timed(ideal, batched)), seconds)
        rows.append(at_most(case, measure, "ideal batched SDPA", times, 1.3))
    return rows


def uneven_windows(seconds: float, joint_text: bool) -> list[Row]:
    """64 windows, text 1-64 and image 64-1156 uniform, 4 heads of 32: against SDPA with a dense mask."""
    count, heads, width = 64, 4, 32
    draw = torch.Generator().manual_seed(0)
    texts = torch.randint(1, 65, (count,), generator=draw)
    images = torch.randint(64, 1157, (count,), generator=draw)
    windows = Windows.from_lengths(texts, images, joint_text)
    case = f"64 uneven windows{', joint text' if joint_text else ''}, {heads} heads of {width}"
    leaves = make_leaves(windows, heads, heads, width)

    def ours(q: Tensor, k: Tensor, v: Tensor, kt: Tensor | None = None, vt: Tensor | None = None) -> Tensor:
        return windowed_attention(q, k, v, windows, kt, vt)

    masks = windows.dense_mask(windows.query_count, windows.image_count, windows.text_count)
    visible = torch.cat([mask for mask in masks if mask is not None], dim=1)
    mask = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))

    def dense(q: Tensor, k: Tensor, v: Tensor, kt: Tensor | None = None, vt: Tensor | None = None) -> Tensor:
        if kt is not None and vt is not None:
            k, v = torch.cat((k, kt)), torch.cat((v, vt))
        return scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), attn_mask=mask)

    check(ours, windows, leaves, case)
    rows = []
    for measure, timed in (("forward", without_gradient), ("forward + backward", with_backward)):
        times = fastest((timed(ours, leaves), timed(dense, leaves)), seconds, least=2)
        rows.append(at_least(case, measure, "dense-mask SDPA", times, 3.0))
    return rows


def decoding(seconds: float, images: int, texts: int = 0) -> list[Row]:
    """One token against one cached image with SmolLM2's heads (9 / 3 of 64): against plain SDPA on the same tensors.

    With text keys the other side gets image and text keys that were joined before the timing; a cache that keeps them
    apart has to join them, so that row is shown without a target.
    """
    heads, key_heads, width = 9, 3, 64
    case = f"decode 1 x {images}{f' + {texts} text' if texts else ''}, {heads}/{key_heads} heads of {width}"
    starts = [torch.tensor([value]) for value in ((1, 0, images, 0, texts) if texts else (1, 0, images))]
    windows = Windows(*starts)
    leaves = make_leaves(windows, heads, key_heads, width)
    check(lambda *x: windowed_attention(*x[:3], windows, *x[3:]), windows, leaves, case)

    def ours(q: Tensor, k: Tensor, v: Tensor, kt: Tensor | None = None, vt: Tensor | None = None) -> Tensor:
        return windowed_attention(q, k, v, windows, kt, vt)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), enable_gqa=True)

    together = [leaves[0], *(torch.cat((leaves[i], leaves[i + 2])) for i in (1, 2))] if texts else leaves
    times = fastest((without_gradient(ours, leaves), without_gradient(plain, together)), seconds, least=200)
    other = "SDPA enable_gqa, keys joined before" if texts else "SDPA enable_gqa"
    return [at_most(case, "forward", other, times, None if texts else 1.3)]


def call_overhead(seconds: float, limit_us: float = 30.0) -> Row:
    """What one call costs beyond its SDPA kernel: one query, one image token."""
    windows = Windows.from_lengths([1], [1])
    q, k, v = (leaf.detach() for leaf in make_leaves(windows, 9, 3, 64))
    kernel = [q.view(1, 3, 3, 64), k.transpose(0, 1)[None], v.transpose(0, 1)[None]]
    with torch.no_grad():
        ours, bare = fastest(
            (lambda: windowed_attention(q, k, v, windows), lambda: scaled_dot_product_attention(*kernel)), seconds, 500
        )
    spent = (ours - bare) * MICROSECONDS
    return Row(
        "decode 1 x 1", "overhead of a call", "bare kernel", ours * MICROSECONDS, bare * MICROSECONDS,
        ours / bare, f"+ <= {limit_us:g} us (is {spent:.1f})", spent <= limit_us,
    )  # fmt: skip


def show(rows: Sequence[Row]) -> None:
    head = ("case", "measure", "compared with", "crossfuse us", "other us", "ratio", "target", "")
    table = [head]
    for row in rows:
        verdict = "" if not row.target else "ok" if row.met else "MISSED"
        numbers = (f"{row.crossfuse_us:.1f}", f"{row.other_us:.1f}", f"{row.ratio:.2f}")
        table.append((row.case, row.measure, row.other, *numbers, row.target, verdict))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def save(rows: Sequence[Row], threads: int) -> None:
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "torch": torch.__version__,
        "processor": platform.processor() or platform.machine(),
        "threads": threads,
        "dtype": "float32",
        "time": "fastest of interleaved turns",
        "rows": [asdict(row) for row in rows],
    }
    temporary = OUTPUT.with_suffix(".json.tmp")
    temporary.write_text(json.dumps(report, indent=2) + "\n")
    temporary.replace(OUTPUT)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="CPU threads of torch")
    parser.add_argument("--quick", action="store_true", help="a tenth of the turns")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    seconds = 0.3 if arguments.quick else 3.0
    rows = [*equal_windows(seconds, 4, 4), *equal_windows(seconds, 4, 2)]
    rows += [*uneven_windows(3 * seconds, joint_text=False), *uneven_windows(3 * seconds, joint_text=True)]
    rows += [row for images in (256, 1156) for row in decoding(seconds, images)]
    rows += [*decoding(seconds, 256, texts=30), *decoding(seconds, 1156, texts=30), call_overhead(seconds)]
    show(rows)
    save(rows, arguments.threads)
    print(f"written to {OUTPUT}")
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
