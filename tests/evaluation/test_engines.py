"""Which engine asks a task: by rule, by name, with lmms-eval absent, and what a run's folder and a comparison hold."""

import importlib.util
import json
import sys

import pytest

from crossfuse.data.records import Record
from crossfuse.evaluation import lmms_tasks
from crossfuse.evaluation.benchmarks.base import BenchmarkSample, Metric
from crossfuse.evaluation.lmms_comparison import NO_MEAN, OTHER_SAMPLES
from crossfuse.evaluation.lmms_tasks import lmms_task, with_engine
from crossfuse.evaluation.model_runs import find_runs
from crossfuse.evaluation.predictions import PredictionFile, RunSettings
from crossfuse.evaluation.run_comparison import compare_runs
from crossfuse.evaluation.runs import TaskScores, score_task, write_scores
from crossfuse.evaluation.samples import write_asked
from crossfuse.evaluation.tasks import parse_tasks, task
from crossfuse.reports.files import write_json
from crossfuse.reports.run_report import write_report

needs_lmms_eval = pytest.mark.skipif(importlib.util.find_spec("lmms_eval") is None, reason="lmms-eval is not installed")
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: generate_until
doc_to_text: question
doc_to_target: answer
doc_to_visual: !function pictures.visual
process_results: !function pictures.judge
generation_kwargs: {{max_new_tokens: 4, temperature: 0, do_sample: false}}
metric_list:
- {{metric: right, aggregation: mean, higher_is_better: true}}
- {{metric: total, aggregation: !function pictures.total, higher_is_better: true}}
metadata: [{{version: 0.0}}]
"""
PICTURES = """
from PIL import Image


def visual(doc):
    return [Image.new("RGB", (64, 64), doc["colour"])]


def judge(doc, results):
    right = float(results[0].lower() == doc["answer"])
    return {"right": right, "total": {"right": right}}


def total(results):
    return 7 + sum(each["right"] for each in results)
"""


@pytest.fixture
def absent(monkeypatch):
    monkeypatch.setitem(sys.modules, "lmms_eval", None)
    assert not lmms_tasks.lmms_eval_is_installed()


def names(chosen) -> list[str]:
    return [each.name for each in chosen]


def test_auto_takes_lmms_eval_for_what_it_has_and_files_on_disk_need_no_network(monkeypatch, tmp_path):
    monkeypatch.setattr(lmms_tasks, "lmms_eval_is_installed", lambda: True)
    chosen = parse_tasks("pope,scenes,amber,hallusionbench")
    expected = ["pope@lmms-eval", "scenes", "amber", "hallusionbench"]
    assert names(with_engine(chosen, "auto", local=None)) == expected
    for options in ({"local": tmp_path}, {"local": None, "split": "random"}, {"local": None, "shuffled": True}):
        assert names(with_engine(chosen, "auto", **options)) == names(chosen)
    assert names(with_engine(chosen, "crossfuse", local=None)) == names(chosen)
    assert names(with_engine(chosen[:1], "lmms-eval", local=tmp_path)) == ["pope@lmms-eval"]
    assert names(with_engine(parse_tasks("mmmu_val@lmms-eval"), "auto", local=tmp_path)) == ["mmmu_val@lmms-eval"]


def test_what_the_named_engine_lacks_is_refused(monkeypatch):
    monkeypatch.setattr(lmms_tasks, "lmms_eval_is_installed", lambda: True)
    with pytest.raises(ValueError, match="lmms-eval has no task that asks scenes, amber; it has pope"):
        with_engine(parse_tasks("pope,scenes,amber"), "lmms-eval", local=None)
    with pytest.raises(ValueError, match="--shuffled-images works with files on disk"):
        with_engine(parse_tasks("pope"), "lmms-eval", local=None, shuffled=True)
    with pytest.raises(ValueError, match=r"unknown engine 'lmms' \(did you mean 'lmms-eval'"):
        with_engine(parse_tasks("pope"), "lmms", local=None)
    with pytest.raises(ValueError, match="does not ask pope@lmms-eval"):
        with_engine(parse_tasks("pope@lmms-eval"), "crossfuse", local=None)
    with pytest.raises(ValueError, match="lmms-eval has no task that asks amber"):
        task("amber@lmms-eval")
    with pytest.raises(ValueError, match="scores its tasks while it asks"):
        lmms_task("pope").score({"a": "yes"}, [BenchmarkSample(Record.of_question("a", "?"), {})])


@pytest.mark.usefixtures("absent")
def test_lmms_eval_absent_by_name_is_one_line_and_exit_code_2(run, tmp_path):
    for arguments in (("--tasks", "pope", "--engine", "lmms-eval"), ("--tasks", "pope@lmms-eval")):
        code, _, err = run("evaluate", "embedded", *arguments, "--out", str(tmp_path))
        assert code == 2
        assert err.count("\n") == 1
        assert "lmms-eval is not installed: pip install 'crossfuse[eval]'" in err
        assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("absent")
def test_lmms_eval_absent_with_auto_does_the_rest(run, tmp_path):
    code, out, _ = run("evaluate", "embedded", "--tasks", "pope,scenes", "--limit", "2", "--out", str(tmp_path))
    out = " ".join(out.split())
    assert code == 1
    assert "pope needs its published files" in out
    assert "or install lmms-eval, which fetches them" in out
    scores = json.loads((tmp_path / "embedded" / "scores.json").read_text())
    assert scores["scenes"]["metrics"]["accuracy"]["n"] == 2


def fake_run(folder, values: dict[str, float], more: dict[str, float]) -> None:
    """A run's folder as lmms-eval leaves it: `right` is the mean of the values, `total` is none."""
    name = "pope@lmms-eval"
    write_json(folder / "run.json", {"name": folder.name, "fusion": {"name": "insertion"}})
    write_asked(
        folder / f"{name}.samples.jsonl", ((i, f"ask {i}", {"answer": "yes"}, {}, f"picture {i}") for i in values)
    )
    settings = RunSettings(folder.name, {"name": "insertion"}, {}, "float32", "sdpa", 1)
    with PredictionFile(folder / f"{name}.predictions.jsonl", settings) as file:
        file.append((i, f"ask {i}", "yes") for i in values)
    metrics = {"right": Metric(100 * sum(values.values()) / len(values), len(values), "lmms-eval task pope", "x")}
    metrics |= {k: Metric(v, len(values), "lmms-eval task pope", "x") for k, v in more.items()}
    scored = {"metrics": {k: m.to_json() for k, m in metrics.items()}, "values": {"right": values}}
    write_json(folder / f"{name}.scored.json", scored)
    write_scores(folder, {name: TaskScores(metrics)})


def test_compare_reads_lmms_evals_scores_with_intervals_for_means_only(tmp_path):
    ids = [f"pope/{i}" for i in range(40)]
    fake_run(tmp_path / "first", {i: float(n % 2) for n, i in enumerate(ids)}, {"total": 12.0})
    fake_run(tmp_path / "second", dict.fromkeys(ids, 1.0), {"total": 19.0})
    assert score_task(tmp_path / "first", "pope@lmms-eval").metrics["right"].value == 50
    compared = compare_runs(find_runs([tmp_path]), resamples=400).tasks[0]
    assert (compared.task.name, compared.task.metric) == ("pope@lmms-eval", "right")
    found = compared.differences["second"]
    assert (found["right"].value, found["right"].wins, found["right"].losses) == (50, 20, 0)
    assert found["right"].verdict() == "better"
    assert (found["total"].value, found["total"].low, found["total"].reason) == (7, None, NO_MEAN)
    lines = write_report(
        [tmp_path], tmp_path / "cmp", baseline="first", published="all", resamples=100, command="crossfuse compare"
    )
    assert any("better than first: second" in line for line in lines)


def test_compare_over_shared_samples_takes_means_anew_and_leaves_totals_out(tmp_path):
    ids = [f"pope/{i}" for i in range(10)]
    fake_run(tmp_path / "first", dict(zip(ids, [1.0] * 5 + [0.0] * 5, strict=True)), {"total": 5.0})
    fake_run(tmp_path / "second", dict.fromkeys(ids[:6], 1.0), {"total": 6.0})
    compared = compare_runs(find_runs([tmp_path]), resamples=100).tasks[0]
    assert "6 samples that all runs have" in str(compared.left_out)
    assert compared.value("first", "right") == pytest.approx(100 * 5 / 6)
    assert compared.value("second", "right") == 100
    assert compared.metrics["first"][0]["total"].reason == OTHER_SAMPLES
    assert compared.differences["second"]["right"].value == pytest.approx(100 / 6)


def test_a_task_that_failed_in_one_run_is_compared_without_it(tmp_path):
    ids = [f"pope/{i}" for i in range(4)]
    fake_run(tmp_path / "first", dict.fromkeys(ids, 1.0), {})
    fake_run(tmp_path / "second", dict.fromkeys(ids, 0.0), {})
    fake_run(tmp_path / "third", dict.fromkeys(ids, 0.0), {})
    write_json(tmp_path / "first" / "scores.json", {"pope@lmms-eval": {"error": "no network"}})
    (compared,) = compare_runs(find_runs([tmp_path]), resamples=100).tasks
    assert list(compared.metrics) == ["second", "third"]
    assert compared.differences == {}, "the baseline has no score to differ from"


@needs_lmms_eval
def test_lmms_eval_asks_scores_resumes_and_is_compared(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    colours = ["white", "red", "blue"]
    asked = [{"question": f"Is there a circle? {i}", "answer": "no", "colour": colours[i % 3]} for i in range(6)]
    (tasks / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in asked))
    (tasks / "pope.yaml").write_text(TASK.format(name="pope", rows=tasks / "rows.jsonl"))
    (tasks / "one.yaml").write_text(TASK.format(name="toy_one", rows=tasks / "rows.jsonl"))
    (tasks / "pair.yaml").write_text("group: toy_pair\ntask: [pope, toy_one]\n")
    (tasks / "pictures.py").write_text(PICTURES)
    command = ["evaluate", "a=embedded", "b=embedded:start", "--tasks", "pope,toy_pair@lmms-eval",
               "--lmms-tasks", str(tasks), "--batch-size", "2", "--out", str(tmp_path / "out")]  # fmt: skip
    code, out, err = run(*command)
    out = " ".join(out.split())
    assert code == 0, (out, err)
    folder = tmp_path / "out" / "a"
    scores = json.loads((folder / "scores.json").read_text())
    found = scores["pope@lmms-eval"]["metrics"]
    lines = (folder / "pope@lmms-eval.predictions.jsonl").read_text().splitlines()
    right = sum(json.loads(line)["answer"].lower() == "no" for line in lines)
    assert (found["right"]["value"], found["total"]["value"]) == (pytest.approx(right / 6), 7 + right)
    assert (found["right"]["n"], found["right"]["variant"]) == (6, "lmms-eval task pope")
    pair = scores["toy_pair@lmms-eval"]["metrics"]
    assert pair["right"]["value"] == pytest.approx(right / 6)
    assert "no sum of its own" in pair["right"]["variant"]
    assert pair["right/toy_one"]["value"] == pytest.approx(right / 6)
    # Killed after three answers: the other three are asked, the scores are the same.
    (folder / "pope@lmms-eval.predictions.jsonl").write_text("\n".join(lines[:3]) + "\n" + lines[3][:20])
    import crossfuse as xf

    calls = []
    kind = type(xf.load_embedded()[0])
    generate = kind.generate
    monkeypatch.setattr(kind, "generate", lambda self, **kw: calls.append(len(kw["input_ids"])) or generate(self, **kw))
    code, out, err = run(*command)
    out = " ".join(out.split())
    assert code == 0, (out, err)
    assert sum(calls) == 3
    again = (folder / "pope@lmms-eval.predictions.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["sample_id"] for line in again) == [f"pope/{i}" for i in range(6)]
    assert json.loads((folder / "scores.json").read_text()) == scores
    compared = compare_runs(find_runs([tmp_path / "out"]), resamples=100)
    by_name = {t.task.name: t for t in compared.tasks}
    assert by_name["pope@lmms-eval"].differences["b"]["right"].low is not None
    assert by_name["pope@lmms-eval"].differences["b"]["total"].reason == NO_MEAN


@needs_lmms_eval
def test_without_network_the_other_task_is_done(run, tmp_path, monkeypatch):
    from crossfuse.evaluation import lmms_engine

    class Manager:
        all_tasks = ("pope",)

    def refused(**arguments):
        raise ConnectionError("Couldn't reach 'lmms-lab/POPE' on the Hub")

    monkeypatch.setattr(lmms_engine, "task_manager", lambda *a: Manager)
    monkeypatch.setattr("lmms_eval.evaluator.simple_evaluate", refused)
    code, out, _ = run("evaluate", "embedded", "--tasks", "pope,scenes", "--limit", "2", "--out", str(tmp_path))
    out = " ".join(out.split())
    assert code == 1
    assert "could not run pope (ConnectionError: Couldn't reach" in out
    assert "--engine crossfuse --local DIR" in out
    assert "| scenes | accuracy" in out
