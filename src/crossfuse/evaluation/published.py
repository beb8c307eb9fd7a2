"""Published numbers of the two papers, for tables beside the user's own. Data: published.json."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable
from importlib.resources import files


@dataclasses.dataclass(frozen=True)
class PublishedRow:
    """Numbers of one model as its source prints them. values: by "TASK.METRIC" on that benchmark's usual scale."""

    model: str
    fusion: str
    source: str
    values: dict[str, float]


@functools.cache
def published_rows() -> tuple[PublishedRow, ...]:
    """All rows, AttAnchor's first."""
    text = files("crossfuse.evaluation").joinpath("published.json").read_text(encoding="utf-8")
    return tuple(PublishedRow(**row) for row in json.loads(text)["rows"])


@functools.cache
def published_thresholds() -> dict[str, dict[str, float]]:
    """AttAnchor's threshold table (TinyLLaVA-1B): metric -> threshold -> value; threshold 1 is the baseline."""
    text = files("crossfuse.evaluation").joinpath("published.json").read_text(encoding="utf-8")
    table: dict[str, dict[str, float]] = json.loads(text)["thresholds"]
    return table


def matching_rows(wanted: str, keys: Iterable[str]) -> list[PublishedRow]:
    """Rows with a value of one of `keys` ("TASK.METRIC"); `wanted` is "all", "none" or a part of the models' names.

    Raises `ValueError` where no row has such a name.
    """
    if wanted == "none":
        return []
    rows = [r for r in published_rows() if wanted == "all" or wanted.lower() in r.model.lower()]
    if not rows:
        known = ", ".join(dict.fromkeys(r.model for r in published_rows()))
        raise ValueError(f"no published row is called {wanted!r}; models: {known}")
    own = set(keys)
    return [row for row in rows if own & set(row.values)]
