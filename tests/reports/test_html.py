"""The report page: whole, self-contained, escaped, written at once."""

import base64
import io
import re
from html.parser import HTMLParser

import pytest
from PIL import Image

from crossfuse.reports import files
from crossfuse.reports.html import ReportPage


def png() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (2, 2), "red").save(buffer, format="PNG")
    return buffer.getvalue()


def page() -> ReportPage:
    report = ReportPage("A <title> & more")
    report.heading("Scores")
    report.paragraph("<script>alert(1)</script>")
    report.paragraph("small print", note=True)
    report.bullets(["one", "two & three"])
    report.table(["name", "share"], [["a<b", "50 %"]], caption="of 10 questions")
    report.figure(png(), caption='what is "this"?')
    report.gallery([(png(), "left"), (png(), "right")])
    report.code("crossfuse demo")
    return report


class Tags(HTMLParser):
    VOID = frozenset({"meta", "img", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_page_is_well_formed_and_loads_nothing():
    tags = Tags()
    tags.feed(page().render())
    assert tags.open == []
    links = [value for _, name, value in tags.attributes if name in ("src", "href", "srcset")]
    assert len(links) == 3
    assert all(link.startswith("data:image/png;base64,") for link in links)
    assert not re.search(r"@import|url\(|https?://", page().render())


def test_pictures_are_inlined_byte_for_byte():
    (first, *_) = re.findall(r"base64,([^\"]+)", page().render())
    assert base64.b64decode(first) == png()


def test_text_of_users_is_escaped():
    text = page().render()
    assert "<script>" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "<td>a&lt;b</td>" in text
    assert 'alt="what is &quot;this&quot;?"' in text


def test_light_and_dark_are_both_styled():
    assert "prefers-color-scheme: dark" in page().render()


def test_wrong_cells_and_pictures_are_refused():
    report = ReportPage("x")
    with pytest.raises(ValueError, match="needs 2 cells; got 1"):
        report.table(["a", "b"], [["only"]])
    with pytest.raises(ValueError, match="PNG"):
        report.figure(b"GIF89a", caption="no")


def test_a_failed_write_leaves_the_old_page(tmp_path, monkeypatch):
    target = tmp_path / "report.html"
    target.write_text("old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        page().write(target)
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_write_makes_parents(tmp_path):
    path = page().write(tmp_path / "a" / "b" / "report.html")
    assert path.read_text(encoding="utf-8") == page().render()


def test_json_refuses_nan(tmp_path):
    with pytest.raises(ValueError, match="Out of range"):
        files.write_json(tmp_path / "x.json", {"score": float("nan")})
    assert not (tmp_path / "x.json").exists()
