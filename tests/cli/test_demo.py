"""`crossfuse demo` from end to end, with a budget of seconds."""

import json
import re
import sys

import pytest
from PIL import Image

import crossfuse as xf

FUSIONS = [
    "insertion (baseline)",
    "text anchors (AttAnchor)",
    "cross-attention (CASA)",
    "insertion, before fine-tuning",
]


@pytest.fixture(scope="module", params=["scenes", "easy-vqa"])
def finished(request, tmp_path_factory):
    """(folder, name of the data) of one run with two steps of four samples and thirty scored questions."""
    from crossfuse.cli import demo_run
    from crossfuse.cli.demo import demo

    folder = tmp_path_factory.mktemp("demo") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_run, "QUICK", demo_run.Budget(steps=2, batch_size=4, scored=30, calibration=16))
        demo(quick=True, data=request.param, out=folder, seed=0)
    return folder, request.param


def test_files_are_whole(finished):
    folder, _ = finished
    names = {path.name for path in folder.iterdir()}
    assert {"report.html", "results.json", "loss.png", "radar.png", "cache.png"} <= names
    assert not [name for name in names if name.startswith(".")], "no temporary file is left"
    for path in folder.glob("*.png"):
        with Image.open(path) as image:
            image.load()


def test_results_hold_what_was_measured(finished):
    folder, _ = finished
    results = json.loads((folder / "results.json").read_text())
    assert results["questions"] == len(results["answers"]) == 30
    assert [outcome["name"] for outcome in results["outcomes"]] == FUSIONS
    for outcome in results["outcomes"]:
        whole = outcome["scores"]["all"]
        right = sum(_is_right(row["answers"][outcome["name"]], row["answer"]) for row in results["answers"])
        assert whole["right"] == right
        assert whole["total"] == 30 == outcome["shuffled_images"]["total"]
        low, high = whole["interval_95"]
        assert low <= whole["share"] <= high
    trained = results["outcomes"][:3]
    assert all(outcome["recipe"]["steps"] == 2 for outcome in trained)
    assert all(len(outcome["losses"]) == 2 for outcome in trained)
    assert results["outcomes"][3]["recipe"] is None
    assert results["settings"].keys() >= {"dtype", "attn_implementation", "batch_size"}
    assert results["calibration"]["share"] == 0.1


def _is_right(answer: str, reference: str) -> bool:
    if reference in ("yes", "no"):
        found = re.search(r"\b(yes|no)\b", answer.lower())
        return bool(found) and found.group(1) == reference
    return answer.lower().strip(" .") == reference


def test_report_repeats_the_results(finished):
    folder, data = finished
    results = json.loads((folder / "results.json").read_text())
    page = (folder / "report.html").read_text()
    for outcome in results["outcomes"]:
        assert f"{outcome['scores']['all']['right']}&nbsp;of&nbsp;30" in page.replace("\xa0", "&nbsp;")
    assert not re.search(r"https?://|<script", page)
    pictures = len(list(folder.glob("anchors-*.png")))
    assert page.count("data:image/png;base64,") == 3 + pictures
    assert f"crossfuse demo --quick --data {data} --seed 0" in page


def test_cross_attention_cache_stays_while_insertion_grows(finished):
    folder, _ = finished
    cache = json.loads((folder / "results.json").read_text())["cache_bytes"]
    text = xf.load_embedded()[0].config.text_config
    position = text.num_hidden_layers * 2 * text.num_key_value_heads * text.head_dim * 4
    (first, one), *_, (last, many) = cache["insertion"]
    assert many - one == (last - first) * 65 * position
    (_, one), *_, (_, many) = cache["cross-attention, text only"]
    assert many - one == (last - first) * 1 * position


def test_out_that_is_a_file_is_refused(run, tmp_path):
    (tmp_path / "taken").write_text("")
    code, _, err = run("demo", "--quick", "--out", str(tmp_path / "taken"))
    assert code == 2
    assert err == f"crossfuse: {tmp_path / 'taken'} is a file; give --out a folder\n"


def test_easy_vqa_that_is_not_installed_is_named(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "easy_vqa", None)
    code, _, err = run("demo", "--quick", "--data", "easy-vqa", "--out", str(tmp_path / "out"))
    assert code == 2
    assert err == "crossfuse: the easy-VQA data are not installed; run: pip install easy-vqa\n"
    assert not list((tmp_path / "out").iterdir()), "nothing half-written"


def test_training_and_scored_pictures_are_apart():
    from crossfuse.cli.demo_data import demo_data
    from crossfuse.data.collate import open_image

    for name in ("scenes", "easy-vqa"):
        data = demo_data(name, train=40, scored=20, seed=0)
        seen = {open_image(record.images[0]).tobytes() for record in data.train}
        assert not seen & {open_image(record.images[0]).tobytes() for record in data.scored}
        assert len(data.train) == 40
        assert len(data.scored) == len(data.picture_ids) == 20
