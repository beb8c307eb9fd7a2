"""Golden files: hand-made records in each benchmark's published format, answers, and scores worked out by hand."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

from PIL import Image

GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(path.parent.name for path in GOLDEN.glob("*/expected.json"))


def expected(name):
    """{"split", "answers", "scores", "working"} of a benchmark."""
    return json.loads((GOLDEN / name / "expected.json").read_text(encoding="utf-8"))


def directory(name, tmp_path):
    """The benchmark's files; tables kept as JSON here are written as the Parquet files that they stand for."""
    if not list((GOLDEN / name).rglob("*.parquet.json")):
        return GOLDEN / name
    import pyarrow
    import pyarrow.parquet

    target = tmp_path / name
    shutil.copytree(GOLDEN / name, target)
    for source in target.rglob("*.parquet.json"):
        rows = json.loads(source.read_text(encoding="utf-8"))
        for row in rows:
            if row.get("image") == "PNG":
                row["image"] = {"bytes": _png(), "path": "0.png"}
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), source.with_suffix(""))
        source.unlink()
    return target


def _png():
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), "red").save(buffer, format="PNG")
    return buffer.getvalue()
