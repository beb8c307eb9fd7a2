"""Records: validated, and the same after a round trip through JSON lines."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError

from crossfuse.data.images import open_image
from crossfuse.data.records import Record, check_images, read_records, write_records


def image(seed: int = 0, size: tuple[int, int] = (6, 5)) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (*size, 3)).astype(np.uint8))


def test_a_question_becomes_two_messages():
    record = Record.of_question("q1", "what is it?", "a star", ["a.png", b"data"], kind="shape")
    assert [part.type for part in record.messages[0].content] == ["image", "image", "text"]
    assert record.messages[0].text == "what is it?"
    assert record.answer == "a star"
    assert record.meta == {"answer": "a star", "kind": "shape"}
    assert Record.of_question("q2", "hello").answer is None


TEXTS = st.text(st.characters(codec="utf-8"), max_size=30)


@given(texts=st.lists(TEXTS, min_size=1, max_size=4), slots=st.integers(0, 2))
@settings(max_examples=40, deadline=None)
def test_json_lines_round_trip(tmp_path_factory, texts, slots):
    path = tmp_path_factory.mktemp("records") / "records.jsonl"
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    messages[0]["content"] = [{"type": "image"}] * slots + [{"type": "text", "text": texts[0]}]
    records = [Record(id=f"r{n}", images=["a/b.png", b"\x00\xff"][:slots], messages=messages) for n in range(2)]
    assert write_records(path, records) == 2
    assert list(read_records(path)) == records
    assert not list(path.parent.glob(".*"))


def test_pil_images_come_back_with_equal_pixels(tmp_path):
    path = tmp_path / "records.jsonl"
    write_records(path, [Record.of_question("q", "what?", "that", [image()])])
    (record,) = read_records(path)
    assert open_image(record.images[0]).tobytes() == image().tobytes()


def test_relative_paths_are_taken_from_the_root(tmp_path):
    path = tmp_path / "records.jsonl"
    write_records(path, [Record.of_question("q", "what?", images=["a.png", "/b.png"])])
    (record,) = read_records(path, root=tmp_path)
    assert record.images == (str(tmp_path / "a.png"), "/b.png")


def test_urls_are_refused_unless_allowed(tmp_path):
    message = "image 'https://example.org/a.png' is a URL; download it first, or allow URLs with allow_urls=True"
    with pytest.raises(ValidationError, match=message):
        Record.of_question("q", "what?", images=["https://example.org/a.png"])
    fields = {"id": "q", "images": ["https://example.org/a.png"]}
    fields["messages"] = [{"role": "user", "content": [{"type": "image"}]}]
    record = Record.model_validate(fields, context={"allow_urls": True})
    path = tmp_path / "records.jsonl"
    write_records(path, [record])
    assert list(read_records(path, allow_urls=True)) == [record]
    with pytest.raises(ValueError, match=r"records\.jsonl, line 1: images: image .* is a URL"):
        list(read_records(path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"imags": []}, r"unknown key 'imags' \(did you mean 'images'\?\)"),
        ({"images": ["a.png", "b.png"]}, r"record 'r' has 1 image slot\(s\) but 2 image\(s\)"),
        ({"images": []}, r"record 'r' has 1 image slot\(s\) but 0 image\(s\)"),
        ({"messages": []}, "at least 1 item"),
        ({"id": ""}, "at least 1 character"),
        ({"images": [3]}, "an image must be a path, bytes or a PIL image; got int"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "'system', 'user' or 'assistant'"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "image"}]}]},
            "assistant's message cannot hold",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "sound"}]}]}, "sound"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "txt": "a"}]}]}, "did you mean 'text'"),
    ],
)
def test_bad_records_are_refused_by_name(change, message):
    good = {"id": "r", "images": ["a.png"], "messages": [{"role": "user", "content": [{"type": "image"}]}]}
    with pytest.raises(ValidationError, match=message):
        Record.model_validate(good | change)


def test_a_bad_line_is_named(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text('{"id": "a", "messages": [{"role": "user", "content": "hi"}]}\n{"id": 3}\n')
    with pytest.raises(ValueError, match=r"records\.jsonl, line 2: id: "):
        list(read_records(path))


def test_s3_check_lists_exactly_the_bad_images(tmp_path):
    good, cut, gif = tmp_path / "good.png", tmp_path / "cut.jpg", tmp_path / "gif.jpg"
    image(size=(64, 64)).save(good)
    image(size=(64, 64)).save(cut)
    cut.write_bytes(cut.read_bytes()[:600])
    image().save(gif, format="GIF")
    palette = image(size=(27, 332)).convert("RGBA").quantize(8)
    palette.save(tmp_path / "palette.png", transparency=2)
    names = ["good.png", "gone.png", "cut.jpg", "gif.jpg", "palette.png"]
    records = [Record.of_question(name, "what?", images=[tmp_path / name]) for name in names]
    problems = dict(check_images(records))
    assert list(problems) == ["gone.png", "cut.jpg"]
    assert "not found" in problems["gone.png"]
    assert "truncated" in problems["cut.jpg"]
