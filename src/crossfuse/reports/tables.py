"""One table, written as Markdown, CSV, JSON or LaTeX."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from crossfuse.reports.files import write_bytes

Cell = str | int | float | bool | None

_LATEX = {"&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}",
          "^": r"\textasciicircum{}", "\\": r"\textbackslash{}", "−": "$-$", "–": "--", "×": r"$\times$",
          "≥": r"$\geq$", "≤": r"$\leq$", "τ": r"$\tau$", "Δ": r"$\Delta$", "±": r"$\pm$"}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Table:
    """Named columns and rows of plain values. None and NaN are empty cells; CSV and JSON keep full precision.

    Raises `ValueError` for a row of another length than the columns.
    """

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row of this table needs {len(self.columns)} cells; got {len(row)}: {list(row)}")

    def joined(self, other: Table) -> Table:
        """The rows of both; their columns must be equal (`ValueError`)."""
        if list(self.columns) != list(other.columns):
            raise ValueError(f"tables of different columns: {list(self.columns)} and {list(other.columns)}")
        return dataclasses.replace(self, rows=[*self.rows, *other.rows])

    def texts(self) -> list[list[str]]:
        """Cells as people read them: four significant digits, thousands apart."""
        return [[shown(cell) for cell in row] for row in self.rows]

    def to_markdown(self) -> str:
        """A pipe table (GitHub's), numbers to the right."""
        texts = [[_piped(cell) for cell in row] for row in self.texts()]
        head = [_piped(column) for column in self.columns]
        widths = [max([3, len(head[i]), *(len(row[i]) for row in texts)]) for i in range(len(head))]
        right = [self._is_numeric(i) for i in range(len(head))]
        lines = [_line(head, widths, right)]
        rule = ["-" * (w - 1) + ":" if r else "-" * w for w, r in zip(widths, right, strict=True)]
        lines.append("| " + " | ".join(rule) + " |")
        lines += [_line(row, widths, right) for row in texts]
        if self.caption:
            lines += ["", self.caption]
        return "\n".join(lines) + "\n"

    def to_csv(self) -> str:
        """RFC 4180 with line feeds."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([["" if _empty(cell) else cell for cell in row] for row in self.rows])
        return text.getvalue()

    def to_json(self) -> str:
        """Name, caption, columns and one object a row; empty cells are null."""
        rows = [{c: None if _empty(v) else v for c, v in zip(self.columns, row, strict=True)} for row in self.rows]
        value = {"name": self.name, "caption": self.caption, "columns": list(self.columns), "rows": rows}
        return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def to_latex(self) -> str:
        """A tabular of booktabs, with caption and label where there is a caption."""
        align = "".join("r" if self._is_numeric(i) else "l" for i in range(len(self.columns)))
        body = [" & ".join(map(_latex, row)) + r" \\" for row in self.texts()]
        tabular = [
            rf"\begin{{tabular}}{{{align}}}", r"\toprule", " & ".join(map(_latex, self.columns)) + r" \\", r"\midrule",
            *body, r"\bottomrule", r"\end{tabular}",
        ]  # fmt: skip
        if self.caption:
            label = "".join(c if c.isalnum() else "-" for c in self.name)
            tabular = [
                r"\begin{table}", r"\centering", *tabular, rf"\caption{{{_latex(self.caption)}}}",
                rf"\label{{tab:{label}}}", r"\end{table}",
            ]  # fmt: skip
        return "% needs \\usepackage{booktabs}\n" + "\n".join(tabular) + "\n"

    def _is_numeric(self, column: int) -> bool:
        values = [row[column] for row in self.rows if not _empty(row[column])]
        return bool(values) and all(isinstance(v, int | float) or str(v)[:1] in "0123456789+-−±–" for v in values)


FORMATS: dict[str, Callable[[Table], str]] = {
    ".md": Table.to_markdown,
    ".csv": Table.to_csv,
    ".json": Table.to_json,
    ".tex": Table.to_latex,
}


def write_table(table: Table, path: str | os.PathLike[str]) -> Path:
    """Write in the format of the file's ending. `ValueError` for an unknown one."""
    ending = Path(path).suffix
    if ending not in FORMATS:
        raise ValueError(f"{path}: tables are written as {', '.join(FORMATS)}; got {ending or 'no ending'}")
    return write_bytes(path, FORMATS[ending](table).encode("utf-8"))


def write_all(table: Table, folder: str | os.PathLike[str]) -> list[Path]:
    """The table in every format, named after it."""
    return [write_table(table, Path(folder) / f"{table.name}{ending}") for ending in FORMATS]


def shown(cell: Cell) -> str:
    """A cell as text: "–" for none, four significant digits for numbers with a fraction."""
    if _empty(cell):
        return "–"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}"
    if isinstance(cell, float):
        if cell.is_integer() and abs(cell) >= 10:
            return f"{int(cell):,}"
        return f"{cell:,.1f}" if abs(cell) >= 1000 else f"{cell:.4g}"
    return str(cell)


def _empty(cell: Cell) -> bool:
    return cell is None or (isinstance(cell, float) and math.isnan(cell))


def _line(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    padded = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(cells, widths, right, strict=True)]
    return "| " + " | ".join(padded) + " |"


def _piped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)
