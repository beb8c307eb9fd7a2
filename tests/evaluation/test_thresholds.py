"""Several thresholds of one model in one go: a run each, the model loaded once, the table of `compare`."""

import copy
import json

import pytest
import torch

import crossfuse as xf
from crossfuse.evaluation.model_runs import find_runs, with_baseline
from crossfuse.evaluation.run_comparison import compare_runs
from crossfuse.evaluation.thresholds import change_fusion, parse_thresholds, threshold_of, with_threshold
from crossfuse.reports.run_thresholds import thresholds_table


def test_thresholds_of_a_list():
    assert parse_thresholds(" 1,0.16, 0.16,0") == [1.0, 0.16, 0.0]
    for text in ("1,high", "-0.1", "nan", "inf", ","):
        with pytest.raises(ValueError, match="--threshold"):
            parse_thresholds(text)


@pytest.mark.parametrize(
    "fusion",
    [
        xf.TextAnchors(threshold=0.3, share=0.1, copy_order="prompt"),
        xf.ImageAnchors(threshold=0.3),
        xf.CrossAttention(joint_text=True, anchors=xf.TextAnchors(threshold=0.3)),
    ],
    ids=lambda fusion: fusion.name,
)
def test_any_anchor_fusion_takes_another_threshold_and_nothing_else_changes(fusion):
    changed = with_threshold(fusion, 0.5)
    assert threshold_of(changed) == 0.5
    assert with_threshold(changed, 0.3) == with_threshold(fusion, 0.3)
    assert type(changed) is type(fusion)
    assert getattr(changed, "share", None) is None, "another threshold copies another share"


def test_a_fusion_without_anchors_has_no_threshold():
    assert threshold_of(xf.CrossAttention()) is None
    with pytest.raises(ValueError, match="cross-attention has no anchors, so no threshold"):
        with_threshold(xf.CrossAttention(), 0.1)


def test_trained_weights_of_cross_attention_live_through_a_change(embedded):
    model = copy.deepcopy(embedded[0])
    fusion = xf.CrossAttention(joint_text=True, anchors=xf.TextAnchors(threshold=0.1))
    xf.fuse(model, fusion)
    with torch.no_grad():
        for parameter in xf.fusion_parameters(model).values():
            parameter.add_(0.01)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    change_fusion(model, with_threshold(fusion, 1.0))
    assert threshold_of(xf.fusion_of(model)) == 1.0
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[n], before[n]) for n in before)


def test_evaluate_makes_a_run_a_threshold_and_compare_the_table(run, tmp_path, monkeypatch):
    loads = []
    load = xf.load_embedded
    monkeypatch.setattr(xf, "load_embedded", lambda *a: loads.append(a) or load(*a))
    asked = ("--tasks", "scenes", "--limit", "6", "--out", str(tmp_path))
    code, out, err = run("evaluate", "embedded", "--threshold", "0.05,1,0.16", *asked)
    assert code == 0, (out, err)
    assert len(loads) == 1
    stored = {}
    for value in ("1", "0.16", "0.05"):
        folder = tmp_path / f"embedded-threshold-{value}"
        described = json.loads((folder / "run.json").read_text())
        assert described["fusion"]["name"] == "text-anchors"
        assert described["fusion"]["threshold"] == described["swept"]["threshold"] == float(value)
        lines = (folder / "scenes.predictions.jsonl").read_text().splitlines()
        assert {json.loads(line)["fusion"]["threshold"] for line in lines} == {float(value)}
        stored[value] = json.loads((folder / "scores.json").read_text())["scenes"]["metrics"]["accuracy"]["value"]
    code, out, err = run("evaluate", "plain=embedded", *asked)
    assert code == 0, (out, err)
    plain = json.loads((tmp_path / "plain" / "scores.json").read_text())["scenes"]["metrics"]
    assert plain["accuracy"]["value"] == stored["1"], "threshold 1 is off"
    models = with_baseline(find_runs(sorted(p for p in tmp_path.iterdir() if "threshold" in p.name)), None)
    assert [m.name for m in models] == [f"embedded threshold {v}" for v in ("1", "0.16", "0.05")]
    table = thresholds_table(compare_runs(models, resamples=100))
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert {v: row[v] for v in stored} == stored
    assert row["best"] == ", ".join(v for v in ("1", "0.16", "0.05") if stored[v] == max(stored.values()))


def test_two_models_get_rows_of_their_own_and_lower_is_better_where_it_is(tmp_path):
    from crossfuse.evaluation.benchmarks.base import Metric
    from crossfuse.evaluation.runs import TaskScores, write_scores
    from crossfuse.reports.files import write_json
    from crossfuse.reports.run_thresholds import _best

    for of, values in (("a", (1, 0.1)), ("b", (1, 0.2))):
        for value in values:
            folder = tmp_path / f"{of}{value}"
            fusion = {"name": "image-anchors", "threshold": value}
            swept = {"of": of, "threshold": value}
            write_json(folder / "run.json", {"name": f"{of}, {value}", "fusion": fusion, "source": of, "swept": swept})
            (folder / "pope@lmms-eval.samples.jsonl").write_text(
                json.dumps({"id": "1", "prompt": "?", "reference": {}, "meta": {}, "pictures": ""}) + "\n"
            )
            metric = Metric(float(value), 1, "", "0-1")
            write_json(folder / "pope@lmms-eval.scored.json", {"metrics": {"m": metric.to_json()}, "values": {}})
            write_scores(folder, {"pope@lmms-eval": TaskScores({"m": metric})})
    table = thresholds_table(compare_runs(find_runs([tmp_path]), resamples=100))
    assert list(table.columns) == ["task", "metric", "source", "1", "0.2", "0.1", "best"]
    assert [list(row[2:]) for row in table.rows] == [
        ["a, image-anchors", 1.0, None, 0.1, "1"],
        ["b, image-anchors", 1.0, 0.2, None, "1"],
    ]
    assert _best("chair@exact-words", [1, 0.1], [3.0, 2.0]) == "0.1"
    assert _best("yes_ratio", [1, 0.1], [3.0, 2.0]) is None
