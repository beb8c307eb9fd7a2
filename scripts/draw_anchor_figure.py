"""Draws docs/images/anchors.png: the algorithm of text anchors on a picture of six patches and a prompt of five words.

python scripts/draw_anchor_figure.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyBboxPatch, Polygon, Rectangle

GREEN, BLUE, GREY = "#1a9850", "#dbe9f6", "#f0f0f0"
WORDS = ["is", "the", "red", "circle", "left", "of", "the", "star", "?"]
COPIES = {0: ["circle", "red"], 5: ["star"]}  # patch -> copies behind it: the later word stands closer
TARGET = Path(__file__).parents[1] / "docs" / "images" / "anchors.png"


def token(axes: Any, x: float, y: float, text: str, fill: str, edge: str = "#666666", width: float = 0.92) -> None:
    box = FancyBboxPatch((x + 0.04, y), width - 0.08, 0.8, boxstyle="round,pad=0,rounding_size=0.12", fc=fill, ec=edge)
    axes.add_patch(box)
    colour = GREEN if edge == GREEN else "black"
    axes.text(x + width / 2, y + 0.4, text, ha="center", va="center", fontsize=10.5, color=colour)


def main() -> None:
    figure = Figure(figsize=(14.5, 4.3), dpi=110, layout="constrained")
    axes = figure.subplots()
    axes.set_xlim(-0.2, 19.4)
    axes.set_ylim(-0.35, 5.55)
    axes.set_aspect("equal")
    axes.axis("off")

    axes.text(0, 5.2, "image: six patches", fontsize=11, weight="bold")
    for patch in range(6):
        x, y = patch % 3 * 1.1, 3.9 - patch // 3 * 1.1
        axes.add_patch(Rectangle((x, y), 1.1, 1.1, fc="white", ec="#999999"))
        axes.text(x + 0.07, y + 0.07, f"I{patch + 1}", fontsize=8.5, color="#777777")
    axes.add_patch(Circle((0.55, 4.5), 0.38, fc="#d73027", ec="none"))
    star = [(2.75, 3.82), (2.87, 3.5), (3.2, 3.5), (2.94, 3.3), (3.04, 2.98), (2.75, 3.17)]
    star += [(2 * 2.75 - x, y) for x, y in star[:0:-1]]
    axes.add_patch(Polygon(star, fc="#4575b4", ec="none"))

    axes.text(
        5, 5.2, "best image token of each word, kept where the cosine reaches τ = 0.12", fontsize=11, weight="bold"
    )
    found = [
        ("red", "I1", 0.21),
        ("circle", "I1", 0.17),
        ("star", "I6", 0.19),
        ("left", "I4", 0.05),
        ("is", "I2", 0.02),
    ]
    for row, (word, patch, cosine) in enumerate(found):
        kept = cosine >= 0.12
        axes.text(
            5.2, 4.6 - 0.45 * row, f"{word:8}→ {patch}   cos {cosine:.2f}   {'copied' if kept else 'not copied'}",
            fontsize=10.5, family="monospace", color=GREEN if kept else "#888888",
        )  # fmt: skip

    axes.text(0, 1.95, "before", fontsize=11, weight="bold")
    axes.text(0, 0.45, "after", fontsize=11, weight="bold")
    for y, copies in ((1.62, {}), (0.1, COPIES)):
        x = 1.3
        for patch in range(6):
            token(axes, x, y, f"I{patch + 1}", BLUE)
            x += 0.92
            for word in copies.get(patch, ()):
                token(axes, x, y, word, "#e5f5e0", GREEN)
                x += 0.92
        x += 0.12
        for word in WORDS:
            token(axes, x, y, word, GREY)
            x += 0.92
    axes.text(19.2, -0.25, "copies in green; the prompt itself stays as it was", ha="right", fontsize=9.5, color=GREEN)
    figure.savefig(TARGET)
    print(TARGET)


if __name__ == "__main__":
    main()
