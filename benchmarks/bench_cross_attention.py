"""Cross-attention against insertion in training, and against the text-only LLM in decoding, on SmolLM2-135M's shape.

    python benchmarks/bench_cross_attention.py [--threads 2] [--quick]

Random weights, float32. Training: the same composed model, batch and trainable parts (projector and the whole LLM, or
the projector alone), 64 image and 30 text tokens a sample; the two steps (forward, backward, AdamW) take turns in one
run. CASA trains its own layers besides. Decoding: one token at a time behind 64 image and 30 text tokens, with CASA in
every third block, in turns with the same LLM behind 30 text tokens. A time is the fastest (training) or the median of
ratios of neighbouring turns (decoding). Prints a table, writes build/bench/cross_attention.json and exits with 1 when a
target is missed.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from smollm2 import BLOCKS, VOCABULARY, compose

import crossfuse as xf

OUTPUT = Path("build/bench/cross_attention.json")
IMAGE_SIDE, IMAGE_TOKENS, TEXT_TOKENS, ANSWER = 128, 64, 30, 8


@dataclass
class Row:
    """`ratio` is what the target speaks of: times as fast (training), times as long (decoding)."""

    case: str
    crossfuse: str
    other: str
    ratio: float
    target: str
    met: bool


def batch(model: Any, samples: int) -> dict[str, Any]:
    """Image first, then text, labels on the last tokens."""
    image = torch.full((samples, IMAGE_TOKENS), model.config.image_token_id)
    ids = torch.cat([image, torch.randint(3, VOCABULARY, (samples, TEXT_TOKENS))], 1)
    labels = torch.full_like(ids, -100)
    labels[:, -ANSWER:] = ids[:, -ANSWER:]
    pixels = torch.randn(samples, 3, IMAGE_SIDE, IMAGE_SIDE)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, "pixel_values": pixels}


def training_step(model: Any, inputs: dict[str, Any], trains_llm: bool) -> Callable[[], None]:
    for name, parameter in model.named_parameters():
        if "vision_tower" not in name:
            parameter.requires_grad_(trains_llm or "multi_modal_projector" in name or ".cross." in name)
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=True)

    def step() -> None:
        model(**inputs, use_cache=False, return_logits=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def compare_training(trains_llm: bool, layers: int, samples: int, turns: int) -> Row:
    torch.manual_seed(1)
    base = compose(layers, IMAGE_SIDE)
    models = [xf.fuse(copy.deepcopy(base), xf.CrossAttention(every=3)), xf.fuse(base, xf.Insertion())]
    inputs = batch(base, samples)
    steps = [training_step(model, inputs, trains_llm) for model in models]
    best = [float("inf")] * 2
    for turn in range(turns + 1):  # the first turn warms up
        for i, step in enumerate(steps):
            start = time.perf_counter()
            step()
            if turn:
                best[i] = min(best[i], time.perf_counter() - start)
    speeds = [samples / seconds for seconds in best]
    ratio = speeds[0] / speeds[1]
    part = "projector and LLM trained" if trains_llm else "projector trained, LLM frozen"
    shown = [f"{speed:.2f} samples/s" for speed in speeds]
    return Row(f"training step, {part}", shown[0], f"insertion {shown[1]}", ratio, ">= 1.8", ratio >= 1.8)


class Stream:
    """One greedy stream, a token at a time."""

    def __init__(self, model: Any, inputs: dict[str, Any]) -> None:
        self.model = model
        out = model(**inputs, use_cache=True, logits_to_keep=1)
        self.cache, self.token = out.cache, out.logits[:, -1:].argmax(-1)

    def step(self) -> float:
        start = time.perf_counter()
        out = self.model(input_ids=self.token, cache=self.cache, use_cache=True)
        self.token = out.logits[:, -1:].argmax(-1)
        return time.perf_counter() - start


@torch.inference_mode()
def compare_decoding(layers: int, tokens: int) -> Row:
    plain = compose(layers, IMAGE_SIDE).eval()
    model = xf.fuse(copy.deepcopy(plain), xf.CrossAttention(every=3))
    inputs = batch(plain, 1)
    text = {"input_ids": inputs["input_ids"][:, IMAGE_TOKENS:]}
    image = {name: inputs[name] for name in ("input_ids", "attention_mask", "pixel_values")}
    streams = [Stream(model, image), Stream(plain, text)]
    times = [[stream.step() for stream in streams] for _ in range(tokens)][tokens // 8 :]
    ratio = statistics.median(a / b for a, b in times)
    shown = [f"{1e3 * statistics.median(column):.1f} ms/token" for column in zip(*times, strict=True)]
    return Row("decoding, batch 1", shown[0], f"text-only LLM {shown[1]}", ratio, "<= 1.2", ratio <= 1.2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="6 blocks and few turns: for trying the script only")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    layers, samples, turns, tokens = (6, 4, 1, 24) if options.quick else (BLOCKS, 16, 2, 96)
    rows = [
        compare_decoding(layers, tokens),
        compare_training(False, layers, samples, turns),
        compare_training(True, layers, samples, turns),
    ]
    width = max(len(row.case) for row in rows)
    for row in rows:
        verdict = "met" if row.met else "MISSED"
        print(f"{row.case:<{width}}  {row.crossfuse:>18}  {row.other:<28}  {row.ratio:5.2f}  {row.target}  {verdict}")
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    machine = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": options.threads,
        "cores": os.cpu_count(),
    }
    report = {"machine": machine, "quick": options.quick, "blocks": layers, "rows": [asdict(row) for row in rows]}
    temporary = OUTPUT.with_suffix(".tmp")
    temporary.write_text(json.dumps(report, indent=2) + "\n")
    temporary.replace(OUTPUT)
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
