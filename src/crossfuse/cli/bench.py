"""`crossfuse bench`; here `axes`: what each fusion costs, predicted from a configuration and measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crossfuse.cli.bench_equal import equal_cost
from crossfuse.cli.bench_events import events
from crossfuse.cli.bench_stream import stream

if TYPE_CHECKING:
    from crossfuse.analysis.axes import AxisCost

bench = typer.Typer(help="Measure and predict costs.", no_args_is_help=True)
bench.command()(stream)
bench.command("equal-cost")(equal_cost)
bench.command()(events)

# Shapes of published models, so that no configuration file is needed: (family, text fields).
KNOWN: dict[str, dict[str, Any]] = {
    "Qwen2.5-VL-3B": {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 2, "attention_bias": True, "tie_word_embeddings": True,
    },
    "LLaVA-1.5-7B": {
        "vocab_size": 32064, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32,
    },
    "Helium1-2B": {
        "vocab_size": 64000, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    },
    "SmolLM2-135M": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
    },
}  # fmt: skip


@bench.callback()
def _group() -> None:
    pass


@bench.command()
def axes(
    like: Annotated[
        str | None, typer.Option(help="Predict for a published shape or a configuration's folder, without weights.")
    ] = None,
    text_tokens: Annotated[int, typer.Option(min=1, help="Text tokens after each image.")] = 50,
    image_tokens: Annotated[int, typer.Option(min=1, help="Image tokens (predictions with --like).")] = 576,
    images: Annotated[str, typer.Option(help="Numbers of images for the cache columns.")] = "1,8,64",
    out: Annotated[Path | None, typer.Option(help="Also write the table as JSON.")] = None,
) -> None:
    """Parameters, operations and cache bytes of insertion and of CASA's design axes."""
    from crossfuse.analysis.axes import ROWS, measure, predict

    counts = _counts(images)
    if like is None:
        import torch

        from crossfuse.api import load_embedded

        model, _ = load_embedded()
        with torch.device("meta"):
            shape: Any = type(model)(model.config)
        tokens = (model.config.vision_config.image_size // model.config.vision_config.patch_size) ** 2
        torch.manual_seed(0)
        rows = [
            measure(model, predict(shape, name, fusion, text_tokens, tokens, counts), fusion, text_tokens, counts)
            for name, fusion in ROWS.items()
        ]
    else:
        shape = _shape(like)
        rows = [predict(shape, name, fusion, text_tokens, image_tokens, counts) for name, fusion in ROWS.items()]
    _print(rows, counts, like or "the embedded model")
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


def _shape(like: str) -> Any:
    """A LLaVA of that decoder's shape on the device "meta"."""
    import torch
    from transformers import AutoConfig, CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    from crossfuse.fusion import nearest

    if like in KNOWN:
        text: Any = LlamaConfig(**KNOWN[like])
    elif Path(like).is_dir():
        text = AutoConfig.from_pretrained(like, local_files_only=True).get_text_config()
    else:
        raise typer.BadParameter(
            f"{like!r} is neither a folder nor a known shape{nearest(like, KNOWN)}: {', '.join(KNOWN)}"
        )
    vision = CLIPVisionConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1)
    with torch.device("meta"):
        return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text))


def _print(rows: list[AxisCost], counts: list[int], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Cost of the design axes on {title} (predicted / measured)")
    for column in ("fusion", "new weights", "prefill", "decode", "training", "saved for backward"):
        table.add_column(column, justify="left" if column == "fusion" else "right")
    for count in counts:
        table.add_column(f"cache, {count} img", justify="right")
    for row in rows:
        measured = row.measured_cache_bytes or {}
        table.add_row(
            row.name,
            f"{row.added_parameters:,}",
            _pair(row.prefill, row.measured_prefill, "F"),
            _pair(row.decode, row.measured_decode, "F"),
            _pair(row.training, row.measured_training, "F"),
            "-" if row.saved_bytes is None else _short(row.saved_bytes, "B"),
            *(_pair(row.cache_bytes[k], measured.get(k), "B") for k in counts),
        )
    Console().print(table)


def _pair(predicted: int, measured: int | None, unit: str) -> str:
    return _short(predicted, unit) + ("" if measured is None else f" / {_short(measured, unit)}")


def _short(value: float, unit: str) -> str:
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
