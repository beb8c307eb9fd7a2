"""`crossfuse anchors`: which word is copied to which patch of a picture, drawn and as JSON."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crossfuse.cli.fusion_options import chosen_fusion
from crossfuse.cli.model_options import OneDeviceOption

if TYPE_CHECKING:
    from crossfuse.analysis.threshold import Calibration
    from crossfuse.fusion import Fusion

_REMEDY = "use --fusion text-anchors, image-anchors, or cross-attention with --anchors THRESHOLD"


def anchors(
    context: typer.Context,
    image: Annotated[Path, typer.Argument(help="Picture file: PNG, JPEG, GIF, WebP, ...", metavar="IMAGE")],
    prompt: Annotated[str, typer.Argument(help="What to ask about it.", metavar="PROMPT")],
    out: Annotated[Path, typer.Option("--out", help="Directory for anchors.png and anchors.json.")] = Path(
        "crossfuse-anchors"
    ),
    model: Annotated[
        str | None,
        typer.Option(help="Directory or hub id of a vision-language model.", show_default="the embedded model"),
    ] = None,
    fusion: Annotated[
        str | None,
        typer.Option(
            help="text-anchors, image-anchors, or cross-attention with --anchors THRESHOLD.",
            show_default="as saved, else text-anchors",
        ),
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Smallest cosine of an anchor; 1 or more gives none.", show_default="0.12")
    ] = None,
    share: Annotated[
        float | None, typer.Option(help="Instead of a threshold: the share of this prompt's tokens to copy.")
    ] = None,
    device: OneDeviceOption = "auto",
) -> None:
    """Show the anchors of PROMPT on IMAGE: the patch grid, each word in green at its patch, its cosine.

    Other fields of the fusion are options too: --fusion text-anchors --copy-order prompt.
    """
    if threshold is not None and share is not None:
        raise ValueError("give --threshold or --share, not both")
    fields: dict[str, Any] = {} if threshold is None else {"threshold": threshold}
    chosen = chosen_fusion(context, fusion)
    if chosen is not None and _anchors_of(chosen) is None:
        raise ValueError(f"{chosen.name} makes no anchors; {_REMEDY}")
    from crossfuse.data.collate import Collator, open_image
    from crossfuse.data.records import Record

    # The cheap checks come before the model is loaded.
    picture = open_image(image)
    if not prompt.strip():
        raise ValueError('the prompt is empty; ask something, as "what is in the image?"')
    import crossfuse as xf
    from crossfuse.loading import load_model

    network, processor = load_model(model, device, whole=True)
    batch = Collator(processor, prompt_only=True)([Record.of_question("prompt", prompt, images=[picture])])
    used = _fused(network, chosen, fields)
    calibration = None
    if share is not None:
        calibration = xf.calibrate_threshold(network, [batch], share=share)
        used = _fused(network, used, {"threshold": calibration.threshold, "share": share})
    found = xf.explain_anchors(network, batch)[0]
    written = write_anchors(out, picture, prompt, processor, used, found, calibration)
    for entry in written:
        typer.echo(f"{entry['token']!r:16} -> patch ({entry['row']}, {entry['column']})  cosine {entry['cosine']:.3f}")
    threshold = getattr(_anchors_of(used), "threshold", 0.0)
    noise = _noise(network, batch)
    typer.echo(
        f"{len(written)} anchors at a threshold of {threshold:.3f}; unrelated vectors of this width reach "
        f"{noise:.3f} in the median; {out / 'anchors.png'}, {out / 'anchors.json'}"
    )


def write_anchors(
    out: Path,
    picture: Any,
    prompt: str,
    processor: Any,
    fusion: Fusion,
    found: list[Any],
    calibration: Calibration | None = None,
) -> list[dict[str, Any]]:
    """Write ``anchors.png`` and ``anchors.json``; returns the anchors as the JSON holds them.

    ``picture`` is the upright RGB image as it was given to the processor, ``found`` what `explain_anchors` returned
    for its one sample. Boxes are left, top, right, bottom in pixels of the picture.
    """
    from crossfuse.analysis.patch_boxes import patch_boxes
    from crossfuse.reports.files import write_bytes, write_json
    from crossfuse.reports.overlay import draw_anchors

    if any(anchor.grid is None for anchor in found):
        raise ValueError("the image tokens of this model form no grid, so anchors cannot be placed on the picture")
    grid = found[0].grid if found else (1, 1)
    boxes = patch_boxes(processor, picture.size, grid)
    entries = [
        {
            "token": processor.tokenizer.decode([anchor.token_id]),
            "index": anchor.token_index,
            "image": anchor.image_index,
            "row": anchor.row,
            "column": anchor.column,
            "box": [round(edge, 2) for edge in boxes.box(anchor.row, anchor.column)],
            "cosine": round(anchor.cosine, 6),
        }
        for anchor in found
    ]
    labels = [(e["token"], e["row"], e["column"], e["cosine"]) for e in entries]
    buffer = io.BytesIO()
    draw_anchors(picture, labels, grid, boxes.area).save(buffer, format="PNG", optimize=True)
    write_bytes(out / "anchors.png", buffer.getvalue())
    write_json(
        out / "anchors.json",
        {
            "prompt": prompt,
            "image_size": list(picture.size),
            "grid": list(grid) if found else None,
            "fusion": fusion.to_dict(),
            "calibration": None if calibration is None else dataclasses.asdict(calibration),
            "anchors": entries,
        },
    )
    return entries


def _anchors_of(fusion: Fusion | None) -> Fusion | None:
    """The part of a fusion that makes anchors; None where it makes none."""
    nested = getattr(fusion, "anchors", None)
    return nested or (fusion if fusion is not None and fusion.name in ("text-anchors", "image-anchors") else None)


def _fused(network: Any, chosen: Fusion | None, fields: dict[str, Any]) -> Fusion:
    """Fuse the model with the chosen anchors (or keep the ones that it was saved with), some fields changed."""
    import crossfuse as xf
    from crossfuse.evaluation.thresholds import change_fusion

    known = xf.fusion_of(network)
    base = chosen or known or xf.TextAnchors()
    anchors: Any = _anchors_of(base)
    if anchors is None:
        raise ValueError(f"this model was saved with {base.name}, which makes no anchors; {_REMEDY}")
    changed = dataclasses.replace(anchors, **fields)
    wanted = changed if anchors is base else dataclasses.replace(base, anchors=changed)  # type: ignore[call-arg]
    if wanted != known:  # What a compression has learned decides where anchors lie: weights that fit go on.
        change_fusion(network, wanted)
    return wanted


def _noise(network: Any, batch: dict[str, Any]) -> float:
    from crossfuse.analysis.threshold import best_of_random, partner_counts
    from crossfuse.fusions.anchors.explain import match_prompt

    sequence, _, fusion = match_prompt(network, batch)
    counts = partner_counts(sequence, fusion.name)
    return best_of_random(sequence.embeds.shape[-1], sum(counts) / max(len(counts), 1))
