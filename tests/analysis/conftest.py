"""The tiny Qwen2.5-VL of the anchor tests on the path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "fusions" / "anchors"))
