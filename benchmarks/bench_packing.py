"""Packed rows against padded batches: how full the rows are, and samples trained per second.

    python benchmarks/bench_packing.py [--threads 2] [--quick]

The mix is long-tailed: log-normal text lengths (median 120, sigma 1, at most 2,048 tokens) and 0 to 8 images of 64 to
1,156 tokens, uniform. 4,096 samples are packed under 2,048 text and 20,480 image tokens a row. Then a model of
SmolLM2-135M's width (random weights, float32, CASA in every third block, projector and LLM trained) takes forward and
backward over the samples of some rows: packed, and as padded batches of as many samples as a row holds on average, in
the order in which they came (the ordinary data loader) and sorted by length (the best that padding can do; for
comparison, no target). The three take turns in one run. Encoder outputs are given, so no vision tower is timed.
Prints a table, writes build/bench/packing.json and exits with 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from smollm2 import CHANNELS, VOCABULARY, compose

import crossfuse as xf
from crossfuse.backbones.composed_body import EncodedVision
from crossfuse.data.packing import pack_batch, pack_samples
from crossfuse.storage import replace_file

OUTPUT = Path("build/bench/packing.json")
SAMPLES, TEXT_BUDGET, IMAGE_BUDGET = 4096, 2048, 20480
TARGETS = {"full": 0.95, "speed": 1.3}


def draw_mix(count: int, seed: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """(text lengths, the image lengths of each sample), in tokens."""
    draw = np.random.default_rng(seed)
    text = np.clip(draw.lognormal(np.log(120), 1.0, count).astype(int), 4, TEXT_BUDGET)
    images = [draw.integers(64, 1157, draw.integers(0, 9)) for _ in range(count)]
    return text, images


def padded(model: Any, members: list[int], text: np.ndarray, images: list[np.ndarray], seed: int = 0) -> dict[str, Any]:
    """One right-padded batch: the images of a sample, then its text; every text token but the first is a label."""
    draw = torch.Generator().manual_seed(seed)
    lengths = [int(images[i].sum()) + int(text[i]) for i in members]
    ids = torch.full((len(members), max(lengths)), 2)
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, -100)
    for row, index in enumerate(members):
        seen = lengths[row] - int(text[index])
        ids[row, :seen] = model.config.image_token_id
        ids[row, seen : lengths[row]] = torch.randint(3, VOCABULARY, (int(text[index]),), generator=draw)
        mask[row, : lengths[row]] = 1
        labels[row, seen + 1 : lengths[row]] = ids[row, seen + 1 : lengths[row]]
    tokens = [torch.randn(int(n), CHANNELS, generator=draw) for index in members for n in images[index]]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "tokens": tokens}


def step(model: Any, batch: dict[str, Any]) -> float:
    """Seconds of one forward and backward."""
    inputs = dict(batch)
    tokens = inputs.pop("tokens")
    began = time.perf_counter()
    if tokens:
        projected = model.model.project(tokens)
        inputs["mm_encoder_outputs"] = {"image": EncodedVision(pooler_output=projected)}
    model(**inputs, use_cache=False, return_logits=False).loss.backward()
    model.zero_grad(set_to_none=True)
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8, help="packed rows that are trained on")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="2 rows and 3 blocks: for trying the script only")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows, layers = (2, 3) if options.quick else (options.rows, options.layers)
    text, images = draw_mix(SAMPLES, seed=0)
    image = np.array([lengths.sum() for lengths in images])
    began = time.perf_counter()
    bins, report = pack_samples(text, image, TEXT_BUDGET, IMAGE_BUDGET)
    seconds = time.perf_counter() - began
    print(f"{report} (packed in {seconds:.2f} s)")

    model = xf.fuse(compose(layers, image_size=64), xf.CrossAttention(every=3)).train()
    model.model.vision_tower.requires_grad_(False)
    chosen = [bins[i] for i in np.random.default_rng(1).choice(len(bins), rows, replace=False)]
    members = [index for row in chosen for index in row]
    size = max(1, round(len(members) / rows))
    arrival = sorted(members)  # samples are numbered in the order in which they were drawn
    by_length = sorted(members, key=lambda i: text[i] + image[i])
    batches = {
        "packed": [pack_batch(padded(model, row, text, images)) for row in chosen],
        "padded": [padded(model, arrival[i : i + size], text, images) for i in range(0, len(arrival), size)],
        "sorted": [padded(model, by_length[i : i + size], text, images) for i in range(0, len(by_length), size)],
    }
    step(model, batches["packed"][0])  # warms up
    spent = dict.fromkeys(batches, 0.0)
    for turn in range(max(map(len, batches.values()))):
        for name, queue in batches.items():
            if turn < len(queue):
                spent[name] += step(model, queue[turn])
    speed = {name: len(members) / total for name, total in spent.items()}
    ratio = speed["packed"] / speed["padded"]
    checks = [
        ("share of the binding budget", report.binding_share, TARGETS["full"]),
        ("samples per second, packed / padded", ratio, TARGETS["speed"]),
    ]
    for name, value, target in checks:
        print(f"{name:<40} {value:6.3f}  >= {target}  {'met' if value >= target else 'MISSED'}")
    print(f"{'the same, padding sorted by length':<40} {speed['packed'] / speed['sorted']:6.3f}  (no target)")
    for name, value in speed.items():
        print(f"  {name}: {value:.2f} samples/s in {len(batches[name])} steps")
    result = {
        "machine": {"torch": torch.__version__, "python": platform.python_version(), "threads": options.threads}
        | {"cores": os.cpu_count()},
        "quick": options.quick,
        "rows": report.rows,
        "text_share": report.text_share,
        "image_share": report.image_share,
        "packing_seconds": seconds,
        "samples_per_second": speed,
        "ratio": ratio,
    }
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    replace_file(OUTPUT, (json.dumps(result, indent=2) + "\n").encode())
    return 0 if all(value >= target for _, value, target in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
