"""Train the embedded recipes with several seeds and score them, beside the same questions with shuffled images.

    python scripts/score_recipes.py [RECIPE ...] [--seeds 0 1 2] [--questions 500] [--out build/recipes]

Without names: every recipe called embedded-*. A run that is there already is scored only. Questions about pictures and
clips: the share of right answers, beside the share with another question's picture or frames. Streams (data laid out as
such): the F1 of announced events, every word right, at most one frame late, beside the F1 with another clip's frames.
Prints a Markdown table (mean and spread over the seeds) and writes scores.json; exits 1 where a recipe took more than 5
minutes or is less than 15 points above its shuffled score.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from crossfuse.data.records import Record
from crossfuse.data.streams import StreamRecord
from crossfuse.evaluation.events import other_frames, score_events
from crossfuse.evaluation.generation import answer
from crossfuse.evaluation.scoring import other_images, score
from crossfuse.loading import quiet_libraries
from crossfuse.reports.files import write_json
from crossfuse.training.export import merged_model, read_run, run_summary
from crossfuse.training.recipe_files import load_recipe, shipped_recipes
from crossfuse.training.start import open_source
from crossfuse.training.trainer import run

MARGIN, LIMIT_SECONDS = 0.15, 300


def embedded_recipes() -> list[str]:
    """Those that are recipes of a training run on the embedded model."""
    return [name for name in shipped_recipes() if name.startswith("embedded-") and load_recipe(name).data]


def measure(name: str, seed: int, questions: int, folder: Path) -> dict[str, Any]:
    recipe = load_recipe(name, [f"seed={seed}"])
    if run_summary(folder).get("stopped", "signal") == "signal":  # none yet, or interrupted
        started = time.process_time()
        run(recipe, folder, resume=True)
        write_json(folder / "cpu.json", {"seconds": time.process_time() - started})
    model, processor = merged_model(*read_run(folder))
    source = recipe.data[0].model_copy(update={"split": "test", "limit": questions})
    test = open_source(source)
    if source.layout == "stream":
        own, shuffled = announced(recipe.stream.build().session(model, processor, max_new_tokens=16), list(test))
    else:
        own, shuffled = answered(model, processor, [test[i] for i in range(min(questions, len(test)))], seed)
    found = {"seed": seed, "own": own, "shuffled": shuffled, "seconds": run_summary(folder)["seconds"]}
    cpu = folder / "cpu.json"  # on a machine with other work the time on the clock says little
    return found | ({"cpu_seconds": round(json.loads(cpu.read_text())["seconds"], 1)} if cpu.is_file() else {})


def answered(model: Any, processor: Any, records: list[Record], seed: int) -> tuple[float, float]:
    """Share of right answers, and with another question's pictures."""
    pictures = [record.meta.get("image_id", i) for i, record in enumerate(records)]
    others = other_images(pictures, seed=seed)
    shuffled = [r.model_copy(update={"images": records[j].images}) for r, j in zip(records, others, strict=True)]
    expected = [str(record.answer) for record in records]
    batch = 50 if len(records[0].images) == 1 else 20
    own, other = (
        score(answer(model, processor, asked, max_new_tokens=6, batch_size=batch), expected).share
        for asked in (records, shuffled)
    )
    return own, other


def announced(session: Any, streams: list[StreamRecord]) -> tuple[float, float]:
    """F1 of events with every word right, and with the frames of another clip."""
    own, other = (score_events(session, given)["words"].f1 or 0.0 for given in (streams, other_frames(streams)))
    return own, other


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", default=None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("build/recipes"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    quiet_libraries()
    found: dict[str, list[dict[str, Any]]] = {}
    for name in options.recipes or embedded_recipes():
        for seed in options.seeds:
            line = measure(name, seed, options.questions, options.out / name / f"seed-{seed}")
            found.setdefault(name, []).append(line)
            print(json.dumps({"recipe": name, **line}), flush=True)
            write_json(options.out / "scores.json", found)
    print("\n| recipe | score | shuffled | above | seconds |\n|---|---|---|---|---|")
    short = []
    for name, lines in found.items():
        own, other = ([line[key] for line in lines] for key in ("own", "shuffled"))
        seconds = max(line["seconds"] for line in lines)
        above = min(a - b for a, b in zip(own, other, strict=True))
        print(f"| {name} | {spread(own)} | {spread(other)} | {100 * above:.1f} at least | {seconds:.0f} at most |")
        if above < MARGIN or seconds > LIMIT_SECONDS:
            short.append(name)
    if short:
        print(f"below {100 * MARGIN:.0f} points or above {LIMIT_SECONDS} s: {', '.join(short)}")
    return bool(short)


def spread(values: list[float]) -> str:
    """Mean and standard deviation in per cent."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{100 * statistics.mean(values):.1f} % ± {100 * deviation:.1f}"


if __name__ == "__main__":
    sys.exit(main())
