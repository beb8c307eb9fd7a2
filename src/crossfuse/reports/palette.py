"""Colours and markers of the charts: told apart in print and by colour-blind readers."""

from __future__ import annotations

from typing import Any

# Okabe and Ito's palette, without its yellow, which is too pale for lines on white.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", ":", "-.")


def line_style(index: int) -> dict[str, Any]:
    """Colour, marker and dashes of the index-th line; the dashes change after seven, and all repeat after 28."""
    turn, place = divmod(index, len(COLOURS))
    return {"color": COLOURS[place], "marker": MARKERS[place], "linestyle": DASHES[turn % len(DASHES)]}
