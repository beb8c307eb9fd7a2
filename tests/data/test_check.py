"""`crossfuse data check` and `show`: exactly what is wrong is listed."""

from __future__ import annotations

import io
import json
from itertools import pairwise

import numpy as np
import pytest
from format_files import human, picture, png, write_livecc, write_llava, write_video, write_vsft
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from crossfuse.cli.main import main
from crossfuse.data.check import check_data, histogram
from crossfuse.data.collate import Collator
from crossfuse.data.contact_sheet import contact_sheet
from crossfuse.data.formats import load_records
from crossfuse.data.records import Record


def row(id: str, image: str | None, question: str = "<image>\nwhat?", answer: str = "that") -> dict:
    return {"id": id, **({} if image is None else {"image": image}), "conversations": human(question, answer)}


@pytest.fixture
def s3(tmp_path):
    """Good, missing, truncated, a GIF named .jpg, 332 x 27, palette with transparency, turned by EXIF, 10 x 2100."""
    picture(0, (90, 60)).save(tmp_path / "good.jpg")
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "good.jpg").read_bytes()[:-200])
    picture(1, (90, 60)).save(tmp_path / "gif.jpg", format="GIF")
    picture(2, (332, 27)).save(tmp_path / "tiny.png")
    palette = picture(3, (60, 60)).quantize(8)
    palette.save(tmp_path / "palette.png", transparency=0)
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(4, (90, 60)).save(tmp_path / "turned.jpg", exif=exif)
    picture(5, (30, 6100)).save(tmp_path / "extreme.png")
    names = ["good.jpg", "gone.jpg", "cut.jpg", "gif.jpg", "tiny.png", "palette.png", "turned.jpg", "extreme.png"]
    return write_llava(tmp_path, [row(name.split(".")[0], name) for name in names])


def test_s3_check_lists_exactly_the_bad_images(s3, embedded):
    report = check_data(load_records(s3), embedded[1])
    assert [(fault.id, fault.kind) for fault in report.faults] == [
        ("gone", "missing file"),
        ("cut", "broken image"),
        ("tiny", "tiny image"),
        ("extreme", "extreme image"),
    ]
    assert report.notes == {"GIF named .jpg": 1}
    assert report.faults[2].reason.endswith("tiny.png is 332 x 27 pixels; a side is below 28")
    assert (report.rows, report.records, report.images, len(report.lengths)) == (8, 8, 8, 6)
    headers = check_data(load_records(s3), decode=False)
    assert [fault.id for fault in headers.faults] == ["gone", "tiny", "extreme"]  # a header does not tell of the rest


def test_s3_skip_mode_trains_on_the_rest(s3, embedded):
    data = load_records(s3, on_error="skip")
    assert [r.reason for r in data.rejected] == [f"file not found: {s3.parent / 'gone.jpg'}"]
    collator = Collator(embedded[1], on_bad_image="skip", min_side=28, keep=("id",))
    batch = collator(list(data))
    assert batch["id"] == ["good", "gif", "palette", "turned", "extreme"]
    assert collator.report.bad_image == ["cut", "tiny"]
    assert batch["pixel_values"].shape[0] == 5
    with pytest.raises(ValueError, match=r"record 'tiny': .*tiny\.png: the image is 332 x 27 pixels; each side"):
        Collator(embedded[1], min_side=28)([record for record in data if record.id == "tiny"])


def test_each_kind_of_fault_is_found(tmp_path, embedded):
    picture(0).save(tmp_path / "a.png")
    rows = [
        row("good", "a.png"),
        row("untagged", "a.png", "what is it?"),
        row("tag", None),
        row("empty", None, "hi", " "),
        {"id": "turns", "conversations": human("a", "b")[::-1]},
        {"id": "robot", "conversations": [{"from": "robot", "value": "a"}]},
        {"id": "open", "conversations": [*human("a", "b"), {"from": "human", "value": "c"}]},
        {"id": "keys", "talk": []},
        row("good", "a.png"),
        row("reserved", None, "what is <eos>?"),
        row("other", None, "fine?", "yes"),
    ]
    path = write_llava(tmp_path, rows)
    report = check_data(load_records(path, format="llava"), embedded[1])
    assert [(fault.row, fault.kind) for fault in report.faults] == [
        (1, "tag mismatch"),
        (2, "tag mismatch"),
        (3, "empty answer"),
        (4, "role error"),
        (5, "role error"),
        (6, "role error"),
        (7, "not a record"),
        (8, "duplicate"),
        (9, "reserved string"),
    ]
    assert report.faults[7].reason == "the same images and texts as row 0"
    assert report.notes == {"id that several records share": 1, "answer before any question, left out": 1}
    assert (report.records, report.without_images) == (8, 5)


def test_tokens_are_those_of_the_collators_batches(tmp_path, embedded):
    processor = embedded[1]
    data = load_records("scenes", limit=12)
    report = check_data(data, processor)
    assert not report.faults
    totals = Collator(processor)(list(data))["attention_mask"].sum(1).tolist()
    assert report.token_lengths()["total"].tolist() == totals
    assert report.to_dict()["tokens"]["image"]["histogram"] == [{"from": 64, "to": 64, "records": 12}]


def test_histogram_bins():
    assert histogram(np.array([0, 1, 2, 3, 4, 16])) == [
        (0, 0, 1), (1, 1, 1), (2, 3, 2), (4, 7, 1), (8, 15, 0), (16, 31, 1)
    ]  # fmt: skip
    assert histogram(np.array([3, 90]))[0] == (2, 3, 1)


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=30))
def test_every_value_lies_in_one_bin(values):
    bins = histogram(np.array(values))
    assert len(bins) <= 14
    assert [count for _, _, count in bins] == [sum(low <= v <= high for v in values) for low, high, _ in bins]
    assert sum(count for _, _, count in bins) == len(values)
    assert all(last + 1 == first for (_, last, _), (first, _, _) in pairwise(bins))


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["data", *arguments])
    return int(stopped.value.code or 0)


def test_check_on_the_command_line(s3, capsys):
    assert run("check", str(s3), "--no-lengths") == 1
    printed = capsys.readouterr().out
    assert "8 rows, 8 records (0 of text alone), 8 images" in printed
    assert "1  missing file\n" in printed
    assert "row 2 (cut): " in printed
    assert run("check", str(s3), "--no-lengths", "--min-side", "20", "--limit", "1") == 0
    assert capsys.readouterr().out.endswith("no faults\n")


def test_check_writes_json(tmp_path, capsys):
    path = write_vsft(tmp_path / "a.parquet")
    assert run("check", str(path), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["format"], report["records"], report["images"], report["answers"]) == ("llava-mix-vsft", 2, 3, 3)
    assert report["tokens"]["image"]["max"] == 128
    assert report["fault_counts"] == {}
    assert run("check", str(tmp_path / "gone.json")) == 2


def test_show_prints_records_and_writes_a_sheet(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    picture(0, (90, 60)).save(tmp_path / "a.png")
    path = write_llava(tmp_path, [row(f"r{i}", "a.png", answer="word " * 200) for i in range(4)])
    assert run("show", str(path), "-n", "2", "--first", "1") == 0
    printed = capsys.readouterr().out
    assert "r1 (row 1)\n" in printed
    assert "r3" not in printed
    assert "user      [image] what?" in printed
    assert "(999 characters)" in printed
    with Image.open("contact-sheet.png") as sheet:
        assert sheet.size[0] == 2 * 416 + 16
    assert run("show", str(path), "--first", "9") == 2
    assert run("show", str(path), "--out", "a.jpg") == 2


def test_a_sheet_holds_whatever_records_hold(tmp_path):
    video = write_video(tmp_path / "v.mp4", 3)
    write_livecc(tmp_path, [])
    records = [
        Record.of_question("many", "what? " * 60, "x" * 500, [png(i) for i in range(12)]),
        Record.of_question("none", "", "日本語 ünï"),
        Record.of_question("gone", "what?", "that", ["gone.png"]),
        Record(id="v", videos=[str(video)], messages=[{"role": "user", "content": [{"type": "video"}]}]),
    ]
    sheet = contact_sheet(records, columns=2)
    assert sheet.width == 2 * 416 + 16
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG")
    with pytest.raises(ValueError, match="at least one record"):
        contact_sheet([])
