"""A report as one HTML file: pictures inlined, nothing loaded from elsewhere, readable in light and dark."""

from __future__ import annotations

import base64
import html
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from crossfuse.reports.files import write_bytes

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2126; --page: #ffffff; --soft: #5b6670; --line: #d8dee3; --band:
#f3f6f8;
  --accent: #00695c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8eb; --page: #14181b; --soft: #a3adb5; --line:
#343c42;
  --band: #1d2327; --accent: #4db6ac; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 2rem 1.25rem 4rem; background: var(--page); color:
var(--ink);
  font: 16px/1.55 system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; }
h1 { font-size: 1.8rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .5rem; padding-top: .75rem; border-top: 1px solid var(--line); }
p, ul { max-width: 50rem; }
p.note { color: var(--soft); font-size: .92rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: .75rem 0; font-variant-numeric: tabular-nums; }
caption { caption-side: bottom; text-align: left; color: var(--soft); font-size: .9rem; padding-top: .5rem; }
th, td { padding: .4rem .7rem; text-align: right; vertical-align: top; border-bottom: 1px solid var(--line); }
thead th { vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
thead th { border-bottom: 2px solid var(--accent); }
td { min-width: 4.5rem; }
tbody tr:nth-child(even) { background: var(--band); }
table.compact { font-size: .86rem; }
table.compact td, table.compact th { padding: .3rem .4rem; min-width: 0; }
td.text { text-align: left; }
table.compact td { white-space: nowrap; }
.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(24rem, 100%), 1fr)); gap: 1rem;
} figure { margin: 1rem 0; }
.gallery figure { margin: 0; }
figure img { display: block; max-width: 100%; height: auto; border-radius: 6px; background: #ffffff; }
figcaption { color: var(--soft); font-size: .92rem; padding-top: .35rem; }
.example { display: flex; flex-wrap: wrap; gap: 1.25rem; padding: 1rem 0; border-bottom: 1px solid var(--line); }
.example img { width: 12rem; height: auto; align-self: flex-start; border-radius: 6px; image-rendering: auto; }
.example > div { flex: 1 1 20rem; }
.example p { margin: 0 0 .35rem; }
ul.answers { list-style: none; margin: .25rem 0 0; padding: 0; columns: 15rem; }
ul.answers li { break-inside: avoid; padding: .1rem 0; font-size: .92rem; }
ul.answers span { font-size: .8rem; color: var(--soft); }
ul.answers li.right span { color: var(--accent); font-weight: 600; }
code, pre { font: .9rem/1.5 ui-monospace, "Cascadia Mono", Menlo, Consolas, monospace; }
pre { overflow-x: auto; background: var(--band); padding: .75rem 1rem; border-radius: 6px; }
"""


class ReportPage:
    """Collects the parts of a report in reading order; `write` makes the file.

    Every text is escaped: answers and prompts from data sets may hold anything.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._parts: list[str] = []

    def heading(self, text: str) -> None:
        """Start a section."""
        self._parts.append(f"<h2>{html.escape(text)}</h2>")

    def paragraph(self, text: str, *, note: bool = False) -> None:
        """Add a paragraph; `note` prints it smaller and paler."""
        self._parts.append(f"<p{' class=note' if note else ''}>{html.escape(text)}</p>")

    def bullets(self, items: Iterable[str]) -> None:
        """Add a list of points."""
        self._parts.append("<ul>" + "".join(f"<li>{html.escape(item)}</li>" for item in items) + "</ul>")

    def code(self, text: str) -> None:
        """Add text in a fixed-width block, as a command line to copy."""
        self._parts.append(f"<pre>{html.escape(text)}</pre>")

    def table(
        self, columns: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str = "", compact: bool = False
    ) -> None:
        """Add a table; every row has as many cells as there are columns (`ValueError` otherwise).

        compact: for many columns of numbers: smaller, and no cell is broken into lines.
        """
        head = "".join(f"<th scope=col>{html.escape(column)}</th>" for column in columns)
        body = []
        for row in rows:
            if len(row) != len(columns):
                raise ValueError(f"a row of this table needs {len(columns)} cells; got {len(row)}: {list(row)}")
            body.append("<tr>" + "".join(f"<td{_kind(cell)}>{html.escape(cell)}</td>" for cell in row) + "</tr>")
        below = f"<caption>{html.escape(caption)}</caption>" if caption else ""
        self._parts.append(
            f"<div class=scroll><table{' class=compact' if compact else ''}>{below}<thead><tr>{head}</tr></thead>"
            f"<tbody>{''.join(body)}</tbody></table></div>"
        )

    def figure(self, png: bytes, *, caption: str) -> None:
        """Add one PNG picture with its caption, which serves as the text for screen readers too."""
        self._parts.append(_figure(png, caption))

    def gallery(self, pictures: Iterable[tuple[bytes, str]]) -> None:
        """Add several PNG pictures with their captions, side by side where there is room."""
        self._parts.append(f"<div class=gallery>{''.join(_figure(png, caption) for png, caption in pictures)}</div>")

    def example(
        self, png: bytes | None, question: str, reference: str, answers: Sequence[tuple[str, str, bool]]
    ) -> None:
        """Add one question with its picture, the reference and (who, answer, whether it is right) of each."""
        picture = ""
        if png is not None:
            data = base64.b64encode(png).decode("ascii")
            picture = f'<img alt="{html.escape(question)}" src="data:image/png;base64,{data}">'
        said = "".join(
            f"<li class={'right' if right else 'wrong'}><b>{html.escape(who)}</b> {html.escape(answer) or '(nothing)'}"
            f" <span>{'right' if right else 'wrong'}</span></li>"
            for who, answer, right in answers
        )
        self._parts.append(
            f"<div class=example>{picture}<div><p><b>{html.escape(question)}</b></p>"
            f"<p class=note>{html.escape(reference)}</p><ul class=answers>{said}</ul></div></div>"
        )

    def render(self) -> str:
        """The whole page as HTML text."""
        title = html.escape(self._title)
        return (
            f"<!doctype html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n"
            f'<meta name=viewport content="width=device-width, initial-scale=1">\n<title>{title}</title>\n'
            f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
            + "\n".join(self._parts)
            + "\n</body>\n</html>\n"
        )

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the page (to a temporary name first, then renamed)."""
        return write_bytes(path, self.render().encode("utf-8"))


def _kind(cell: str) -> str:
    """Sentences are set to the left, unlike numbers and words."""
    return " class=text" if len(cell) > 40 else ""


def _figure(png: bytes, caption: str) -> str:
    if not png.startswith(b"\x89PNG"):
        raise ValueError(f"pictures of a report are PNG files; got one that starts with {png[:4]!r}")
    data = base64.b64encode(png).decode("ascii")
    text = html.escape(caption)
    return f'<figure><img alt="{text}" src="data:image/png;base64,{data}"><figcaption>{text}</figcaption></figure>'
