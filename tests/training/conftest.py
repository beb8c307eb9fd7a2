"""The folder itself on the path (`paper_models`), and the one of the data formats (`format_files`)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1] / "data"))
