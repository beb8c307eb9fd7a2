"""A finished run as something to use or to share: one merged model, or adapter and fusion alone, with a model card."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from crossfuse.storage import replace_file
from crossfuse.training.checkpoints import TRAINED
from crossfuse.training.recipe import Recipe

RECIPE, SUMMARY = "recipe.json", "run.json"
# What a checkpoint holds besides the state of the training.
_ADAPTER = ("adapter_model.safetensors", "adapter_config.json", TRAINED, "fusion.json", "fusion.safetensors")


def export_run(
    run: Path, out: Path, *, checkpoint: str | None = None, adapter_only: bool = False, scores: tuple[Path, ...] = ()
) -> Path:
    """Write a run's best (else last) checkpoint to `out`, with processor and README.md; returns `out`.

    Merged: LoRA is added to the weights it adapts, in float32, and the whole model is saved in the recipe's precision;
    `crossfuse.from_pretrained(out)` gives it back, fused. With `adapter_only` the checkpoint's weights are copied as
    they are; `load_export` puts them on the base model.

    Args:
        checkpoint: "best" or "last".
        scores: JSON files of `crossfuse evaluate` for the model card.

    Raises:
        ValueError: no run there, or no such checkpoint.
    """
    recipe, folder = read_run(run, checkpoint)
    out.mkdir(parents=True, exist_ok=True)
    if adapter_only:
        for name in _ADAPTER:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, out / name)
        replace_file(out / RECIPE, (run / RECIPE).read_bytes())
        if (run / "processor").is_dir():
            shutil.copytree(run / "processor", out, dirs_exist_ok=True)
    else:
        model, processor = merged_model(recipe, folder)
        model.save_pretrained(out)
        processor.save_pretrained(out)
    from crossfuse.training.model_card import model_card

    replace_file(out / "README.md", model_card(recipe, run, folder, adapter_only, scores).encode())
    return out


def read_run(run: Path, checkpoint: str | None = None) -> tuple[Recipe, Path]:
    """The recipe of a run and the folder of its best (else last) checkpoint, or of the one that is asked for."""
    if not (run / RECIPE).is_file():
        raise ValueError(f"{run} holds no run: {RECIPE} is missing; give the folder that `crossfuse train` wrote")
    recipe = Recipe.model_validate_json((run / RECIPE).read_text(encoding="utf-8"))
    wanted = ("best", "last") if checkpoint is None else (checkpoint,)
    for name in wanted:
        if (run / name).is_dir():
            return recipe, (run / name).resolve()
    raise ValueError(f"{run} has no checkpoint {' or '.join(wanted)}; train it first, or resume it")


def merged_model(recipe: Recipe, folder: Path) -> tuple[Any, Any]:
    """(model with the checkpoint's weights in it and no PEFT around it, processor)."""
    from crossfuse.training.start import load_stage, starting_model

    model, processor = starting_model(recipe.model_copy(update={"precision": "fp32"}))
    load_stage(model, folder)
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(recipe.precision)
    return (model if half is None else model.to(half)).eval(), processor


def load_export(folder: str | Path) -> tuple[Any, Any]:
    """(fused model, processor) of an export with `adapter_only`: the base is loaded as its recipe says."""
    folder = Path(folder)
    if not (folder / RECIPE).is_file():
        raise ValueError(f"{folder} holds no {RECIPE}; a merged export is loaded with crossfuse.from_pretrained")
    return merged_model(Recipe.model_validate_json((folder / RECIPE).read_text(encoding="utf-8")), folder)


def run_summary(run: Path) -> dict[str, Any]:
    """What the trainer wrote at the end of the run; empty where it has not ended."""
    path = run / SUMMARY
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found
