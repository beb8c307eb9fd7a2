"""What the alignment loss does on the embedded model: best cosine, anchor precision, chance, τ* and answer accuracy.

Text anchors are trained from the common start with and without the loss, same budget and seed, and scored on unseen
scenes; "shuffled" gives each question the image of another.

    python benchmarks/measure_alignment.py [--steps 120] [--weight 1.0] [--start start] [--out
    build/bench/alignment.json]
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import torch

import crossfuse as xf
from crossfuse.analysis.anchor_precision import anchor_precision
from crossfuse.analysis.threshold_fit import corollary, fit_threshold
from crossfuse.analysis.word_patches import labelled_cosines, scene_records
from crossfuse.data.collate import Collator
from crossfuse.data.records import Record
from crossfuse.evaluation.generation import answer
from crossfuse.evaluation.scoring import score
from crossfuse.fusions.anchors.alignment import AlignedCollator
from crossfuse.loading import quiet_libraries
from crossfuse.reports.files import write_json
from crossfuse.training.recipe import Recipe, Trainable
from crossfuse.training.trainer import fine_tune, prepare_trainable


def measure(network: Any, processor: Any, records: list[Record], threshold: float) -> tuple[dict[str, Any], Any]:
    network.eval()
    batch = Collator(processor, prompt_only=True)(records)
    found = anchor_precision(network, processor, records, batch, threshold)
    fit = fit_threshold(*labelled_cosines(network, processor, records, batch))
    plain = network.get_base_model() if hasattr(network, "get_base_model") else network
    right = score(answer(plain, processor, records, max_new_tokens=6), [str(r.answer) for r in records])
    low, high = found.interval
    return {
        "words": found.words, "best_cosine": found.mean_best_cosine, "precision": found.precision, "interval": [low,
        high], "shuffled": found.shuffled_hits / found.words, "chance": found.chance,
        "difference": dataclasses.asdict(found.difference), "copied_words": found.copied_words,
        "copied_hits": found.copied_hits, "separation": fit.separation, "tau_by_fit": fit.by_fit.threshold,
        "tau_empirical": fit.empirical.threshold, "accuracy": right.share, "accuracy_interval": list(right.interval),
    }, fit  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--weight", type=float, default=1.0)
    parser.add_argument("--scored", type=int, default=300)
    parser.add_argument("--start", choices=["start", "model"], default="start")
    parser.add_argument("--out", type=Path, default=Path("build/bench/alignment.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    quiet_libraries()
    base, processor = xf.load_embedded(options.start)
    train = list(scene_records("train", options.steps * options.batch_size))
    scored = list(scene_records("test", options.scored))
    calibration = xf.calibrate_threshold(base, [Collator(processor, prompt_only=True)(train[:128])])
    xf.fuse(base, calibration.fusion())
    rows, fits = {}, {}
    rows["before training"], fits["before"] = measure(base, processor, scored, calibration.threshold)
    for name, weight in (
        ("trained without the loss", 0.0),
        (f"trained with weight {options.weight:g}", options.weight),
    ):
        recipe = Recipe(
            steps=options.steps,
            batch_size=options.batch_size,
            alignment_weight=weight,
            trainable=Trainable(projector="full"),
        )
        started = time.perf_counter()
        network = prepare_trainable(copy.deepcopy(base), recipe)
        fine_tune(network, train, AlignedCollator(Collator(processor)), recipe)
        rows[name], fits["with" if weight else "without"] = measure(network, processor, scored, calibration.threshold)
        rows[name]["seconds"] = time.perf_counter() - started
    found = corollary(fits["without"], fits["with"])
    write_json(
        options.out,
        {
            "start": options.start, "steps": options.steps, "batch_size": options.batch_size, "weight": options.weight,
            "calibration": dataclasses.asdict(calibration), "rows": rows,
            "corollary_1": dataclasses.asdict(found) | {"holds": found.holds},
        },
    )  # fmt: skip
    print(
        f"{'':28}{'best cos':>9}{'precision':>22}{'shuffled':>9}{'chance':>8}{'sep. σ':>8}{'τ* fit':>8}{'accuracy':>22}"
    )
    for name, row in rows.items():
        low, high = row["interval"]
        worst, best = row["accuracy_interval"]
        print(
            f"{name:28}{row['best_cosine']:>9.3f}{row['precision']:>8.1%} [{low:.1%}, "
            f"{high:.1%}]{row['shuffled']:>9.1%}"
            f"{row['chance']:>8.1%}{row['separation']:>8.2f}{row['tau_by_fit']:>8.3f}{row['accuracy']:>8.1%} "
            f"[{worst:.1%}, {best:.1%}]"
        )
    print(f"Corollary 1 (better separation, higher τ*): {'holds' if found.holds else 'does not hold'}; {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
