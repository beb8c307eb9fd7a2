"""`crossfuse train`: a recipe, with changes on the command line, planned or run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def train(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe by name, or a YAML file; `list` shows the names.")],
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Such as lora.rank=8 or data.0.limit=100.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The run's folder.", show_default="runs/ and the recipe's name")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in --out.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print steps, tokens, memory and time; load no weights.")
    ] = False,
) -> None:
    """Train what a recipe describes; `accelerate launch -m crossfuse train ...` does it on several devices."""
    from crossfuse.training.recipe_files import find_recipe, load_recipe, shipped_recipes

    if recipe == "list":
        _print_recipes(list(shipped_recipes()))
        return
    chosen = load_recipe(recipe, changes or [])
    from crossfuse.loading import quiet_libraries

    quiet_libraries()
    if dry_run:
        from crossfuse.training.plan import plan

        typer.echo(chosen.description or recipe)
        for line in plan(chosen).lines():
            typer.echo(line)
        return
    from accelerate import PartialState

    from crossfuse.training.trainer import run

    folder = out or Path("runs") / find_recipe(recipe).stem
    result = run(chosen, folder, resume=resume)
    if not PartialState().is_main_process:  # the others have trained the same model
        return
    loss = f", last loss {result.losses[-1][1]:.3f}" if result.losses else ""
    best = f", best at step {result.best_step}" if result.best_step else ""
    typer.echo(f"{result.steps} steps in {result.seconds:.0f} s ({result.stopped}){loss}{best}; {folder}")


def _print_recipes(names: list[str]) -> None:
    from crossfuse.training.recipe_files import load_recipe

    width = max(map(len, names))
    for name in names:
        typer.echo(f"{name:{width}}  {load_recipe(name).description}")
