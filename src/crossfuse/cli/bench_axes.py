"""`crossfuse bench axes`: what each fusion costs, predicted from a configuration and measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from crossfuse.analysis.axes import AxisCost


def axes(
    like: Annotated[
        str | None, typer.Option(help="Predict for a published shape or a configuration's folder, without weights.")
    ] = None,
    others: Annotated[
        bool, typer.Option("--others", help="Also fusions that change positions or the order of the tokens.")
    ] = False,
    text_tokens: Annotated[int, typer.Option(min=1, help="Text tokens after each image.")] = 50,
    image_tokens: Annotated[int, typer.Option(min=1, help="Image tokens (predictions with --like).")] = 576,
    images: Annotated[str, typer.Option(help="Numbers of images for the cache columns.")] = "1,8,64",
    out: Annotated[Path | None, typer.Option(help="Also write the tables as JSON.")] = None,
) -> None:
    """Parameters, operations and cache bytes of insertion and of CASA's design axes."""
    from rich.console import Console

    from crossfuse.analysis.axes import OTHERS, ROWS, measure, predict
    from crossfuse.backbones import backbone_for
    from crossfuse.cli.model_shapes import embedded_shape, shape_like
    from crossfuse.cli.progress import Stages

    counts = _counts(images)
    shape, tokens = embedded_shape() if like is None else (shape_like(like), image_tokens)
    fusions = ROWS | (OTHERS if others else {})
    if not backbone_for(shape).mrope:
        fusions = {name: fusion for name, fusion in fusions.items() if fusion.name != "circle-rope"}
    model: Any = None
    if like is None:
        import torch

        from crossfuse.loading import load_model

        model, _ = load_model(None)
        torch.manual_seed(0)
    rows = []
    doing = "counting" if model is None else "counting and measuring"
    with Stages() as stages, stages.stage(doing, len(fusions)) as done:
        for name, fusion in fusions.items():
            row = predict(shape, name, fusion, text_tokens, tokens, counts)
            rows.append(row if model is None else measure(model, row, fusion, text_tokens, counts))
            done(1)
    console = Console()
    for table in _tables(rows, counts, like or "the embedded model"):
        console.print(table)
    if out is not None:
        _write(out, rows, like, text_tokens)


def _counts(images: str) -> list[int]:
    try:
        counts = [int(part) for part in images.split(",")]
    except ValueError:
        raise typer.BadParameter(f"images must be numbers with commas, such as 1,8,64; got {images!r}") from None
    if min(counts) < 1:
        raise typer.BadParameter(f"images must be at least 1; got {min(counts)}")
    return counts


def _tables(rows: list[AxisCost], counts: list[int], subject: str) -> list[Table]:
    """Operations, and bytes of the cache: each narrow enough for 80 columns, with what was measured below each row."""
    operations: list[tuple[str, Callable[[AxisCost], str], Callable[[AxisCost], str]]] = [
        ("new weights", lambda row: f"{row.added_parameters:,}", lambda row: ""),
        ("prefill", lambda row: short(row.prefill, "F"), lambda row: _known(row.measured_prefill, "F")),
        ("decode", lambda row: short(row.decode, "F"), lambda row: _known(row.measured_decode, "F")),
        ("training", lambda row: short(row.training, "F"), lambda row: _known(row.measured_training, "F")),
    ]
    if any(row.saved_bytes is not None for row in rows):
        operations.append(("saved for backward", lambda row: "", lambda row: _known(row.saved_bytes, "B")))
    cache = [
        (
            f"{count} image{'s' if count > 1 else ''}",
            lambda row, count=count: short(row.cache_bytes[count], "B"),
            lambda row, count=count: _known((row.measured_cache_bytes or {}).get(count), "B"),
        )
        for count in counts
    ]
    return [
        _table(f"Operations of one image and its text on {subject}", rows, operations),
        _table(f"Cache after so many turns on {subject}", rows, cache),
    ]


def _table(title: str, rows: list[AxisCost], columns: list[Any]) -> Table:
    from rich.table import Table

    measured = any(row.measured_prefill is not None for row in rows)
    table = Table(title=title, caption="predicted, and measured below" if measured else None)
    table.add_column("fusion", no_wrap=True, min_width=max(len(row.name) for row in rows))
    for name, _, _ in columns:
        table.add_column(name, justify="right", overflow="fold")  # nothing is ever cut
    for row in rows:
        table.add_row(row.name, *(predicted(row) for _, predicted, _ in columns))
        if measured:
            table.add_row("", *(found(row) for _, _, found in columns), style="dim", end_section=True)
    return table


def _known(value: int | None, unit: str) -> str:
    return "" if value is None else short(value, unit)


def short(value: float, unit: str) -> str:
    """Three digits and a prefix: 1.23 MF."""
    for prefix in ("", "k", "M", "G", "T"):
        if value < 1000:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:.3g} P{unit}"


def _write(out: Path, rows: list[AxisCost], like: str | None, text_tokens: int) -> None:
    import dataclasses
    import json

    from crossfuse.storage import replace_file

    out.parent.mkdir(parents=True, exist_ok=True)
    content = {"like": like, "text_tokens": text_tokens, "rows": [dataclasses.asdict(row) for row in rows]}
    replace_file(out, (json.dumps(content, indent=2) + "\n").encode())
