"""`crossfuse demo`: three fusions trained, scored and explained on the embedded model, in minutes on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def demo(
    quick: Annotated[bool, typer.Option("--quick", help="Under a minute: few steps, few questions.")] = False,
    data: Annotated[
        Literal["scenes", "easy-vqa"], typer.Option(help="Rendered scenes, or the public easy-VQA set.")
    ] = "scenes",
    out: Annotated[Path, typer.Option(help="Folder for report.html, pictures and results.json.")] = Path(
        "crossfuse-demo"
    ),
    seed: Annotated[int, typer.Option(help="Seed of training, questions and shuffling.")] = 0,
) -> None:
    """Train, score and explain insertion, text anchors and cross-attention on the model inside the package."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; give --out a folder")
    out.mkdir(parents=True, exist_ok=True)
    from crossfuse.cli.demo_run import QUICK, USUAL, run_demo

    run_demo(QUICK if quick else USUAL, data, out, seed=seed, quick=quick)
