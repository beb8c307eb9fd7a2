"""The runs of a comparison, found in folders and put in order: one row a model, with one run or one a seed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crossfuse.evaluation.contenders import contenders
from crossfuse.evaluation.runs import RUN, SCORES, read_run


@dataclasses.dataclass(frozen=True)
class ModelRuns:
    """One row of a comparison: one run, or one a seed."""

    name: str
    folders: Sequence[Path]

    @property
    def descriptions(self) -> list[dict[str, Any]]:
        """run.json of each folder."""
        return [read_run(folder) for folder in self.folders]


def find_runs(paths: Sequence[Path]) -> list[ModelRuns]:
    """Runs of the given folders: runs themselves, folders of runs, and comparisons of fusions (one run a seed).

    Runs of one name with different seeds are one model. `ValueError` where a folder holds none, or two runs share a
    name.
    """
    grouped: dict[str, list[tuple[dict[str, Any], Path]]] = {}
    for path in paths:
        if not path.is_dir():
            raise ValueError(f"no such folder: {path}; give folders that crossfuse evaluate wrote")
        own = [path] if (path / RUN).is_file() else sorted(p.parent for p in path.glob(f"*/{RUN}"))
        own = own or sorted(p.parent for p in path.glob(f"*/seed-*/{RUN}"))
        finished = [folder for folder in own if (folder / SCORES).is_file()]
        if not finished:
            raise ValueError(f"{path} holds no finished run ({RUN} and {SCORES}); run crossfuse evaluate first")
        for folder in finished:
            description = read_run(folder)
            grouped.setdefault(str(description["name"]), []).append((description, folder))
    for name, runs in grouped.items():
        seeds = [description.get("seed") for description, _ in runs]
        if len(runs) > 1 and (None in seeds or len(set(seeds)) < len(seeds)):
            places = ", ".join(str(folder) for _, folder in runs)
            raise ValueError(f"{len(runs)} runs are called {name!r} ({places}); evaluate them as NAME=MODEL")
    # The usual order of fusions, and behind them the others as they were given; thresholds of one model from the
    # highest, which copies least.
    known, first = list(contenders()), {name: place for place, name in enumerate(grouped)}

    def place(name: str) -> tuple[int, int, float]:
        swept = grouped[name][0][0].get("swept")
        if swept is None:
            return (known.index(name) if name in known else len(known)), first[name], 0.0
        first_of_it = next(
            n for n, [(run, _), *_] in grouped.items() if (run.get("swept") or {}).get("of") == swept["of"]
        )
        return len(known), first[first_of_it], -float(swept["threshold"])

    order = sorted(grouped, key=place)
    return [ModelRuns(name, [folder for _, folder in sorted(grouped[name], key=_seed)]) for name in order]


def _seed(run: tuple[dict[str, Any], Path]) -> int:
    seed = run[0].get("seed")
    return -1 if seed is None else int(seed)


def with_baseline(models: Sequence[ModelRuns], name: str | None) -> list[ModelRuns]:
    """The models with the baseline first: the one of that name, else the first. `ValueError` with the nearest name."""
    from crossfuse.fusion import nearest

    if name is None:
        plain = next((m for m in models if m.name == "insertion"), models[0])
        return [plain, *(m for m in models if m is not plain)]
    known = {m.name: m for m in models}
    if name not in known:
        raise ValueError(f"no run is called {name!r}{nearest(name, known)}; runs: {', '.join(known)}")
    return [known[name], *(m for m in models if m.name != name)]


def training_logs(model: ModelRuns) -> list[dict[str, Any]]:
    """Lines of the first seed's training log, where the run was trained here."""
    path = model.folders[0] / "training" / "log.jsonl"
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
