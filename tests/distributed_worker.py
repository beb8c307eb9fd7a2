"""One process of a distributed training test: ``accelerate launch tests/distributed_worker.py CASES OUT``.

CASES: names separated by commas; ``name@2`` is told to stop after 2 steps. The main process writes a file
``OUT/results.json``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).parent))

import torch

import crossfuse as xf
from crossfuse.training.guards import StopSignal
from crossfuse.training.logs import StepInfo
from crossfuse.training.trainer import train
from training_runs import EVERYTHING, FULL, Rows, collate, model_for, recipe

torch.set_num_threads(1)

# name: (fusion, recipe fields, every n-th sample without an image)
CASES = {
    # Full training reaches tower and projector: the blocks of the tower are shards of their own.
    "full": (
        xf.CrossAttention(joint_text=True),
        {"trainable": {**FULL, "vision_blocks": 2}, "eval_every": 2},
        2,
    ),
    "lora": (xf.TextAnchors(threshold=0.1), {"trainable": EVERYTHING, "lora": {"rank": 4}, "eval_every": 2}, 2),
    "insertion": (xf.Insertion(), {"trainable": {**FULL, "vision_blocks": 2}, "packing": {"max_text_tokens": 26}}, 3),
}
STEPS = 4


def run_case(case: str, out: Path, world: int, resume: bool = False) -> dict[str, Any]:
    """The same optimiser steps whatever `world` is: one process takes twice the micro-batches of two."""
    name, _, last = case.partition("@")
    fusion, fields, text_only = CASES[name]
    chosen = recipe(steps=STEPS, accumulation=2 // world, seed=3, **fields)
    stop, evaluated = StopSignal(), []

    def watch(info: StepInfo) -> None:  # on the main process alone: the others must learn of it
        stop.received = stop.received or (bool(last) and info.step == int(last) - 1)

    def note(rows: list[dict[str, Any]]) -> dict[str, Any]:
        evaluated.extend(row["id"] for row in rows if row["id"].startswith("validation"))
        return collate(rows)

    done = train(
        model_for(fusion, chosen),
        Rows(24, text_only=text_only),
        note,
        chosen,
        out=out / name,
        validation=Rows(5, text_only=text_only, seed=7, name="validation") if "eval_every" in fields else None,
        resume=resume,
        progress=watch,
        stop=stop,
    )
    return {
        "losses": done.losses,
        "validation": done.validation,
        "tokens": [done.text_tokens, done.image_tokens],
        "stopped": done.stopped,
        "evaluated": evaluated,
    }


if __name__ == "__main__":
    from accelerate import PartialState

    folder = Path(sys.argv[2])
    state = PartialState(cpu=True)
    results = {case: run_case(case, folder, state.num_processes) for case in sys.argv[1].split(",")}
    if state.is_main_process:
        (folder / "results.json").write_text(json.dumps({"processes": state.num_processes, **results}))
    state.wait_for_everyone()
    state.destroy_process_group()
