"""`crossfuse info`: what a model is, which fusions fit it, and what each would cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

TEXT_TOKENS = 50
# What an image of 448 x 448 pixels takes in Qwen2.5-VL.
VARYING_IMAGE_TOKENS = 256


def info(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Directory or hub id; its configuration is enough.",
            metavar="MODEL",
            show_default="embedded model",
        ),
    ] = None,
) -> None:
    """Tell what MODEL is, which fusions fit it, and what each costs. No weights are loaded."""
    import torch
    from rich.console import Console

    from crossfuse.analysis.cost import parameters_by_part
    from crossfuse.loading import embedded_directory, quiet_libraries, read_config

    quiet_libraries()
    name = str(embedded_directory()) if model is None else model
    config = read_config(name)
    saved_fusion = _saved_fusion(name)
    network = _without_weights(config)
    console = Console(highlight=False)
    text, vision = config.get_text_config(), config.vision_config
    console.print(f"[bold]{model or 'embedded model'}[/bold]: {type(network).__name__}")
    console.print(f"  text decoder   {text.model_type}, {text.num_hidden_layers} blocks of width {text.hidden_size}")
    console.print(f"  vision tower   {vision.model_type}, {_images(vision)}")
    if saved_fusion:
        console.print(f"  saved with     fusion {saved_fusion}")
    dtype = config.dtype or torch.float32
    sizes = parameters_by_part(network)
    total = sum(sizes.values())
    bytes_each = torch.empty((), dtype=dtype).element_size()
    console.print(
        f"  weights        {total:,} parameters, {_binary(total * bytes_each)} in {str(dtype).split('.')[-1]}"
    )
    _print_parts(console, sizes, total)
    _print_fusions(console, network)


def _saved_fusion(directory: str) -> str | None:
    """Name of the fusion that the model was saved with."""
    from pathlib import Path

    from crossfuse.storage import CONFIG, read_description

    folder = Path(directory).expanduser()
    return str(read_description(folder)["fusion"]["name"]) if (folder / CONFIG).is_file() else None


def _without_weights(config: Any) -> Any:
    """The model of the configuration, its parameters without storage."""
    import torch
    from transformers import AutoModelForImageTextToText

    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config)


def _images(vision: Any) -> str:
    size, patch = getattr(vision, "image_size", None), getattr(vision, "patch_size", None)
    return f"images of {size} x {size} pixels in patches of {patch}" if size and patch else "any image size"


def _print_parts(console: Console, sizes: dict[str, int], total: int) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("  part")
    table.add_column("parameters", justify="right")
    table.add_column("share", justify="right")
    for part, count in sizes.items():
        table.add_row(f"  {part}", f"{count:,}", f"{count / total:.1%}")
    console.print(table)


def _print_fusions(console: Console, network: Any) -> None:
    from rich.table import Table

    import crossfuse as xf
    from crossfuse.analysis.cost import prompt_cost

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("fusion")
    for column in ("new parameters", "prefill", "one token"):
        table.add_column(column, justify="right")
    varying = getattr(network.config.vision_config, "image_size", None) is None
    image_tokens = VARYING_IMAGE_TOKENS if varying else None
    costs, refused = [], []
    for name in xf.FUSIONS:
        try:
            fusion = xf.make_fusion(name)
            with xf.fused(network, fusion):
                added = sum(p.numel() for p in xf.fusion_parameters(network).values())
            cost = prompt_cost(network, fusion, text_tokens=TEXT_TOKENS, image_tokens=image_tokens)
        except (ValueError, NotImplementedError) as error:
            refused.append(f"{name} does not fit: {error}")
            continue
        costs.append(cost)
        table.add_row(name, f"{added:,}", _operations(cost.prefill), _operations(cost.decode))
    console.print()
    console.print(table)
    for line in refused:
        console.print(line, markup=False)
    if costs:
        tower = "" if costs[0].vision is None else f" Tower and projector: {_operations(costs[0].vision)} an image."
        console.print(
            f"One image of {costs[0].image_tokens} tokens, then {TEXT_TOKENS} tokens of text; a multiply-add is two "
            f"operations. Anchors: a tenth of the tokens copied.{tower}",
            style="dim",
        )


def _operations(count: int) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{count / size:.2f} {unit}FLOP"
    return f"{count:,} FLOP"


def _binary(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
