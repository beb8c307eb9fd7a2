"""Train the embedded recipes with several seeds and score them, beside the same answers with shuffled images.

    python scripts/score_recipes.py [RECIPE ...] [--seeds 0 1 2] [--questions 500] [--out build/recipes]

Without names: every recipe called embedded-*. A run that is there already is scored only. Prints a Markdown table (mean
and spread over the seeds) and writes scores.json; exits 1 where a recipe took more than 5 minutes or is less than 15
points above its shuffled score.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from crossfuse.cli.loading import quiet_libraries
from crossfuse.evaluation.generation import answer
from crossfuse.evaluation.scoring import other_images, score
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
    if not run_summary(folder):
        run(recipe, folder, resume=True)
    model, processor = merged_model(*read_run(folder))
    source = recipe.data[0].model_copy(update={"split": "test", "limit": questions})
    test = open_source(source)
    records = [test[i] for i in range(min(questions, len(test)))]
    pictures = [record.meta.get("image_id", i) for i, record in enumerate(records)]
    others = other_images(pictures, seed=seed)
    shuffled = [r.model_copy(update={"images": records[j].images}) for r, j in zip(records, others, strict=True)]
    expected = [str(record.answer) for record in records]
    shares = []
    for asked in (records, shuffled):
        shares.append(score(answer(model, processor, asked, max_new_tokens=6, batch_size=50), expected).share)
    return {"seed": seed, "own": shares[0], "shuffled": shares[1], "seconds": run_summary(folder)["seconds"]}


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
    print("\n| recipe | score | shuffled images | above | seconds |\n|---|---|---|---|---|")
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
