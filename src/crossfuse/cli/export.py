"""`crossfuse export`: a finished run as a model to use or to share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(help="Folder that `crossfuse train` wrote.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="Where to write.", show_default="RUN/export or RUN/adapter")
    ] = None,
    adapter_only: Annotated[
        bool, typer.Option("--adapter-only", help="Adapter and fusion only, without the base model.")
    ] = False,
    checkpoint: Annotated[
        str | None, typer.Option(help="best or last.", show_default="best where there is one, else last")
    ] = None,
    scores: Annotated[
        list[Path] | None, typer.Option(help="scores.json of `crossfuse evaluate`, for the model card; repeatable.")
    ] = None,
) -> None:
    """Merge LoRA into the model, or keep adapter and fusion apart; a model card comes with it."""
    if checkpoint not in (None, "best", "last"):
        raise ValueError(f"--checkpoint must be best or last; got {checkpoint!r}")
    for file in scores or []:
        if not file.is_file():
            raise ValueError(f"no such file: {file}; give scores.json of `crossfuse evaluate`")
    from crossfuse.loading import quiet_libraries
    from crossfuse.training.export import export_run

    quiet_libraries()
    folder = out or run / ("adapter" if adapter_only else "export")
    export_run(run, folder, checkpoint=checkpoint, adapter_only=adapter_only, scores=tuple(scores or ()))
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    typer.echo(f"{folder}: {size / 1e6:,.1f} MB; README.md is the model card")
