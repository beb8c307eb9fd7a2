"""Data path against the embedded model's appetite, and the trainer against a bare PyTorch loop.

    python benchmarks/bench_training.py [--threads 2] [--quick]

Data path: rendered scenes on disk (JSON lines and PNG files) through `load_records`, the collator and the data loader,
with as many worker processes as threads; against the samples a second that the embedded model trains on (LoRA, batches
of 32 that are ready in memory, all threads). Both are measured alone. Target: at least 3 times as many.

Trainer: a model of SmolLM2-135M's size (random weights, float32, cross-attention in every third block, everything
trained but the encoder), batches of 4 samples with 128 text and 64 image tokens that are ready in memory. A bare loop
(forward, backward, clipping, AdamW, cosine schedule) and `train` with logs and without checkpoints take turns;
medians of the steps after the first two of every turn. Target: at most 10 % more time a step.

Prints a table, writes build/bench/training.json and exits with 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from smollm2 import VOCABULARY, compose
from transformers import get_scheduler

import crossfuse as xf
from crossfuse.data.collate import Collator
from crossfuse.data.formats import load_records
from crossfuse.data.records import Record, write_records
from crossfuse.storage import replace_file
from crossfuse.training.batches import training_loader
from crossfuse.training.logs import StepReport
from crossfuse.training.recipe import Recipe
from crossfuse.training.trainer import prepare_trainable, train

OUTPUT = Path("build/bench/training.json")
BATCH = 32
TARGETS = {"data": 3.0, "overhead": 0.10}


def scenes_on_disk(folder: Path, count: int) -> Path:
    """A JSON-lines file of scene questions whose pictures are PNG files beside it."""
    records = []
    for i, record in enumerate(load_records("scenes", limit=count)):
        path = folder / f"{i}.png"
        record.images[0].save(path)
        records.append(Record.of_question(record.id, record.messages[0].text, record.answer, [str(path)]))
    write_records(folder / "scenes.jsonl", records)
    return folder / "scenes.jsonl"


def data_rate(path: Path, processor: Any, workers: int, rounds: int) -> float:
    """Samples a second out of the loader; the first batches, while the workers start, do not count."""
    recipe = Recipe(batch_size=BATCH, workers=workers)
    records = load_records(path)
    loader = training_loader(records, Collator(processor, keep=("id",)), recipe)
    best = 0.0
    for epoch in range(rounds):
        loader.set_epoch(epoch)
        batches = iter(loader)
        for _ in range(max(1, 2 * workers)):
            next(batches)
        started, samples = time.perf_counter(), 0
        for batch in batches:
            samples += len(batch["input_ids"])
        best = max(best, samples / (time.perf_counter() - started))
    return best


def appetite(path: Path, steps: int) -> float:
    """Samples a second that the embedded model trains on when it never waits."""
    model, processor = xf.load_embedded()
    recipe = Recipe(batch_size=BATCH, steps=steps)
    model = prepare_trainable(xf.fuse(model, xf.Insertion()), recipe)
    records = load_records(path)
    collator = Collator(processor)
    ready = [collator([records[(i * BATCH + j) % len(records)] for j in range(BATCH)]) for i in range(4)]
    times: list[float] = []
    train(
        model,
        list(range(BATCH * steps)),
        lambda rows: ready[rows[0] % len(ready)],
        recipe,
        progress=lambda info: times.append(time.perf_counter()),
    )
    spans = [b - a for a, b in itertools.pairwise(times[1:])]
    return BATCH / statistics.median(spans)


def smol_batches(model: Any, count: int) -> list[dict[str, torch.Tensor]]:
    """Batches of 4: a delimiter, 64 image tokens, 127 text tokens, the last 16 of them supervised."""
    draw = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(count):
        text = torch.randint(10, VOCABULARY, (4, 128), generator=draw)
        image = torch.full((4, 64), model.config.image_token_id)
        ids = torch.cat([text[:, :1], image, text[:, 1:]], 1)
        labels = ids.clone()
        labels[:, :-16] = -100
        pixels = torch.randn(4, 3, 128, 128, generator=draw)
        batches.append(
            {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, "pixel_values": pixels}
        )
    return batches


def bare_steps(model: Any, batches: list[dict[str, torch.Tensor]], steps: int, recipe: Recipe) -> list[float]:
    """Seconds of each step of the shortest loop that trains the same."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=0, num_training_steps=steps)
    model.train()
    times = []
    for step in range(steps):
        started = time.perf_counter()
        loss = model(**batches[step % len(batches)], use_cache=False, return_logits=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, recipe.max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        loss.item()
        times.append(time.perf_counter() - started)
    return times


class _Log(StepReport):
    """A second report, which writes JSON lines and events to a folder as a run with `out` does."""


def trainer_steps(model: Any, batches: list[dict[str, torch.Tensor]], steps: int, recipe: Recipe) -> list[float]:
    """Seconds from the end of one step to the end of the next, logging included."""
    times = [time.perf_counter()]

    with tempfile.TemporaryDirectory() as folder:
        report = _Log(lambda: (0, 0), folder=Path(folder))
        train(
            model,
            list(range(4 * steps)),
            lambda rows: batches[rows[0] % len(batches)],
            recipe,
            progress=lambda info: times.append(time.perf_counter()),
            callbacks=[report],
        )
        report.close()
    return [b - a for a, b in itertools.pairwise(times)]


def overhead(layers: int, steps: int, turns: int) -> dict[str, float]:
    recipe = Recipe(
        batch_size=4,
        steps=steps,
        warmup_steps=0,
        learning_rate=1e-5,
        trainable={"llm": "full", "projector": "full", "fusion": True},
    )
    model = prepare_trainable(xf.fuse(compose(layers, image_size=128), xf.CrossAttention(every=3)).train(), recipe)
    batches = smol_batches(model, 4)
    bare: list[float] = []
    ours: list[float] = []
    for _ in range(turns):
        bare += bare_steps(model, batches, steps, recipe)[2:]
        ours += trainer_steps(model, batches, steps, recipe)[2:]
    a, b = statistics.median(bare), statistics.median(ours)
    return {"bare_seconds": a, "trainer_seconds": b, "overhead": b / a - 1}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="fewer samples, blocks and steps; no target counts")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    results: dict[str, Any] = {"threads": options.threads, "quick": options.quick, "machine": platform.processor()}
    with tempfile.TemporaryDirectory() as folder:
        path = scenes_on_disk(Path(folder), 640 if options.quick else 4096)
        _, processor = xf.load_embedded()
        results["samples_per_second"] = {
            "data, 1 process": data_rate(path, processor, 0, 2),
            f"data, {options.threads} workers": data_rate(path, processor, options.threads, 2),
            "embedded model": appetite(path, 6 if options.quick else 20),
        }
    rates = results["samples_per_second"]
    results["data_ratio"] = rates[f"data, {options.threads} workers"] / rates["embedded model"]
    results |= overhead(*(6, 6, 1) if options.quick else (30, 10, 3))
    for name, rate in rates.items():
        print(f"{name:20} {rate:10.1f} samples/s")
    print(f"{'data / model':20} {results['data_ratio']:10.2f}   target >= {TARGETS['data']:.0f}")
    print(f"{'bare loop':20} {results['bare_seconds'] * 1e3:10.1f} ms a step")
    print(f"{'trainer':20} {results['trainer_seconds'] * 1e3:10.1f} ms a step")
    print(f"{'overhead':20} {results['overhead']:10.1%}   target <= {TARGETS['overhead']:.0%}")
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    replace_file(OUTPUT, (json.dumps(results, indent=2) + "\n").encode())
    missed = results["data_ratio"] < TARGETS["data"] or results["overhead"] > TARGETS["overhead"]
    return int(missed and not options.quick)


if __name__ == "__main__":
    sys.exit(main())
