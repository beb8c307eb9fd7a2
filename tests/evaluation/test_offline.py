"""Published files on disk are asked and scored without any network, and captions without Java."""

import json
import shutil
import socket

import pytest
from golden_files import GOLDEN, expected
from PIL import Image

from crossfuse.evaluation import lmms_tasks


@pytest.fixture
def no_network(monkeypatch):
    """Every attempt to reach a host fails the test, also one that the library would swallow."""
    tried = []

    def refuse(self, address, *rest):
        tried.append(address)
        raise OSError(f"no network here: {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: refuse(None, a[0]))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield
    assert not tried


@pytest.mark.usefixtures("no_network")
def test_local_files_need_no_network_whatever_is_installed(run, tmp_path, monkeypatch):
    monkeypatch.setattr(lmms_tasks, "lmms_eval_is_installed", lambda: True)
    files = tmp_path / "files"
    shutil.copytree(GOLDEN / "pope", files / "pope")
    for path in (files / "pope").glob("coco_pope_*.json"):
        for line in path.read_text().splitlines():
            (files / "pope" / "val2014").mkdir(exist_ok=True)
            Image.new("RGB", (64, 64), "white").save(files / "pope" / "val2014" / json.loads(line)["image"])
    out = str(tmp_path / "out")
    code, said, err = run("evaluate", "embedded", "--tasks", "pope,scenes", "--local", str(files), "--limit", "5",
                          "--out", out)  # fmt: skip
    assert code == 0, (said, err)
    folder = tmp_path / "out" / "embedded"
    scores = json.loads((folder / "scores.json").read_text())
    assert list(scores) == ["pope", "scenes"]
    assert scores["pope"]["metrics"]["accuracy"]["n"] == 5
    code, said, err = run("score", str(folder))
    assert code == 0, (said, err)
    # Predictions that were made elsewhere, against the published files.
    answers = expected("pope")["answers"].items()
    lines = [json.dumps({"sample_id": i, "prompt_hash": "", "answer": a}) for i, a in answers]
    (tmp_path / "pope.predictions.jsonl").write_text("\n".join(lines) + "\n")
    code, said, err = run("score", str(tmp_path / "pope.predictions.jsonl"), "--local", str(files), "--out",
                          str(tmp_path / "scores.json"))  # fmt: skip
    assert code == 0, (said, err)
    found = {row["metric"]: row["value"] for row in json.loads((tmp_path / "scores.json").read_text())["rows"]}
    for name, value in expected("pope")["scores"].items():
        assert found[name] == pytest.approx(value), name


def test_e4_evaluate_without_java_says_so_and_does_the_rest(run, tmp_path, monkeypatch):
    pytest.importorskip("pycocoevalcap")
    pytest.importorskip("sacrebleu")
    empty = tmp_path / "bin"
    empty.mkdir()
    monkeypatch.setenv("PATH", str(empty))
    assert shutil.which("java") is None
    out = str(tmp_path / "out")
    code, said, err = run("evaluate", "embedded", "--tasks", "scene-captions", "--limit", "2", "--out", out)
    assert code == 0, (said, err)
    scores = json.loads((tmp_path / "out" / "embedded" / "scores.json").read_text())["scene-captions"]["metrics"]
    for name in ("meteor", "cider"):
        assert scores[name]["value"] is None
        assert "java" in scores[name]["reason"].lower()
    for name in ("exact", "bleu", "rouge_l", "cider@simple"):
        assert scores[name]["value"] is not None, name
