"""What text anchors cost: prefill with and without them, side by side, and the matching and insertion alone.

Random weights at SmolLM2-135M's size behind a small vision tower (so that nearly all the time is the language model's),
576 image tokens and 50 text tokens, a tenth of the text copied. The fused and the unfused prefill take turns, and their
ratio is that of each pair; its interval is a bootstrap over the pairs. Exit status 1 where a limit is missed.

    python benchmarks/bench_anchors.py [--pairs 30] [--threads 1] [--out build/bench/anchors.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import crossfuse as xf
from crossfuse.fusions.anchors.explain import anchor_sequence
from crossfuse.reports.files import write_json
from crossfuse.sequence import fuse_inputs

IMAGE_TOKEN, TEXT_TOKENS, IMAGE_TOKENS = 49_151, 50, 576
MATCHING_LIMIT, PREFILL_LIMIT = 0.002, 1.05
KEPT = 0.5


def build() -> Any:
    """SmolLM2-135M's language model with random weights and a one-layer tower of 24 x 24 patches."""
    torch.manual_seed(0)
    config = LlavaConfig(
        text_config=LlamaConfig(
            vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, max_position_embeddings=8192, rope_theta=100_000.0, tie_word_embeddings=True,
            bos_token_id=1, eos_token_id=2, pad_token_id=2,
        ),
        vision_config=CLIPVisionConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, image_size=336,
            patch_size=14,
        ),
        image_token_index=IMAGE_TOKEN, vision_feature_layer=-1, tie_word_embeddings=True,
    )  # fmt: skip
    return LlavaForConditionalGeneration(config).eval()


def inputs() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    text = torch.randint(3, 49_000, (TEXT_TOKENS,), generator=draw)
    ids = torch.cat([text[:4], torch.full((IMAGE_TOKENS,), IMAGE_TOKEN), text[4:]])[None]
    pixels = torch.randn(1, 3, 336, 336, generator=draw)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


def timed(call: Any) -> tuple[float, Any]:
    started = time.perf_counter()
    result = call()
    return time.perf_counter() - started, result


def prefill(model: Any, batch: dict[str, torch.Tensor]) -> Any:
    """As ``generate`` runs it: the whole prompt into an empty cache, logits of the last position."""
    extra = {"prompt_mask": torch.ones_like(batch["input_ids"]).bool()} if xf.fusion_of(model) is not None else {}
    return model(**batch, **extra, use_cache=True, logits_to_keep=1)


def interval(values: list[float], draws: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def cache_bytes(cache: Any) -> int:
    return sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))


@torch.inference_mode()
def measure(pairs: int) -> dict[str, Any]:
    plain, model = build(), build()
    batch = inputs()
    calibration = xf.calibrate_threshold(plain, [batch], share=0.10)
    fusion = calibration.fusion()
    xf.fuse(model, fusion)
    pruned = xf.fuse(build(), calibration.fusion(keep_image_tokens=KEPT))
    runs = {"unfused": plain, "text-anchors": model, f"keep_image_tokens={KEPT}": pruned}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    outputs = {name: prefill(network, batch) for name, network in runs.items()}
    copies = len(xf.explain_anchors(model, batch)[0])
    matching = []
    sequence, _ = anchor_sequence(model, batch)
    sequence.prompt_mask = torch.ones_like(batch["input_ids"]).bool()

    def insertion() -> Any:
        layout = fusion.arrange(sequence, None)
        return fuse_inputs(sequence, layout)

    for _ in range(3):
        insertion()
    for pair in range(pairs):
        # The pruned model is no target; a few runs tell enough.
        turns = [name for name in runs if name in ("unfused", "text-anchors") or pair % 5 == 0]
        for name in turns if pair % 2 == 0 else turns[::-1]:
            seconds[name].append(timed(lambda name=name: prefill(runs[name], batch))[0])
        matching.append(timed(insertion)[0])
    median = {name: statistics.median(values) for name, values in seconds.items()}
    ratio = [a / b for a, b in zip(seconds["text-anchors"], seconds["unfused"], strict=True)]
    shorter = [a / b for a, b in zip(seconds[f"keep_image_tokens={KEPT}"], seconds["unfused"][::5], strict=True)]
    tokens = {name: out.cache.layers[0].keys.shape[2] for name, out in outputs.items()}
    return {
        "model": "random weights at SmolLM2-135M's size, 576 image + 50 text tokens, batch 1, float32",
        "threshold": calibration.threshold,
        "noise_floor": calibration.noise_floor,
        "copies": copies,
        "pairs": pairs,
        "prefill_ms": {name: 1000 * value for name, value in median.items()},
        "tokens": tokens,
        "kv_bytes": {name: cache_bytes(out.cache) for name, out in outputs.items()},
        "prefill_ratio": {"median": statistics.median(ratio), "interval": interval(ratio)},
        "pruned_ratio": {"median": statistics.median(shorter), "interval": interval(shorter)},
        "matching_and_insertion_ms": 1000 * statistics.median(matching),
        "matching_share": statistics.median(matching) / median["unfused"],
        "limits": {"matching_share": MATCHING_LIMIT, "prefill_ratio": PREFILL_LIMIT},
        "seconds": seconds,
        "matching_seconds": matching,
        "machine": {
            "cpus": os.cpu_count(), "threads": torch.get_num_threads(), "processor": platform.processor(),
            "torch": torch.__version__, "load_average": os.getloadavg(),
        },
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("build/bench/anchors.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result = measure(options.pairs)
    write_json(options.out, json.loads(json.dumps(result)))
    print(f"{'prefill':28}{'ms':>10}{'tokens':>9}{'KV bytes':>13}")
    for name, ms in result["prefill_ms"].items():
        print(f"{name:28}{ms:>10.1f}{result['tokens'][name]:>9}{result['kv_bytes'][name]:>13,}")
    low, high = result["prefill_ratio"]["interval"]
    share = result["matching_share"]
    ratio = result["prefill_ratio"]["median"]
    print(f"whole prefill: {ratio:.3f} x unfused [{low:.3f}, {high:.3f}], limit {PREFILL_LIMIT}")
    print(
        f"matching and insertion: {result['matching_and_insertion_ms']:.2f} ms, {share:.3%} of the prefill, limit "
        f"{MATCHING_LIMIT:.1%}"
    )
    low, high = result["pruned_ratio"]["interval"]
    print(f"half of the image tokens: {result['pruned_ratio']['median']:.3f} x unfused [{low:.3f}, {high:.3f}]")
    print(f"written to {options.out}")
    missed = [
        name
        for name, miss in (
            ("matching and insertion", share > MATCHING_LIMIT),
            ("whole prefill", result["prefill_ratio"]["interval"][1] > PREFILL_LIMIT),
        )
        if miss
    ]
    if missed:
        print(f"missed: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
