"""Sweeps: one field over several values, any metrics, each value only evaluated or trained anew.

AttAnchor's threshold table is ``sweep(field="threshold", values=[1, 0.16, 0.14, 0.12, 0.10, 0.08])``.
"""

from __future__ import annotations

import copy
import csv
import dataclasses
import io
from collections.abc import Callable, Sequence
from typing import Any

import torch

from crossfuse.fusion import Fusion, nearest
from crossfuse.training.recipe import Recipe

LOWER_IS_BETTER = {"loss"}
NEITHER_IS_BETTER = {"anchors"}


@dataclasses.dataclass(frozen=True)
class SweepTable:
    """One row a metric, one column a value of the field."""

    field: str
    values: tuple[Any, ...]
    metrics: dict[str, tuple[float, ...]]
    trained: bool

    def best(self, metric: str) -> list[int]:
        """Columns of the best value, ties included; none for counts and where a metric is NaN throughout."""
        row = [v for v in self.metrics[metric] if v == v]
        if not row or metric in NEITHER_IS_BETTER:
            return []
        target = min(row) if metric in LOWER_IS_BETTER else max(row)
        return [i for i, value in enumerate(self.metrics[metric]) if value == target]

    def to_csv(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([self.field, *self.values])
        for name, row in self.metrics.items():
            writer.writerow([name, *("" if value != value else f"{value:.6g}" for value in row)])
        return text.getvalue()

    def to_json(self) -> dict[str, list[float | None]]:
        """Metrics by name; None where there is no value (NaN)."""
        return {name: [None if v != v else v for v in row] for name, row in self.metrics.items()}

    def to_markdown(self) -> str:
        """A table with the best value of each row in bold."""
        lines = [f"| {self.field} | {' | '.join(map(str, self.values))} |", f"|---|{'---:|' * len(self.values)}"]
        for name, row in self.metrics.items():
            best = self.best(name)
            plain = ["–" if value != value else f"{value:.4g}" for value in row]
            cells = [f"**{cell}**" if i in best else cell for i, cell in enumerate(plain)]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        return "\n".join(lines) + "\n"

    def to_png(self) -> bytes:
        """One panel a metric, the best value marked."""
        from matplotlib.figure import Figure

        count = len(self.metrics)
        figure = Figure(figsize=(7.5, 1.0 + 1.9 * count), dpi=120, layout="constrained")
        panels = figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0]
        places = range(len(self.values))
        for axes, (name, row) in zip(panels, self.metrics.items(), strict=True):
            axes.plot(places, row, "o-", color="#2166ac")
            for place in self.best(name):
                axes.plot(place, row[place], "o", color="#1a9850", markersize=11)
                axes.annotate(
                    f"{row[place]:.4g}", (place, row[place]), textcoords="offset points", xytext=(0, 9), ha="center"
                )
            axes.set_ylabel(name)
            axes.margins(x=0.08, y=0.35)
            axes.spines[["top", "right"]].set_visible(False)
        panels[-1].set_xticks(list(places), [str(value) for value in self.values])
        panels[-1].set_xlabel(self.field)
        panels[0].set_title("each value trained anew" if self.trained else "evaluated only", loc="left")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        return buffer.getvalue()


def sweep(
    model: Any,
    fusion: Fusion,
    field: str,
    values: Sequence[Any],
    evaluate: Callable[[Any], dict[str, float]],
    *,
    recipe: Recipe | None = None,
    train: Callable[[Any, Recipe], Any] | None = None,
    progress: Callable[[int], None] | None = None,
) -> SweepTable:
    """Evaluate ``model`` with each of ``values`` of one field of the fusion, or of the recipe, in their order.

    model: unfused; every value gets a fresh copy. evaluate: takes the fused model, returns metrics by name. With
    ``recipe``, ``train(model, recipe)`` trains each copy first and returns what is evaluated.

    Raises:
        ValueError: a field that neither has, a field of the recipe without one, or metrics that differ between values.
    """
    of_fusion = {f.name for f in dataclasses.fields(fusion)}
    recipe_fields = set(Recipe.field_names())
    of_recipe = recipe_fields if recipe is not None else set()
    if field not in of_fusion | of_recipe:
        hint = nearest(field, sorted(of_fusion | recipe_fields))
        if field in recipe_fields:
            hint = "; fields of a recipe need --train"
        raise ValueError(f"{fusion.name} has no field {field!r}{hint}")
    if not values:
        raise ValueError("a sweep needs at least one value")
    # Every variant is made before the first is run: a bad last value should not cost the ones before it.
    variants = [dataclasses.replace(fusion, **{field: v}) if field in of_fusion else fusion for v in values]
    recipes = [recipe if recipe is None or field in of_fusion else recipe.changed({field: v}) for v in values]
    rows: list[dict[str, float]] = []
    for variant, chosen in zip(variants, recipes, strict=True):
        rows.append(_one(model, variant, chosen, train, evaluate))
        if progress is not None:
            progress(1)
    if any(row.keys() != rows[0].keys() for row in rows):
        raise ValueError("every value of a sweep must be measured by the same metrics")
    metrics = {name: tuple(float(row[name]) for row in rows) for name in rows[0]}
    return SweepTable(field, tuple(values), metrics, recipe is not None)


def _one(model: Any, fusion: Fusion, recipe: Recipe | None, train: Any, evaluate: Any) -> dict[str, float]:
    from crossfuse.api import fuse

    network = fuse(copy.deepcopy(model), fusion)
    if recipe is not None:
        if train is None:
            raise ValueError("a sweep with a recipe needs a function that trains")
        torch.manual_seed(recipe.seed)
        network = train(network, recipe)
    network.eval()
    with torch.no_grad():
        found: dict[str, float] = evaluate(network)
    return found
