"""Writing of finished files: a reader never sees half of one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from crossfuse.storage import replace_file


def write_bytes(path: str | os.PathLike[str], data: bytes) -> Path:
    """Write `data` to a temporary file beside `path`, then rename it. Parent directories are made.

    Raises `OSError` where the directory cannot be written; nothing is left behind then.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_file(target, data)
    return target


def write_json(path: str | os.PathLike[str], value: Any) -> Path:
    """Write `value` as indented JSON through `write_bytes`; NaN and infinity are refused (`ValueError`)."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    return write_bytes(path, (text + "\n").encode("utf-8"))
