"""One table in four formats: nothing is lost, nothing breaks the format."""

import csv
import io
import json
import re

import pytest

from crossfuse.reports.curves import train_and_validation
from crossfuse.reports.forest import forest_chart
from crossfuse.reports.html import ReportPage
from crossfuse.reports.palette import line_style
from crossfuse.reports.radar import radar_chart
from crossfuse.reports.tables import Table, write_all, write_table

ODD = Table(
    "odd",
    ["model", "score_1", "share"],
    [["CA_t+v | 50 %", 0.123456789, None], ["a\\b & {c}\nd", 12345, float("nan")], ["yes", True, 2.0]],
    caption="100 % of $ and #",
)


def test_markdown_has_one_cell_a_column_in_every_row():
    lines = [line for line in ODD.to_markdown().splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(ODD.rows)
    assert {len(re.split(r"(?<!\\)\|", line)) for line in lines} == {5}
    assert "0.1235" in lines[2]
    assert "12,345" in lines[3]


def test_csv_reads_back_with_full_precision():
    rows = list(csv.reader(io.StringIO(ODD.to_csv())))
    assert rows[0] == list(ODD.columns)
    assert rows[1] == ["CA_t+v | 50 %", "0.123456789", ""]
    assert rows[2] == ["a\\b & {c}\nd", "12345", ""]


def test_json_has_null_for_empty_cells():
    rows = json.loads(ODD.to_json())["rows"]
    assert rows[0] == {"model": "CA_t+v | 50 %", "score_1": 0.123456789, "share": None}
    assert rows[1]["share"] is None


def test_latex_escapes_every_special_character():
    text = ODD.to_latex()
    body = text[text.index("\\midrule") : text.index("\\bottomrule")]
    assert r"CA\_t+v | 50 \%" in body
    assert r"a\textbackslash{}b \& \{c\}" in body
    assert text.count("{") == text.count("}")
    assert r"\caption{100 \% of \$ and \#}" in text


def test_rows_of_another_length_and_unknown_endings_are_refused(tmp_path):
    with pytest.raises(ValueError, match="needs 2 cells; got 1"):
        Table("t", ["a", "b"], [["x"]])
    with pytest.raises(ValueError, match=r"\.md, \.csv, \.json, \.tex; got \.xls"):
        write_table(ODD, tmp_path / "t.xls")
    assert {p.suffix for p in write_all(ODD, tmp_path)} == {".md", ".csv", ".json", ".tex"}


def test_tables_join_where_their_columns_agree():
    assert len(ODD.joined(ODD).rows) == 6
    with pytest.raises(ValueError, match="different columns"):
        ODD.joined(Table("t", ["a"], []))


def test_radar_with_ranges_scales_each_spoke_and_prints_it():
    scores = {"a": {"mme": 1400.0, "bleu": 0.5, "pope": 80.0}, "b": {"mme": 1500.0, "bleu": 0.6, "pope": 85.0}}
    ranges = {"mme": (1300.0, 1500.0), "bleu": (0.4, 0.6), "pope": (75.0, 85.0)}
    (axes,) = radar_chart(scores, ranges=ranges).axes
    assert list(axes.lines[0].get_ydata()) == pytest.approx([0.5, 0.5, 0.5, 0.5])
    assert list(axes.lines[1].get_ydata()) == pytest.approx([1, 1, 1, 1])
    assert axes.get_xticklabels()[0].get_text() == "mme\n1.3e+03 to 1.5e+03"
    with pytest.raises(ValueError, match="between 1300 and 1500; 'a' has mme = 1200"):
        radar_chart({"a": scores["a"] | {"mme": 1200.0}}, ranges=ranges)


def test_difference_chart_draws_each_interval():
    rows = [("a", 2.0, 1.0, 3.0), ("b", -1.0, -2.0, 0.5), ("c", 0.0, None, None)]
    (axes,) = forest_chart(rows, title="t", unit="points").axes
    drawn = [list(line.get_xdata()) for line in axes.lines[1:]]
    assert drawn == [[1.0, 3.0], [2.0], [-2.0, 0.5], [-1.0], [0.0]]
    assert axes.lines[1].get_color() != axes.lines[3].get_color()


def test_a_run_keeps_its_colour_in_training_and_validation():
    curves = {"a": [(1, 3.0), (2, 2.0)], "b": [(1, 2.5), (2, 1.5)]}
    left, right = train_and_validation(curves, {"a": [(2, 2.2)]}).axes
    assert left.lines[0].get_color() == right.lines[0].get_color()
    assert list(right.lines[0].get_ydata()) == [2.2]


def test_twenty_lines_are_told_apart():
    styles = [tuple(sorted(line_style(i).items())) for i in range(20)]
    assert len(set(styles)) == 20


def test_examples_escape_what_models_say():
    page = ReportPage("t")
    page.example(None, "<b>?", "Reference: &", [("m", "<script>", False)])
    assert "<script>" not in page.render()
    assert "&lt;script&gt;" in page.render()
