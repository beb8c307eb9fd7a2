"""Colours and markers of the charts: told apart in print and by colour-blind readers."""

from __future__ import annotations

from typing import Any

# Okabe and Ito's palette, without its yellow, which is too pale for lines on white.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def line_style(index: int) -> dict[str, Any]:
    """Colour and marker of the index-th line; they repeat after seven."""
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
