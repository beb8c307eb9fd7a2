"""Speed of evaluation: batches against one by one, and scoring: ``python benchmarks/bench_evaluation.py [--quick]``.

The answers of both ways are compared first; a speed-up over different answers is not reported. Exit code 1 where the
answers differ or a limit is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

import crossfuse as xf
from crossfuse.evaluation.generation import answer, run_settings
from crossfuse.evaluation.predictions import PredictionFile
from crossfuse.evaluation.runs import load_samples, score_task
from crossfuse.evaluation.samples import write_samples
from crossfuse.evaluation.tasks import task

SPEED_UP, SCORE_SECONDS = 3.0, 10.0


def batching(count: int, batch_size: int, threads: int) -> dict[str, Any]:
    """Seconds (wall and processor) of the same questions in batches and one by one, and whether the answers agree.

    One by one is also measured with a single thread, which suits single samples better; the faster one counts.
    """
    model, processor = xf.load_embedded()
    chosen = task("scenes")
    records = [sample.record for sample in load_samples(chosen, None, None, count)]
    answer(model, processor, records[:batch_size], max_new_tokens=chosen.max_new_tokens, batch_size=batch_size)
    found: dict[str, Any] = {"questions": count, "batch_size": batch_size, "threads": threads}
    answers = {}
    for name, size, used in (
        ("batched", batch_size, threads),
        ("one_by_one", 1, threads),
        ("one_by_one_single_thread", 1, 1),
    ):
        torch.set_num_threads(used)
        wall, cpu = time.perf_counter(), time.process_time()
        answers[name] = answer(model, processor, records, max_new_tokens=chosen.max_new_tokens, batch_size=size)
        found[name] = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
    torch.set_num_threads(threads)
    found["same_answers"] = all(each == answers["batched"] for each in answers.values())
    single = min(found["one_by_one"]["seconds"], found["one_by_one_single_thread"]["seconds"])
    found["speed_up"] = single / found["batched"]["seconds"]
    return found


def scoring(count: int) -> dict[str, Any]:
    """Seconds to read and score `count` predictions that lie on disk."""
    chosen = task("scenes")
    model, _ = xf.load_embedded()
    settings = run_settings(model, "embedded", batch_size=32, max_new_tokens=4)
    base = load_samples(chosen, None, None, 500)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        # The same 500 questions under new ids: drawing 100,000 scenes is not what is measured.
        samples = [
            type(s)(s.record.model_copy(update={"id": f"{s.record.id}-{turn}", "images": ()}), s.reference)
            for turn in range(-(-count // len(base)))
            for s in base
        ][:count]
        write_samples(folder / "scenes.samples.jsonl", samples)
        with PredictionFile(folder / "scenes.predictions.jsonl", settings) as file:
            file.append((s.record.id, s.record.messages[0].text, s.reference["answer"]) for s in samples)
        started = time.perf_counter()
        scores = score_task(folder, "scenes")
        seconds = time.perf_counter() - started
    return {"predictions": count, "seconds": seconds, "accuracy": scores.metrics["accuracy"].value}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="100 questions and 10,000 predictions")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    count, predictions = (100, 10_000) if options.quick else (1000, 100_000)
    found = {
        "machine": {"cpus": os.cpu_count(), "threads": options.threads, "platform": platform.platform()},
        "batching": batching(count, options.batch_size, options.threads),
        "scoring": scoring(predictions),
    }
    print(json.dumps(found, indent=2))
    missed = []
    if not found["batching"]["same_answers"]:
        missed.append("batched answers differ from answers one by one")
    if found["batching"]["speed_up"] < SPEED_UP:
        missed.append(f"batches are {found['batching']['speed_up']:.2f} x as fast; the limit is {SPEED_UP:g} x")
    if found["scoring"]["seconds"] > SCORE_SECONDS * predictions / 100_000:
        missed.append(f"scoring took {found['scoring']['seconds']:.1f} s")
    if found["scoring"]["accuracy"] != 1.0:
        missed.append("right answers were not scored as right")
    if missed:
        sys.exit("; ".join(missed))


if __name__ == "__main__":
    main()
