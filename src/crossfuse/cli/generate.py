"""`crossfuse generate`: one image, one question, one answer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from crossfuse.cli.fusion_options import chosen_fusion
from crossfuse.cli.model_options import DeviceOption, fuse_as_asked


def generate(
    context: typer.Context,
    image: Annotated[Path, typer.Argument(help="Picture file: PNG, JPEG, GIF, WebP, ...", metavar="IMAGE")],
    prompt: Annotated[str, typer.Argument(help="What to ask about it.", metavar="PROMPT")],
    model: Annotated[
        str | None,
        typer.Option(help="Directory or hub id of a vision-language model.", show_default="the embedded model"),
    ] = None,
    fusion: Annotated[
        str | None,
        typer.Option(help="insertion, text-anchors or cross-attention.", show_default="as the model was saved"),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 64,
    device: DeviceOption = "auto",
) -> None:
    """Answer PROMPT about IMAGE.

    Every field of the chosen fusion is an option too: --fusion text-anchors --threshold 0.12 --copy-order
    prompt.
    """
    chosen = chosen_fusion(context, fusion)
    # The cheap checks come before the model is loaded: a typing error should not cost a minute.
    from crossfuse.data.images import open_image

    picture = open_image(image)
    if not prompt.strip():
        raise ValueError('the prompt is empty; ask something, as "what is in the image?"')
    from crossfuse.data.records import Record
    from crossfuse.evaluation.generation import answer
    from crossfuse.loading import load_model

    network, processor = load_model(model, device)
    fuse_as_asked(network, chosen)
    record = Record.of_question("prompt", prompt, images=[picture])
    (text,) = answer(network, processor, [record], max_new_tokens=max_new_tokens)
    typer.echo(text)
