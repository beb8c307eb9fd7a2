"""`crossfuse sweep`: one field over several values, measured; each value only evaluated, or trained anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from crossfuse.cli.fusion_options import chosen_fusion
from crossfuse.cli.model_options import OneDeviceOption

METRICS = ("accuracy", "loss", "anchors", "precision")


def sweep(
    context: typer.Context,
    values: Annotated[str, typer.Argument(help="Values, separated by commas: 1,0.16,0.14,0.12,0.1,0.08")],
    field: Annotated[str, typer.Option(help="Field of the fusion, or with --train of the recipe.")] = "threshold",
    fusion: Annotated[str, typer.Option(help="The fusion; its other fields are options too.")] = "text-anchors",
    model: Annotated[
        str | None, typer.Option(help="Directory or hub id.", show_default="the recipe's, else embedded")
    ] = None,
    data: Annotated[str, typer.Option(help="JSON lines of records to measure on, or `scenes`.")] = "scenes",
    train: Annotated[
        str | None, typer.Option(help="Recipe (a name or a file) to train each value with; `default` for its defaults.")
    ] = None,
    train_data: Annotated[
        str | None, typer.Option(help="Records to train on.", show_default="the recipe's own, else scenes")
    ] = None,
    metrics: Annotated[str, typer.Option(help=f"Some of {', '.join(METRICS)}, separated by commas.")] = "accuracy,loss",
    samples: Annotated[int, typer.Option(min=2, help="Records to measure on.")] = 200,
    out: Annotated[Path, typer.Option("--out", help="Directory for sweep.csv, .md, .png and .json.")] = Path(
        "crossfuse-sweep"
    ),
    device: OneDeviceOption = "auto",
) -> None:
    """Sweep a threshold (or any other field) over VALUES: one row a metric, the best value marked."""
    wanted = [name.strip() for name in metrics.split(",") if name.strip()]
    for name in wanted:
        if name not in METRICS:
            from crossfuse.fusion import nearest

            raise ValueError(f"unknown metric {name!r}{nearest(name, METRICS)}; known: {', '.join(METRICS)}")
    base = chosen_fusion(context, fusion)
    parsed = [_value(text) for text in values.split(",") if text.strip()]
    recipe = None if train is None else _recipe(train)
    from crossfuse.analysis.sweep import sweep as run_sweep
    from crossfuse.api import fusion_of, unfuse
    from crossfuse.cli.explain import read_data
    from crossfuse.cli.progress import Stages
    from crossfuse.reports.files import write_bytes, write_json

    network, processor = _start(model, recipe, device)
    if fusion_of(network) is not None:
        unfuse(network)
    records = read_data(data, samples)
    with Stages() as stages, stages.stage("values", len(parsed)) as done:
        table = run_sweep(
            network,
            base,  # type: ignore[arg-type]
            field,
            parsed,
            lambda fused: measure(fused, processor, records, wanted),
            recipe=recipe,
            train=lambda fused, chosen: _train(fused, processor, chosen, train_data),
            progress=done,
        )
    write_bytes(out / "sweep.csv", table.to_csv().encode())
    write_bytes(out / "sweep.md", table.to_markdown().encode())
    write_bytes(out / "sweep.png", table.to_png())
    write_json(
        out / "sweep.json",
        {
            "field": field, "values": parsed, "metrics": table.to_json(),
            "fusion": base.to_dict() if base else None,
            "recipe": None if recipe is None else recipe.model_dump(mode="json"),
            "model": model or (recipe and recipe.model) or "embedded", "data": data, "samples": len(records),
        },
    )  # fmt: skip
    typer.echo(table.to_markdown().rstrip())
    typer.echo(f"written: {out / 'sweep.csv'}, {out / 'sweep.md'}, {out / 'sweep.png'}, {out / 'sweep.json'}")


def measure(network: Any, processor: Any, records: list[Any], metrics: list[str]) -> dict[str, float]:
    """accuracy (share of right answers), loss (nats a supervised token), anchors (inserted copies a sample), precision
    (of naming words that are copied: share whose patch shows what they name; NaN where none is)."""
    import crossfuse as xf
    from crossfuse.analysis.anchor_precision import anchor_precision
    from crossfuse.data.collate import Collator
    from crossfuse.evaluation.generation import answer
    from crossfuse.evaluation.scoring import score
    from crossfuse.training.trainer import mean_loss

    plain = network.get_base_model() if hasattr(network, "get_base_model") else network
    found: dict[str, float] = {}
    chunks = [records[i : i + 32] for i in range(0, len(records), 32)]
    if "accuracy" in metrics:
        found["accuracy"] = score(answer(plain, processor, records), [str(r.answer) for r in records]).share
    if "loss" in metrics:
        collate = Collator(processor)
        found["loss"] = float(mean_loss(plain, (collate(chunk) for chunk in chunks)))
    if "anchors" in metrics or "precision" in metrics:
        prompts = Collator(processor, prompt_only=True)
        if "anchors" in metrics:
            anchored = [a for chunk in chunks for a in xf.explain_anchors(plain, prompts(chunk))]
            found["anchors"] = sum(map(len, anchored)) / len(anchored)
        if "precision" in metrics:
            threshold = getattr(xf.fusion_of(plain), "threshold", 0.0)
            result = anchor_precision(plain, processor, records, prompts(records), threshold)
            copied = result.copied_words if threshold < 1 else 0
            found["precision"] = result.copied_hits / copied if copied else float("nan")
    return {name: found[name] for name in metrics}


def _start(model: str | None, recipe: Any, device: str) -> tuple[Any, Any]:
    """The model that every value starts from: the one that is named, the recipe's, or the embedded one."""
    from crossfuse.loading import load_model

    name = model or (None if recipe is None else recipe.model)
    if model is None and recipe is not None and recipe.compose is not None:
        raise ValueError("a sweep takes no recipe that composes its model; save the composed model and give --model")
    return load_model(name, device, whole=True)


def _train(network: Any, processor: Any, recipe: Any, data: str | None) -> Any:
    from crossfuse.cli.explain import read_data
    from crossfuse.data.collate import Collator
    from crossfuse.fusions.anchors.alignment import AlignedCollator
    from crossfuse.training.trainer import fine_tune, prepare_trainable

    trained = prepare_trainable(network, recipe)
    if data is None and recipe.data:
        from crossfuse.training.start import collator_for, open_sources

        fine_tune(trained, open_sources(recipe.data), collator_for(recipe, processor), recipe)
        return trained
    if recipe.steps is None:
        raise ValueError(f"a sweep trains for a number of steps, the recipe has epochs={recipe.epochs:g}; set steps")
    count = recipe.steps * recipe.batch_size * recipe.accumulation
    records = read_data(data or "scenes", count, split="train")
    collator: Any = Collator(processor)
    if recipe.alignment_weight:
        collator = AlignedCollator(collator)
    fine_tune(trained, records, collator, recipe)
    return trained


def _recipe(source: str) -> Any:
    from crossfuse.training.recipe import Recipe
    from crossfuse.training.recipe_files import load_recipe

    return Recipe() if source == "default" else load_recipe(source)


def _value(text: str) -> Any:
    try:
        return json.loads(text.strip())
    except ValueError:
        return text.strip()
