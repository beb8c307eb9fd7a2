"""`crossfuse bench equal-cost`: image tokens that insertion may keep at the cost of cross-attention."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def equal_cost(
    like: Annotated[
        str | None, typer.Option(help="A published shape or a configuration's folder, without weights.")
    ] = None,
    text_tokens: Annotated[int, typer.Option(min=1, help="Text tokens after the image.")] = 50,
    image_tokens: Annotated[int, typer.Option(min=1, help="Image tokens (with --like).")] = 576,
    answer_tokens: Annotated[int, typer.Option(min=0, help="Generated tokens that are counted too.")] = 0,
    share: Annotated[float, typer.Option(help="Share of the text tokens that anchors copy.")] = 0.1,
    out: Annotated[Path | None, typer.Option(help="Also write the table as JSON.")] = None,
) -> None:
    """The share of image tokens with which insertion, pruned and anchored, costs as much as cross-attention."""
    from rich.console import Console
    from rich.table import Table

    from crossfuse.analysis.axes import ROWS
    from crossfuse.analysis.equal_cost import equal_cost as find
    from crossfuse.cli.bench_axes import short
    from crossfuse.cli.model_shapes import embedded_shape, shape_like
    from crossfuse.fusions.anchors import TextAnchors
    from crossfuse.fusions.cross_attention import CrossAttention

    shape, tokens = embedded_shape() if like is None else (shape_like(like), image_tokens)
    table = Table(title=f"Pruned insertion with anchors at equal operations, on {like or 'the embedded model'}")
    for column in ("at the cost of", "operations", "tokens kept", "keep_image_tokens", "its operations"):
        table.add_column(column, justify="left" if column == "at the cost of" else "right")
    rows: list[dict[str, Any]] = []
    counted = {"text_tokens": text_tokens, "image_tokens": tokens, "answer_tokens": answer_tokens}
    for name, target in ROWS.items():
        if not isinstance(target, CrossAttention):
            continue
        try:
            found = find(shape, target, TextAnchors(share=share), **counted)
        except ValueError as error:
            rows.append({"target": name, "reason": str(error)})
            table.add_row(name, "-", "none", "-", "-")
            continue
        kept = found.fusion.keep_image_tokens
        rows.append(
            {
                "target": name,
                "operations": found.target_operations,
                "kept": found.kept,
                "keep_image_tokens": kept,
                "pruned_operations": found.operations,
            }
        )
        table.add_row(
            name,
            short(found.target_operations, "F"),
            f"{found.kept} of {tokens}",
            f"{kept:.4f}",
            f"{short(found.operations, 'F')} ({found.ratio:.1%})",
        )
    Console().print(table)
    if out is not None:
        import json

        from crossfuse.storage import replace_file

        out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(
            out, (json.dumps({"like": like, **counted, "share": share, "rows": rows}, indent=2) + "\n").encode()
        )
