"""What AttAnchor reports of learned reordering (App. J.1), seen on the embedded model.

Three complaints, three measurements: memory with the square of the length, gradients that say more about the Gumbel
noise than about the data, and an order that drifts towards the identity (or never leaves chance) while the plain model
learns. All runs share data, order of the batches and optimiser. Runs named "from the start" train language model,
projector and reordering network together from the embedded model's common start; runs named "trained model" keep the
trained embedded model frozen, so that the reordering network alone can lower the loss.

    python benchmarks/bench_reorder.py [--steps 150] [--batch 8] [--seeds 1] [--runs TEXT]

Beside the JSON it writes a picture of the distance from the identity and of the held-out loss over training.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import io
import os
import platform
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

import crossfuse as xf
from crossfuse.data.collate import Collator
from crossfuse.data.questions import SceneQuestions
from crossfuse.data.records import Record
from crossfuse.fusions.reorder.measures import distance_from_identity, gradient_noise, learned_orders, sinkhorn_bytes
from crossfuse.reports.files import write_bytes, write_json
from crossfuse.reports.palette import line_style

LENGTHS = (64, 128, 256, 512, 1024)
KINDS = ("existence", "colour", "shape", "count", "relation")
HELD_OUT = 48


@dataclasses.dataclass(frozen=True)
class Contender:
    """A run: the model that it starts from, and whether only the fusion's own weights learn."""

    fusion: xf.Fusion
    trained_model: bool = False


def contenders(steps: int) -> dict[str, Contender]:
    """The temperature reaches its end after two thirds of the run."""
    annealed = {"anneal_steps": max(1, 2 * steps // 3)}
    gumbel = functools.partial(xf.GumbelReorder, **annealed)
    return {
        "insertion, from the start": Contender(xf.Insertion()),
        "T 1 to 0.1, from the start": Contender(gumbel()),
        "T 5 to 0.5, from the start": Contender(gumbel(temperature=5.0, final_temperature=0.5)),
        "no noise, from the start": Contender(gumbel(noise=0.0)),
        "near the identity, from the start": Contender(gumbel(identity_start=1.0)),
        "at the identity, from the start": Contender(gumbel(identity_start=5.0)),
        "T 1 to 0.1, trained model": Contender(gumbel(), trained_model=True),
        "T 5 to 0.5, trained model": Contender(gumbel(temperature=5.0, final_temperature=0.5), trained_model=True),
        "no noise, trained model": Contender(gumbel(noise=0.0), trained_model=True),
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
def held_out_loss(model: Any, inputs: dict[str, Any], fused: bool = True) -> float:
    """Nats a token, in evaluation mode: the hard order."""
    model.eval()
    options = {"return_logits": False} if fused else {}
    loss = float(model(**inputs, use_cache=False, **options).loss)
    model.train()
    return loss


def distance(model: Any, inputs: dict[str, Any]) -> float:
    return statistics.mean(distance_from_identity(order) for order in learned_orders(model, inputs))


def train(name: str, contender: Contender, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model, processor = xf.load_embedded("model" if contender.trained_model else "start")
    (model if contender.trained_model else model.model.vision_tower).requires_grad_(False)
    xf.fuse(model, contender.fusion)
    learns = bool(xf.fusion_parameters(model))
    collate = Collator(processor)
    scored = collate(records("test", HELD_OUT, seed))
    data = records("train", options.batch * options.steps, seed)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=options.learning_rate, weight_decay=0.0)
    points, noises, losses, seconds = [], [], [], 0.0
    every = max(1, options.steps // options.points)
    noisy = max(1, options.steps // 4)
    model.train()
    for step, inputs in enumerate(batches(collate, data, options.batch, options.steps)):
        if step % every == 0:
            points.append(measured(step, model, scored, learns))
        if learns and step % noisy == 0:
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
        "name": name, "seed": seed, "fusion": contender.fusion.to_dict(), "points": points, "gradient_noise": noises,
        "train_loss_last_tenth": statistics.mean(losses[-max(1, options.steps // 10) :]),
        "seconds_a_step": seconds / options.steps,
        "new_parameters": sum(p.numel() for p in xf.fusion_parameters(model).values()),
    }  # fmt: skip


def unfused_loss(seed: int) -> float:
    """What the trained embedded model reaches in the order of the input: the limit of the runs on the right."""
    model, processor = xf.load_embedded()
    return held_out_loss(model, Collator(processor)(records("test", HELD_OUT, seed)), fused=False)


def measured(step: int, model: Any, scored: dict[str, Any], learns: bool) -> dict[str, Any]:
    return {
        "step": step,
        "distance": distance(model, scored) if learns else 0.0,
        "held_out_loss": held_out_loss(model, scored),
    }


def draw(results: dict[str, Any]) -> bytes:
    """Distance from the identity above, held-out loss below; on the left all learns, on the right the order alone."""
    figure = Figure(figsize=(12, 8.4), layout="constrained")
    grid = figure.subplots(2, 2, sharex=True, sharey="row")
    kinds = list(dict.fromkeys(run["name"].partition(",")[0] for run in results["runs"]))
    for run in results["runs"]:
        column = int(run["name"].endswith("trained model"))
        kind = run["name"].partition(",")[0]
        label = kind if run["seed"] == 0 else None
        style = line_style(kinds.index(kind)) | {"label": label, "markersize": 3, "linewidth": 1.4}
        steps = [point["step"] for point in run["points"]]
        for row, key in enumerate(("distance", "held_out_loss")):
            if row or run["fusion"]["name"] != "insertion":
                grid[row, column].plot(steps, [point[key] for point in run["points"]], **style)
    grid[1, 1].axhline(
        results["trained_model_loss"], color="#666666", linewidth=1, linestyle="--", label="order of the input"
    )
    for column, title in enumerate(
        ("language model and order learn, from the start", "trained model, the order alone")
    ):
        distance, loss = grid[:, column]
        distance.set_title(title)
        distance.axhline(2 / 3, color="#999999", linewidth=0.8, linestyle=":")
        distance.annotate(
            "random", (1, 2 / 3), (3, -3), xycoords=("axes fraction", "data"), textcoords="offset points",
            color="#777777", fontsize=8, annotation_clip=False,
        )  # fmt: skip
        distance.set_ylim(-0.02, 1.15)
        loss.set_xlabel("optimiser step")
        loss.set_ylim(0, 5)
        for panel in (distance, loss):
            panel.spines[["top", "right"]].set_visible(False)
            if panel.lines and any(not line.get_label().startswith("_") for line in panel.lines):
                panel.legend(frameon=False, fontsize=8, ncols=2)
    grid[0, 0].set_ylabel("distance from the identity (1: a reversal)")
    grid[1, 0].set_ylabel("held-out loss (nats a token), hard order")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def show(results: dict[str, Any]) -> None:
    print(f"\nHeld-out loss of the trained model in the order of the input: {results['trained_model_loss']:.3f}")
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
    parser.add_argument("--points", type=int, default=10, help="measurements in a run")
    parser.add_argument("--runs", default="", help="only runs whose name contains this")
    parser.add_argument("--draws", type=int, default=8, help="Gumbel draws for the gradient noise")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("build/bench/reorder.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {options.threads} used", "torch": torch.__version__,
        "steps": options.steps, "batch": options.batch, "learning_rate": options.learning_rate,
        "trained_model_loss": unfused_loss(0),
        "memory": [{"tokens": length, "bytes": sinkhorn_bytes(length)} for length in LENGTHS], "runs": [],
    }  # fmt: skip
    for seed in range(options.seeds):
        for name, contender in contenders(options.steps).items():
            if options.runs not in name:
                continue
            results["runs"].append(train(name, contender, options, seed))
            write_json(options.out, results)
            write_bytes(options.out.with_suffix(".png"), draw(results))
    show(results)
    print(f"\nwritten to {options.out}")


if __name__ == "__main__":
    main()
