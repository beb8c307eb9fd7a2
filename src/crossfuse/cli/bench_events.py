"""`crossfuse bench events`: train models to announce events in rendered clips, and score them on unseen ones."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def events(
    recipe: Annotated[Path, typer.Argument(help="A stream recipe, such as recipes/embedded-stream.yaml.")],
    changes: Annotated[
        list[str] | None,
        typer.Argument(help="Changes, key=value, such as training.steps=400.", metavar="[KEY=VALUE]..."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the trained models and events.json.")] = Path(
        "runs/embedded-stream"
    ),
    fusion: Annotated[
        list[str] | None, typer.Option(help="Only this fusion of the recipe; repeatable.", show_default="all")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch.", show_default="torch's own")] = None,
) -> None:
    """Train each fusion of RECIPE on rendered clips, then score precision, recall and delay on unseen clips.

    The score goes through a stream session, frame by frame; beside it the same with each clip's frames shuffled and
    with another clip's frames.
    """
    import torch

    from crossfuse.streaming.event_recipe import load_stream_recipe
    from crossfuse.streaming.event_training import print_runs, train_and_score

    if threads:
        torch.set_num_threads(threads)
    loaded = load_stream_recipe(recipe, changes or ())
    runs = train_and_score(loaded, out, fusion or (), progress=_progress)
    print_runs(runs)
    typer.echo(f"written: {out / 'events.json'}; models: {', '.join(str(out / run.fusion) for run in runs)}")


def _progress(what: str, done: int, of: int) -> None:
    if sys.stderr.isatty():
        end = "\n" if done == of else ""
        print(f"\r{what} {done}/{of}".ljust(60), end=end, file=sys.stderr, flush=True)
    elif done == of or done % 100 == 0:
        print(f"{what} {done}/{of}", file=sys.stderr, flush=True)
