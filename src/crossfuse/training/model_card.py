"""The README.md of an export: what was trained, on what, with which settings, and how well it does."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from crossfuse.training.recipe import SECTIONS, DataSource, Recipe

_LEFT_OUT = ("description", "tags", "best_epoch", "log_every", "workers")


def model_card(recipe: Recipe, run: Path, checkpoint: Path, adapter_only: bool, scores: tuple[Path, ...]) -> str:
    """Markdown with the hub's front matter. `checkpoint`: the folder of weights that is exported."""
    title = recipe.description or f"{recipe.fusion['name']} on {_base(recipe)}"
    parts = [
        _front_matter(recipe),
        f"# {title}",
        f"Trained with crossfuse {version('crossfuse')}; fusion: `{json.dumps(recipe.fusion)}`.",
        "## Use",
        _use(adapter_only),
        "## Scores",
        _scores(scores),
        "## Training",
        _training(run, checkpoint),
        "## Recipe",
        "`paper`: stated by the paper; `ours`: it does not state it; `-`: a default or a change of whoever trained it.",
        _recipe_table(recipe),
    ]
    return "\n\n".join(parts) + "\n"


def _base(recipe: Recipe) -> str:
    if recipe.compose is not None:
        return f"{recipe.compose.llm} and {recipe.compose.vision}"
    return recipe.model or "a model of the caller's"


def _front_matter(recipe: Recipe) -> str:
    bases = [recipe.compose.llm, recipe.compose.vision] if recipe.compose is not None else [recipe.model]
    hub = [name for name in bases if name and name.count("/") == 1 and not name.startswith((".", "/"))]
    files = (".json", ".jsonl", ".parquet")
    sets = [s.path for s in recipe.data if s.path.count("/") == 1 and not s.path.endswith(files)]
    lines = ["---", "library_name: transformers", "pipeline_tag: image-text-to-text"]
    if hub:
        lines += ["base_model:", *(f"- {name}" for name in hub)]
    if sets:
        lines += ["datasets:", *(f"- {name}" for name in dict.fromkeys(sets))]
    return "\n".join([*lines, "tags:", "- crossfuse", f"- {recipe.fusion['name']}", "---"])


def _use(adapter_only: bool) -> str:
    if adapter_only:
        load = (
            "from crossfuse.training.export import load_export\n\n"
            'model, processor = load_export("this folder")    # loads the base model, then what was trained'
        )
    else:
        load = (
            "import crossfuse as xf\nfrom transformers import AutoProcessor\n\n"
            'model = xf.from_pretrained("this folder")\nprocessor = AutoProcessor.from_pretrained("this folder")'
        )
    return f"```python\n{load}\n```"


def _scores(files: tuple[Path, ...]) -> str:
    rows = []
    for file in files:
        content = json.loads(file.read_text(encoding="utf-8"))
        for task, found in (content.get("tasks") or content).items():
            if not isinstance(found, dict) or not isinstance(found.get("metrics"), dict):
                continue
            shuffled = found.get("shuffled_images") or {}
            for name, metric in found["metrics"].items():
                own, other = _number(metric), _number(shuffled.get(name) or {})
                rows.append(
                    f"| {task} | {name} | {own} | {other} | {metric.get('n', '')} | {metric.get('scale', '')} |"
                )
    if not rows:
        return "None yet: `crossfuse evaluate` measures them, `crossfuse export --scores FILE` puts them here."
    head = "| task | metric | score | with shuffled images | n | scale |\n|---|---|---|---|---|---|"
    return "\n".join([head, *rows])


def _number(metric: dict[str, Any]) -> str:
    value = metric.get("value")
    return f"{value:.4g}" if isinstance(value, int | float) else "-"


def _training(run: Path, checkpoint: Path) -> str:
    from crossfuse.training.export import run_summary

    summary = run_summary(run)
    lines = [f"* weights: of `{checkpoint.name}`"]
    if summary:
        lines.append(
            f"* {summary['steps']:,} optimiser steps, {summary['samples']:,} samples, {summary['seconds']:,.0f} s, "
            f"{summary['trained_parameters']:,} trained parameters, ended: {summary['stopped']}"
        )
        if summary.get("losses"):
            lines.append(
                f"* training loss: {summary['losses'][0][1]:.4g} at first, {summary['losses'][-1][1]:.4g} at last"
            )
        if summary.get("validation"):
            step, loss = min(summary["validation"], key=lambda item: item[1])
            lines.append(f"* best validation loss: {loss:.4g} nats a token, after step {step:,}")
    return "\n".join(lines)


def _recipe_table(recipe: Recipe) -> str:
    rows = ["| setting | value | from |", "|---|---|---|"]
    values = recipe.model_dump(mode="json")
    sections = {section.title for section in SECTIONS if section is not DataSource}
    defaults = Recipe().model_dump(mode="json")
    for name, value in values.items():
        if name in _LEFT_OUT or (value == defaults.get(name) and _tag(recipe, name) == "-"):
            continue
        if name in ("data", "validation"):
            value = [{k: v for k, v in source.items() if v not in (None, False)} for source in value]
        inner = value if name in sections | {"fusion"} and isinstance(value, dict) else {"": value}
        for key, item in inner.items():
            full = f"{name}.{key}" if key else name
            if item is None:
                continue
            shown = json.dumps(item, ensure_ascii=False).replace("|", "\\|")
            rows.append(f"| `{full}` | `{shown}` | {_tag(recipe, full)} |")
    return "\n".join(rows)


def _tag(recipe: Recipe, name: str) -> str:
    """The most specific tag that covers a field."""
    while name:
        if name in recipe.tags:
            return recipe.tags[name]
        name = name.rpartition(".")[0]
    return "-"
