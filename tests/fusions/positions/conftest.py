"""The folder of the tiny Qwen2.5-VL models on the path: `tiny_qwen`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "anchors"))
