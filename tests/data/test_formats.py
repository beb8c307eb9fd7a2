"""Every public format: its true shape becomes the same kind of record, and is told from the rows."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from format_files import (
    LLAVA,
    LLAVA_VIDEO,
    human,
    image,
    livecc_row,
    picture,
    text,
    write_finevision,
    write_livecc,
    write_llava,
    write_onevision,
    write_video,
    write_vsft,
)

from crossfuse.data.formats import FORMATS, load_records
from crossfuse.data.formats.base import Reading
from crossfuse.data.formats.tagged import turns_of, with_slots
from crossfuse.data.images import open_image
from crossfuse.data.records import Record, write_records


def said(record: Record) -> list[str]:
    """Each message with its slots in place: ``user: [image]What?``."""
    return [
        f"{m.role}: " + "".join(p.text if p.type == "text" else f"[{p.type}]" for p in m.content)
        for m in record.messages
    ]


def test_llava_instruct(tmp_path):
    data = load_records(write_llava(tmp_path))
    assert data.format.name == "llava"
    assert len(data) == 4
    assert said(data[0]) == [
        "user: [image]What are the colors of the bus?",
        "assistant: It is white and red.",
        "user: What feature is on its back?",
        "assistant: An advertisement.",
    ]
    assert said(data[1])[0] == "user: Describe the picture.[image]"
    assert said(data[2]) == ["user: How do I use the <video> tag?", "assistant: Like this: {x: [1]}."]
    assert said(data[3]) == ["user: [image][image]Which is <b>left</b>?", 'assistant: The "first".']
    assert data[3].images == (str(tmp_path / "a.jpg"), str(tmp_path / "b.jpg"))
    assert load_records(tmp_path / "llava.json", root="/other")[0].images == ("/other/coco/train2017/000000033471.jpg",)
    assert data[0].id == data[1].id == "000000033471"
    assert not data.notes


def test_llava_mix_vsft(tmp_path):
    data = load_records(write_vsft(tmp_path / "train-00000-of-00001.parquet"))
    assert data.format.name == "llava-mix-vsft"
    assert said(data[0])[:2] == ["user: Who wrote this book?[image]", "assistant: Donna Eden"]
    assert said(data[1])[0] == "user: [image]and[image]same?"
    # The index of a part, not its place, tells which image it is.
    pixels = [np.asarray(open_image(source)) for source in data[1].images]
    assert np.array_equal(pixels[0], np.asarray(picture(3)))
    assert np.array_equal(pixels[1], np.asarray(picture(2)))


def test_vsft_s2_images_without_a_part(tmp_path):
    row = {
        "messages": [{"role": "user", "content": [text("what?")]}, {"role": "assistant", "content": [text("that")]}],
        "images": [picture(1)],
    }
    path = write_vsft(tmp_path / "a.parquet", [row])
    data = load_records(path)
    assert said(data[0])[0] == "user: [image]what?"
    assert data.notes == {"image without an image part, placed first": 1}
    with pytest.raises(ValueError, match=r"row 0: 0 image part\(s\) but 1 image\(s\)"):
        load_records(path, missing_tag="raise")[0]
    row["messages"][0]["content"] = [image(0), image(1)]
    with pytest.raises(ValueError, match="asks for image 1 but there are 1"):
        load_records(write_vsft(tmp_path / "b.parquet", [row]))[0]


def test_finevision(tmp_path):
    path = write_finevision(tmp_path / "train.parquet")
    data = load_records(path)
    assert data.format.name == "finevision"
    assert said(data[2]) == [
        "user: [image][image]question 0?",
        "assistant: answer 0.",
        "user: question 1?",
        "assistant: answer 1.",
    ]
    assert data[0].meta["source"] == "ai2d_merged"
    assert data[0].meta["relevance_ratings"] == [5, 2]
    # The row rated 1 and 1 goes; a pair without a rating stays.
    rated = load_records(path, min_ratings={"relevance": 4})
    assert [said(record)[0] for record in rated] == ["user: question 0?", "user: [image][image]question 0?"]
    assert [len(record.messages) for record in rated] == [2, 4]
    assert [said(r) for r in load_records(path, streaming=True, min_ratings={"relevance": 4})] == [*map(said, rated)]
    with pytest.raises(ValueError, match=r"unknown rating 'relevence'.*relevance"):
        load_records(path, min_ratings={"relevence": 4})
    with pytest.raises(ValueError, match="min_ratings is for the format finevision"):
        load_records(write_vsft(tmp_path / "b.parquet"), min_ratings={"relevance": 4})


def test_llava_onevision(tmp_path):
    data = load_records(write_onevision(tmp_path / "train.parquet"))
    assert data.format.name == "llava-onevision"
    assert [said(record) for record in data] == [
        ["user: [image]What is it?", "assistant: A gradient."],
        ["user: [image]And this?", "assistant: Another."],
        ["user: 2 + 2?", "assistant: 4"],
    ]
    assert isinstance(data[0].images[0], bytes)
    assert data[2].meta == {"source": "text"}
    assert not data.notes


def test_llava_video(tmp_path):
    inside = write_video(tmp_path / "0_30_s_academic_v0_1/academic_source/Charades/RW587.mp4", 1)
    beside = write_video(tmp_path / "academic_source/Charades/Q04US.mp4", 1)
    data = load_records(write_llava(tmp_path, LLAVA_VIDEO, "0_30_s_academic_oe_v0_1_qa_processed.json"))
    assert data.format.name == "llava-video"
    assert [said(record)[0] for record in data] == ["user: [video]What does the person do?", "user: [video]Where?"]
    assert [record.videos[0].path for record in data] == [str(inside), str(beside)]
    assert data[1].id == "7"
    # A folder of such files; the card's splits by the parts of their names.
    write_llava(tmp_path, LLAVA_VIDEO[:1], "0_30_s_academic_v0_1_cap_processed.json")
    assert len(load_records(tmp_path)) == 3
    assert len(load_records(tmp_path, split="caption")) == 1
    assert len(load_records(tmp_path, split="open_ended")) == 2
    with pytest.raises(ValueError, match="has no JSON file for split='multi_choice'"):
        load_records(tmp_path, split="multi_choice")


def test_scenes_and_easy_vqa():
    scenes = load_records("scenes", split="test", limit=3, seed=5)
    assert len(scenes) == 3
    assert scenes[0] == load_records("scenes", split="test", limit=7, seed=5)[0]
    assert said(scenes[0])[0].startswith("user: [image]")
    easy = load_records("easy-vqa", split="test")
    assert len(easy) == 9673
    assert easy[0].meta["kind"] in ("yes/no", "colour", "shape")
    assert open_image(easy[0].images[0]).size == (64, 64)


def test_own_records_come_back(tmp_path):
    records = [
        Record.of_question("q", "what?", "that", [b"\x89PNG"], kind="x"),
        Record(id="v", videos=["a.mp4"], messages=[{"role": "user", "content": [{"type": "video"}]}]),
    ]
    write_records(tmp_path / "own.jsonl", records)
    data = load_records(tmp_path / "own.jsonl")
    assert data.format.name == "records"
    assert data[0] == records[0]
    assert data[1].videos[0].path == str(tmp_path / "a.mp4")


def test_s2_tags_and_images(tmp_path):
    """No key; key and no tag; key and tag; tag and no key: accepted, first and counted, in place, refused."""
    rows = [
        {"id": "none", "conversations": human("hi", "yes")},
        {"id": "untagged", "image": "a.jpg", "conversations": human("what?", "that")},
        {"id": "both", "image": "a.jpg", "conversations": human("what?\n<image>", "that")},
        {"id": "tag", "conversations": human("<image>\nwhat?", "that")},
    ]
    path = write_llava(tmp_path, rows)
    data = load_records(path)
    assert [said(data[i])[0] for i in range(3)] == ["user: hi", "user: [image]what?", "user: what?[image]"]
    for _ in range(3):
        assert data[1].images == (str(tmp_path / "a.jpg"),)
    assert data.notes == {"image without a <image> tag, placed first": 1}
    with pytest.raises(ValueError, match=r"row 3 \(tag\): 1 <image> tag\(s\) but 0 image\(s\)"):
        data[3]
    with pytest.raises(ValueError, match=r"row 1 \(untagged\): 0 <image> tag\(s\) but 1 image\(s\)"):
        load_records(path, missing_tag="raise")[1]
    picture().save(tmp_path / "a.jpg")
    usable = load_records(path, on_error="skip")
    assert [record.id for record in usable] == ["none", "untagged", "both"]
    assert [(r.index, "1 <image> tag(s)" in r.reason) for r in usable.rejected] == [(3, True)]


def test_two_images_and_one_tag_are_ambiguous():
    with pytest.raises(ValueError, match=r"1 <image> tag\(s\) but 2 image\(s\)"):
        with_slots([("user", "<image>what?"), ("assistant", "that")], 2, 0, Reading(), [])


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("<image>\nQ", "[image]Q"),
        ("Q\n<image>", "Q[image]"),
        ("<image>Q", "[image]Q"),
        ("a <image> b", "a [image] b"),
        ("a\n<image>\nb", "a\n[image]\nb"),
        ("<image>\n\nQ\n", "[image]Q\n"),
        ("<image>\n", "[image]"),
        ("<image>", "[image]"),
    ],
)
def test_line_breaks_go_with_the_tag_at_either_end(written, expected):
    (message,) = with_slots([("user", written)], 1, 0, Reading(), [])
    assert "".join(p.get("text", f"[{p['type']}]") for p in message["content"]) == expected


def test_the_assistants_tag_is_text():
    messages = with_slots([("user", "<image>Which tag?"), ("assistant", "<image>")], 1, 0, Reading(), [])
    assert messages[1]["content"] == [{"type": "text", "text": "<image>"}]


def test_an_answer_before_any_question_is_left_out_and_counted():
    notes: list[str] = []
    turns = [("assistant", "Hello"), ("user", "<image>\nwhat?"), ("assistant", "that")]
    messages = with_slots(turns, 1, 0, Reading(), notes)
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert notes == ["answer before any question, left out"]


def test_unknown_roles_are_named(tmp_path):
    with pytest.raises(ValueError, match="message 1 has the role 'robot'; known roles: human, user, gpt"):
        turns_of([{"from": "robot", "value": "hi"}])
    rows = [{"id": "r", "conversations": [{"from": "robot", "value": "hi"}]}]
    path = write_llava(tmp_path, rows)
    with pytest.raises(ValueError, match=r"llava\.json: row 0 \(r\): message 1 has the role 'robot'"):
        load_records(path)[0]


def test_urls_are_refused_unless_allowed(tmp_path):
    path = write_llava(
        tmp_path, [{"id": "u", "image": "https://example.org/a.png", "conversations": human("<image>", "x")}]
    )
    with pytest.raises(ValueError, match="is a URL"):
        load_records(path)[0]
    assert load_records(path, allow_urls=True)[0].images == ("https://example.org/a.png",)


def test_formats_are_told_apart_and_can_be_named(tmp_path):
    path = write_llava(tmp_path, [{"question": "q", "answer": "a"}])
    with pytest.raises(ValueError, match=r"the rows of .*llava\.json \(question, answer\) are of no known format"):
        load_records(path)
    with pytest.raises(ValueError, match=r"unknown format 'lava'.*llava"):
        load_records(path, format="lava")
    with pytest.raises(ValueError, match=r"row 0: not a row of the format llava \(KeyError: 'conversations'\)"):
        load_records(path, format="llava")[0]
    assert set(FORMATS) == {
        "llava", "llava-mix-vsft", "finevision", "llava-onevision", "llava-video", "livecc", "easy-vqa", "scenes",
        "records",
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["json", "jsonl", "parquet", "livecc"])
def test_a_stream_gives_the_same_records(tmp_path, kind):
    if kind == "parquet":
        path = write_vsft(tmp_path / "a.parquet")
    elif kind == "livecc":
        write_video(tmp_path / "v.mp4", 2)
        path = write_livecc(tmp_path, [livecc_row("v.mp4", 0.0, 1.0 + i / 10, [[0.1, 0.2, "hi"]]) for i in range(3)])
    else:
        path = write_llava(tmp_path)
        if kind == "jsonl":
            path = tmp_path / "lines.jsonl"
            path.write_text("\n\n".join(json.dumps(row) for row in LLAVA))
    data = load_records(path)
    stream = load_records(path, streaming=True)
    assert list(stream) == list(data)
    assert list(stream.take(1)) == list(data)[:1]
    assert list(stream.skip(1)) == list(data)[1:]
    shuffled = list(stream.shuffle(seed=1, buffer=2))
    assert sorted(r.model_dump_json() for r in shuffled) == sorted(r.model_dump_json() for r in data)
    assert list(load_records(path, streaming=True, limit=2)) == list(data)[:2]


def test_workers_of_a_loader_share_the_shards_of_a_stream(tmp_path):
    from torch.utils.data import DataLoader

    for name in ("a", "b"):
        rows = [{"id": f"{name}{i}", "conversations": human("hi", "yes")} for i in range(5)]
        write_llava(tmp_path, rows, f"{name}.json")
    stream = load_records(tmp_path, streaming=True)
    for workers in (0, 2):
        loader = DataLoader(stream, batch_size=2, num_workers=workers, collate_fn=lambda rows: [row.id for row in rows])
        assert sorted(i for batch in loader for i in batch) == [f"{name}{i}" for name in "ab" for i in range(5)]


def test_a_stream_goes_on_where_it_stopped(tmp_path):
    write_llava(tmp_path, [{"id": str(i), "conversations": human("hi", "yes")} for i in range(6)])
    stream = load_records(tmp_path / "llava.json", streaming=True)
    rows = iter(stream)
    seen = [next(rows).id for _ in range(2)]
    fresh = load_records(tmp_path / "llava.json", streaming=True)
    fresh.load_state_dict(stream.state_dict())
    assert seen + [record.id for record in fresh] == [str(i) for i in range(6)]


def test_splits_and_slices(tmp_path):
    path = write_llava(tmp_path, [{"id": str(i), "conversations": human("hi", "yes")} for i in range(10)])

    def ids(split, **options):
        return [record.id for record in load_records(path, split=split, **options)]

    assert ids("train") == [str(i) for i in range(10)]
    assert ids("train[:90%]") + ids("train[90%:]") == [str(i) for i in range(10)]
    assert ids("[2:4]") == ["2", "3"]
    assert ids("train[-2:]") == ["8", "9"]
    assert ids("train[:50%]", limit=2) == ["0", "1"]
    assert ids("[2:4]", streaming=True) == ["2", "3"]
    with pytest.raises(ValueError, match="one file without splits"):
        ids("validation")
    with pytest.raises(ValueError, match=r"split must look like train, train\[:90%\]"):
        ids("train[a]")


def test_datasets_own_folders(tmp_path):
    from datasets import load_dataset

    write_vsft(tmp_path / "train-00000-of-00001.parquet")
    write_vsft(tmp_path / "test-00000-of-00001.parquet")
    assert len(load_records(tmp_path, split="test")) == 2
    with pytest.raises(ValueError, match=r"cannot open .* \(split nope\): "):
        load_records(tmp_path, split="nope")
    load_dataset("parquet", data_files=str(tmp_path / "train-00000-of-00001.parquet"), split="train").save_to_disk(
        tmp_path / "saved"
    )
    data = load_records(tmp_path / "saved")
    assert len(data) == 2
    assert isinstance(data[0].images[0], bytes)


def test_what_cannot_be_opened_is_said_in_one_line(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no such file or folder: .*gone\.json; data sets without a file are"):
        load_records(tmp_path / "gone.json")
    (tmp_path / "a.csv").write_text("a,b")
    with pytest.raises(ValueError, match=r"is no \.json, \.jsonl or \.parquet file"):
        load_records(tmp_path / "a.csv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no \.json, \.jsonl or \.parquet file"):
        load_records(tmp_path / "empty")
    with pytest.raises(ValueError, match=r"cannot open owner/name \(split train\)") as raised:
        load_records("owner/name")  # the tests run without a network
    assert "\n" not in str(raised.value)
    for wrong in ({"on_error": "ignore"}, {"limit": 0}, {"missing_tag": "drop"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            load_records("scenes", **wrong)


def test_parts_of_a_data_set(tmp_path):
    data = load_records(write_llava(tmp_path))
    part = data.select([3, 1])
    assert [part[i] for i in range(2)] == [data[3], data[1]]
    assert part.select([1])[0] == data[1]
    assert part[-1] == data[1]
    assert data[1:3] == [data[1], data[2]]
    with pytest.raises(IndexError):
        part[2]
    with pytest.raises(IndexError):
        data.select([4])
    again = pickle.loads(pickle.dumps(part))
    assert list(again) == list(part)


def test_nothing_of_an_image_is_read_before_it_is_needed(tmp_path, monkeypatch):
    from PIL import Image

    path = write_llava(tmp_path, [{"id": "a", "image": "gone.jpg", "conversations": human("<image>", "x")}])
    parquet = write_vsft(tmp_path / "a.parquet")
    monkeypatch.setattr(Image, "open", None)
    assert load_records(path)[0].images == (str(tmp_path / "gone.jpg"),)
    assert isinstance(load_records(parquet)[0].images[0], bytes)
    assert [r.reason for r in load_records(path, on_error="skip").rejected] == [
        f"file not found: {tmp_path / 'gone.jpg'}"
    ]
