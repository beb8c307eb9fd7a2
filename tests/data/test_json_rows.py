"""JSON files by their bytes: equal to what `json` reads, whatever the strings hold, in little memory."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from format_files import human
from hypothesis import given, settings
from hypothesis import strategies as st

from crossfuse.data.formats import json_rows
from crossfuse.data.formats.json_rows import JsonRows, iter_json

_TEXT = st.text(st.sampled_from('\\"{}[],: aé\n'), max_size=8)
_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=8,
)
_ROW = st.dictionaries(_TEXT, _VALUE, min_size=1, max_size=3) | st.lists(_TEXT, min_size=1)
_ROWS = st.lists(_ROW, min_size=1, max_size=5)


@given(rows=_ROWS, chunk=st.sampled_from([1, 2, 3, 7, 64]), indent=st.sampled_from([None, 2]), ascii=st.booleans())
@settings(max_examples=60, deadline=None)
def test_rows_equal_what_json_reads(tmp_path_factory, rows, chunk, indent, ascii):
    folder = tmp_path_factory.mktemp("rows")
    whole = json_rows._CHUNK
    json_rows._CHUNK = chunk
    try:
        array, lines = folder / "a.json", folder / "a.jsonl"
        array.write_text(json.dumps(rows, indent=indent, ensure_ascii=ascii), encoding="utf-8")
        lines.write_text("\n".join(json.dumps(row, ensure_ascii=ascii) for row in rows), encoding="utf-8")
        for path in (array, lines):
            assert list(JsonRows(path)) == rows
            assert [item["row"] for item in iter_json([path])] == rows
    finally:
        json_rows._CHUNK = whole


def test_s4_the_index_of_a_file_with_seeks_is_no_row(tmp_path):
    path = tmp_path / "a_with_seeks.jsonl"
    path.write_text('[{"role": "user"}]\n[{"role": "user", "n": 2}]\n[0, 19]\n')
    assert len(JsonRows(path)) == 2


def test_a_byte_order_mark_and_blank_lines_are_passed_over(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf \n[{"a": 1},\n {"a": 2}]\n')
    assert list(JsonRows(path)) == [{"a": 1}, {"a": 2}]
    path = tmp_path / "b.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n{"a": 2}\r\n')
    assert list(JsonRows(path)) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ('[{"a": 1}, {"a"', "breaks off inside the record that starts at byte 11"),
        ('[{"a": 1}', "breaks off before its closing bracket"),
        ("hello", "begins with 'h'; a JSON array or JSON lines"),
    ],
)
def test_what_is_no_json_is_told(tmp_path, content, message):
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        JsonRows(path)


def test_a_broken_row_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": \n')
    rows = JsonRows(path)
    assert rows[0] == {"a": 1}
    with pytest.raises(ValueError, match=r"a\.jsonl, row 1 \(byte 9\): no valid JSON"):
        rows[1]
    with pytest.raises(IndexError):
        rows[2]
    assert pickle.loads(pickle.dumps(rows))[-2] == {"a": 1}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from Linux's /proc")
def test_a_million_records_are_opened_in_little_memory(tmp_path):
    """A JSON array of a million records and 200 MB: 16 bytes a record and a few MB of working space, in all below 1 GB.

    `benchmarks/bench_million_records.py` measures the same with records of LLaVA's length.
    """
    path = tmp_path / "million.json"
    row = json.dumps({"id": "x", "image": "coco/a.jpg", "conversations": human('<image>\nWhat is "this"?', "That {}.")})
    with path.open("w") as file:
        file.write("[" + row)
        for _ in range(999):
            file.write((",\n" + row) * 1001)
        file.write("]")
    # Not getrusage: its maximum is inherited from the process that starts this one.
    script = (
        "import sys\n"
        "from crossfuse.data.formats import load_records\n"
        "peak = lambda: int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
        "before = peak()\n"
        "data = load_records(sys.argv[1])\n"
        "assert len(data) == 1_000_000 and data[999_999].id == data[-1].id == 'x'\n"
        "print(peak() - before, peak())\n"
    )
    made = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, check=True, text=True)
    grown, peak = (1024 * int(number) for number in made.stdout.split())
    assert path.stat().st_size > 150e6
    assert grown < 100e6
    assert peak < 1e9
