"""`crossfuse anchors` and `crossfuse sweep` as a user runs them, on the embedded model."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from crossfuse.analysis.word_patches import scene_records
from crossfuse.cli.main import main
from crossfuse.data.records import write_records


def run(arguments, capsys) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    printed = capsys.readouterr()
    return stopped.value.code or 0, printed.out, printed.err


@pytest.fixture(scope="module")
def record():
    return next(iter(scene_records("test", 1, kinds=("relation",))))


@pytest.mark.parametrize("fusion", ["text-anchors", "image-anchors"])
def test_anchors_writes_picture_and_boxes_of_the_original_image(fusion, record, tmp_path, capsys):
    picture = record.images[0].resize((400, 300))
    picture.save(tmp_path / "scene.png")
    question = record.messages[0].text
    arguments = ["anchors", str(tmp_path / "scene.png"), question, "--fusion", fusion, "--share", "0.4"]
    code, out, _ = run([*arguments, "--out", str(tmp_path / "out")], capsys)
    assert code == 0
    made = json.loads((tmp_path / "out" / "anchors.json").read_text())
    assert made["image_size"] == [400, 300]
    assert made["fusion"]["name"] == fusion
    assert len(made["anchors"]) > 0
    for anchor in made["anchors"]:
        left, top, right, bottom = anchor["box"]
        assert (right - left, bottom - top) == (50, 37.5)  # 8 x 8 patches over the whole picture
        assert (left, top) == (50 * anchor["column"], 37.5 * anchor["row"])
        assert anchor["cosine"] >= made["fusion"]["threshold"]
        assert repr(anchor["token"]) in out
    with Image.open(tmp_path / "out" / "anchors.png") as drawn:
        assert min(drawn.size) == 768


def test_anchors_of_windows_are_shown(record, tmp_path, capsys):
    record.images[0].save(tmp_path / "scene.png")
    given = ["anchors", str(tmp_path / "scene.png"), record.messages[0].text, "--share", "0.4"]
    code, out, _ = run(
        [*given, "--fusion", "cross-attention", "--anchors", "0.1", "--out", str(tmp_path / "ca")], capsys
    )
    assert code == 0
    made = json.loads((tmp_path / "ca" / "anchors.json").read_text())
    assert made["fusion"]["name"] == "cross-attention"
    assert made["fusion"]["anchors"]["share"] == 0.4
    assert 0 < len(made["anchors"]) < len(out.splitlines())
    assert run([*given, "--out", str(tmp_path / "insertion")], capsys)[0] == 0
    # One image after all text of the question but its end: the window sees the same words.
    inserted = {a["index"] for a in json.loads((tmp_path / "insertion" / "anchors.json").read_text())["anchors"]}
    assert {a["index"] for a in made["anchors"]} & inserted


def test_anchors_refuses_what_it_cannot_show(record, tmp_path, capsys):
    record.images[0].save(tmp_path / "scene.png")
    given = ["anchors", str(tmp_path / "scene.png")]
    for extra, message in (
        (["hi", "--fusion", "cross-attention"], "cross-attention makes no anchors"),
        (["hi", "--threshold", "-1"], "threshold must be at least 0"),
        (["hi", "--threshold", "0.1", "--share", "0.1"], "give --threshold or --share, not both"),
        (["what is <image>?"], "reserved"),
        ([" "], "the prompt is empty"),
    ):
        code, _, err = run([*given, *extra, "--out", str(tmp_path / "out")], capsys)
        assert code == 2
        assert message in err
        assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_sweep_writes_a_table_of_the_thresholds(tmp_path, capsys):
    write_records(tmp_path / "data.jsonl", scene_records("test", 6))
    arguments = ["sweep", "1,0.2", "--data", str(tmp_path / "data.jsonl"), "--metrics", "loss,anchors,precision"]
    code, out, _ = run([*arguments, "--samples", "6", "--out", str(tmp_path / "out")], capsys)
    assert code == 0
    made = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert made["values"] == [1, 0.2]
    assert made["metrics"]["anchors"][0] == 0 < made["metrics"]["anchors"][1]
    assert made["metrics"]["precision"][0] is None
    assert (tmp_path / "out" / "sweep.md").read_text().strip() in out
    assert (tmp_path / "out" / "sweep.csv").read_text().startswith("threshold,1,0.2\nloss,")
    code, _, err = run(["sweep", "1", "--metrics", "acuracy"], capsys)
    assert code == 2
    assert "did you mean 'accuracy'?" in err
