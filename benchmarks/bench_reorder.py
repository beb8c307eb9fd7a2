"""What AttAnchor reports of learned reordering (App. J.1), seen on the embedded model.

Three complaints, three measurements: memory with the square of the length, gradients that say more about the Gumbel
noise than about the data, and an order that drifts towards the identity (or never leaves chance) while the plain model
learns. All runs share start, data, order of the batches and optimiser.

    python benchmarks/bench_reorder.py [--steps 150] [--batch 8] [--seeds 1] [--out build/bench/reorder.json]
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import crossfuse as xf
from crossfuse.data.collate import Collator
from crossfuse.data.questions import SceneQuestions
from crossfuse.data.records import Record
from crossfuse.fusions.reorder.measures import distance_from_identity, gradient_noise, learned_orders, sinkhorn_bytes
from crossfuse.reports.files import write_json

LENGTHS = (64, 128, 256, 512, 1024)
KINDS = ("existence", "colour", "shape", "count", "relation")
HELD_OUT = 48


def contenders(steps: int) -> dict[str, xf.Fusion]:
    """The temperature reaches its end after two thirds of the run."""
    annealed = {"anneal_steps": max(1, 2 * steps // 3)}
    return {
        "insertion": xf.Insertion(),
        "gumbel, start anywhere": xf.GumbelReorder(**annealed),
        "gumbel, start at the identity": xf.GumbelReorder(identity_start=5.0, **annealed),
        "gumbel, without noise": xf.GumbelReorder(noise=0.0, **annealed),
    }


def records(split: str, count: int, seed: int) -> list[Record]:
    questions = SceneQuestions(split, count, seed=seed, kinds=KINDS)
    made = []
    for index in range(count):
        image, question, _ = questions[index]
        made.append(Record.of_question(f"{split}-{seed}-{index}", question.text, question.answer, [image]))
    return made


def batches(collate: Collator, data: list[Record], size: int, steps: int) -> Iterator[dict[str, Any]]:
    for step in range(steps):
        first = step * size % (len(data) - size + 1)
        yield collate(data[first : first + size])


@torch.no_grad()
def held_out_loss(model: Any, inputs: dict[str, Any]) -> float:
    """Nats a token, in evaluation mode: the hard order."""
    model.eval()
    loss = float(model(**inputs, use_cache=False, return_logits=False).loss)
    model.train()
    return loss


def distance(model: Any, inputs: dict[str, Any]) -> float:
    return statistics.mean(distance_from_identity(order) for order in learned_orders(model, inputs))


def train(name: str, fusion: xf.Fusion, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model, processor = xf.load_embedded("start")
    xf.fuse(model, fusion)
    learns = bool(xf.fusion_parameters(model))
    for parameter in model.model.vision_tower.parameters():
        parameter.requires_grad_(False)
    collate = Collator(processor)
    scored = collate(records("test", HELD_OUT, seed))
    data = records("train", options.batch * options.steps, seed)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=options.learning_rate, weight_decay=0.0)
    points, noises, losses, seconds = [], [], [], 0.0
    every = max(1, options.steps // 10)
    model.train()
    for step, inputs in enumerate(batches(collate, data, options.batch, options.steps)):
        if step % every == 0:
            points.append(measured(step, model, scored, learns))
        if learns and step % (5 * every) == 0:
            noises.append({"step": step, "ratio": gradient_noise(model, inputs, options.draws).ratio})
        began = time.perf_counter()
        loss = model(**inputs, use_cache=False, return_logits=False).loss
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
        seconds += time.perf_counter() - began
        losses.append(loss.item())
    points.append(measured(options.steps, model, scored, learns))
    return {
        "name": name, "seed": seed, "points": points, "gradient_noise": noises,
        "train_loss_last_tenth": statistics.mean(losses[-every:]), "seconds_a_step": seconds / options.steps,
        "new_parameters": sum(p.numel() for p in xf.fusion_parameters(model).values()),
    }  # fmt: skip


def measured(step: int, model: Any, scored: dict[str, Any], learns: bool) -> dict[str, Any]:
    return {
        "step": step,
        "distance": distance(model, scored) if learns else 0.0,
        "held_out_loss": held_out_loss(model, scored),
    }


def show(results: dict[str, Any]) -> None:
    print("\nMemory that one soft order keeps for the backward pass (float32, 20 iterations)")
    for row in results["memory"]:
        print(f"  {row['tokens']:>6} tokens  {row['bytes'] / 2**20:>8.1f} MiB")
    for run in results["runs"]:
        print(f"\n{run['name']} (seed {run['seed']}), {1000 * run['seconds_a_step']:.0f} ms a step")
        print("  step      " + " ".join(f"{p['step']:>6}" for p in run["points"]))
        print("  distance  " + " ".join(f"{p['distance']:>6.3f}" for p in run["points"]))
        print("  held out  " + " ".join(f"{p['held_out_loss']:>6.3f}" for p in run["points"]))
        for noise in run["gradient_noise"]:
            print(f"  gradient noise at step {noise['step']}: {noise['ratio']:.2f} times the mean gradient")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--draws", type=int, default=8, help="Gumbel draws for the gradient noise")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("build/bench/reorder.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {options.threads} used", "torch": torch.__version__,
        "steps": options.steps, "batch": options.batch, "learning_rate": options.learning_rate,
        "memory": [{"tokens": length, "bytes": sinkhorn_bytes(length)} for length in LENGTHS], "runs": [],
    }  # fmt: skip
    for seed in range(options.seeds):
        for name, fusion in contenders(options.steps).items():
            results["runs"].append(train(name, fusion, options, seed))
            write_json(options.out, results)
    show(results)
    print(f"\nwritten to {options.out}")


if __name__ == "__main__":
    main()
