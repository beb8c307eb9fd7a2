"""Differences with intervals, against values worked out by hand and against other formulas; runs side by side."""

import itertools
import json

import numpy as np
import pytest

from crossfuse.data.records import Record
from crossfuse.evaluation import bootstrap
from crossfuse.evaluation.benchmarks.base import Benchmark, BenchmarkSample, Metric
from crossfuse.evaluation.bootstrap import (
    MetricDifference,
    SampleValues,
    cluster_of,
    mean_difference,
    sample_values,
    scored_differences,
)
from crossfuse.evaluation.generated_tasks import GENERATED_TASKS
from crossfuse.evaluation.model_runs import find_runs, with_baseline
from crossfuse.evaluation.predictions import PredictionFile, RunSettings
from crossfuse.evaluation.published import matching_rows, published_rows, published_thresholds
from crossfuse.evaluation.run_comparison import compare_runs, verdict
from crossfuse.evaluation.runs import describe_run, score_task, write_scores
from crossfuse.evaluation.samples import write_samples
from crossfuse.reports.run_report import write_report
from crossfuse.reports.run_thresholds import thresholds_table

SCENES = GENERATED_TASKS["scenes"]
KINDS = ("existence", "count", "relation")


def toy_samples(count: int) -> list[BenchmarkSample]:
    """Yes/no samples of three kinds; every second two share a picture."""
    return [
        BenchmarkSample(
            Record.of_question(f"q{i}", f"is it {i}?", kind=KINDS[i % 3]),
            {"answer": "yes" if i % 2 else "no", "kind": KINDS[i % 3], "group": KINDS[i % 3], "choice": None},
        )
        for i in range(count)
    ]


def right(samples, chosen) -> dict[str, str]:
    """Answers that are right on the chosen indices."""
    swapped = {"yes": "no", "no": "yes"}
    return {
        s.record.id: s.reference["answer"] if i in chosen else swapped[s.reference["answer"]]
        for i, s in enumerate(samples)
    }


def values(rights) -> SampleValues:
    return SampleValues(np.array(rights, dtype=float), np.ones(len(rights)))


def test_sample_values_are_kept_for_means_only():
    samples = toy_samples(12)
    answers = right(samples, range(7))
    whole = SCENES.scorer(answers, samples)
    found = sample_values(SCENES, answers, samples, whole)
    assert found["accuracy"].mean == 7 / 12
    assert found["accuracy/count"].weights.sum() == 4
    assert "unparsed" not in found or found["unparsed"].mean == 0


def test_a_pair_metric_is_no_mean_and_is_scored_on_every_draw():
    """Both questions of a pair must be right: alone, no sample can say so."""

    def pairs(answers, samples):
        groups = {}
        for s in samples:
            groups.setdefault(s.reference["group"], []).append(answers[s.record.id] == "yes")
        return {"pairs": Metric(np.mean([all(g) for g in groups.values()]), len(groups), "", "0-1")}

    bench = Benchmark("mmbench", "", "", "", "pairs", lambda *a: [], pairs)
    samples = [BenchmarkSample(Record.of_question(f"q{i}", "?"), {"group": f"g{i // 2}"}) for i in range(80)]
    good = {s.record.id: "yes" for s in samples}
    bad = {s.record.id: "yes" if i % 2 else "no" for i, s in enumerate(samples)}
    whole = bench.scorer(bad, samples)
    assert sample_values(bench, bad, samples, whole) == {}
    clusters = [cluster_of("mmbench", s, "") for s in samples]
    found = scored_differences(bench, [good], [bad], samples, clusters, ["pairs"], resamples=200)["pairs"]
    assert (found.value, found.low, found.high) == (1.0, 1.0, 1.0)
    assert found.resamples == 200


def test_intervals_of_scored_draws_do_not_depend_on_the_speed_of_the_machine(monkeypatch):
    """The number of draws follows from the numbers of samples and seeds; only what is far too slow gets no interval."""

    def share(answers, samples):
        return {"share": Metric(np.mean([answers[s.record.id] == "yes" for s in samples]), len(samples), "", "0-1")}

    bench = Benchmark("toy", "", "", "", "share", lambda *a: [], share)
    samples = toy_samples(60)
    good = {s.record.id: "yes" if i % 5 else "no" for i, s in enumerate(samples)}
    bad = {s.record.id: "yes" if i % 2 else "no" for i, s in enumerate(samples)}
    clusters = [s.record.id for s in samples]

    def found(step, limit=12_000):
        clock = itertools.count(0.0, step)
        monkeypatch.setattr(bootstrap.time, "perf_counter", lambda: next(clock))
        monkeypatch.setattr(bootstrap, "SCORINGS", limit)
        return scored_differences(bench, [good], [bad], samples, clusters, ["share"], resamples=1000)["share"]

    assert found(0.0) == found(0.05)
    assert found(0.0).resamples == 100  # 12,000 / (60 · 2)
    assert found(0.0, 60_000).resamples == 500
    slow = found(1.0)
    assert slow.low is None
    assert slow.reason == "scoring once takes 1.0 s, too long for 100 draws"


def test_interval_of_independent_samples_agrees_with_the_normal_formula():
    rng = np.random.default_rng(0)
    model, base = rng.random(2000) < 0.7, rng.random(2000) < 0.6
    found = mean_difference([values(model)], [values(base)], [str(i) for i in range(2000)], resamples=4000)
    difference = model.astype(float) - base
    half = 1.96 * difference.std() / np.sqrt(2000)
    assert found.value == pytest.approx(difference.mean())
    assert found.low == pytest.approx(difference.mean() - half, abs=0.003)
    assert found.high == pytest.approx(difference.mean() + half, abs=0.003)
    assert (found.wins, found.losses, found.n) == (int((model & ~base).sum()), int((base & ~model).sum()), 2000)


def test_copies_of_one_picture_add_no_certainty():
    rng = np.random.default_rng(1)
    model, base = rng.random(200) < 0.7, rng.random(200) < 0.6
    alone = mean_difference([values(model)], [values(base)], [str(i) for i in range(200)], resamples=3000)
    four = mean_difference(
        [values(np.repeat(model, 4))], [values(np.repeat(base, 4))], [str(i // 4) for i in range(800)], resamples=3000
    )
    assert four.high - four.low == pytest.approx(alone.high - alone.low, rel=0.1)


def test_equal_models_are_not_distinguishable_and_seeds_widen_the_interval():
    same = mean_difference([values([1, 0, 1])], [values([1, 0, 1])], ["a", "b", "c"], resamples=200)
    assert (same.value, same.low, same.high, same.verdict()) == (0, 0, 0, "not distinguishable")
    rng = np.random.default_rng(2)
    clusters = [str(i) for i in range(400)]
    base = [values(rng.random(400) < 0.5) for _ in range(3)]
    steady = [values(rng.random(400) < p) for p in (0.6, 0.6, 0.6)]
    shaky = [values(rng.random(400) < p) for p in (0.4, 0.6, 0.8)]
    widths = []
    for model in (steady, shaky):
        found = mean_difference(model, base, clusters, resamples=2000)
        widths.append(found.high - found.low)
    assert widths[1] > 1.5 * widths[0]


def test_one_picture_gives_no_interval():
    found = mean_difference([values([1, 1])], [values([0, 0])], ["a", "a"], resamples=200)
    assert found.low is None
    assert found.verdict() == "no interval"


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("accuracy", "better"),
        ("unparsed", "worse"),
        ("yes_ratio", "differs"),
        ("chair", "worse"),
        ("chair/all", "worse"),
    ],
)
def test_verdict_knows_which_direction_is_better(key, said):
    assert verdict(MetricDifference(0.1, 0.05, 0.15, 1, 0, 10, 100), key) == said


def write_run(folder, name, samples, answers, fusion=None, **more):
    """A finished run without a model: samples, predictions, scores and run.json."""
    settings = RunSettings(name, fusion or {"name": name}, {}, "float32", "sdpa", 4)
    write_samples(folder / "scenes.samples.jsonl", samples)
    with PredictionFile(folder / "scenes.predictions.jsonl", settings) as file:
        file.append(
            (s.record.id, s.record.messages[0].text, answers[s.record.id]) for s in samples if s.record.id in answers
        )
    (folder / "run.json").write_text(json.dumps({"name": name, "fusion": fusion or {"name": name}, **more}))
    write_scores(folder, {"scenes": score_task(folder, "scenes", partial=True)})
    return folder


@pytest.fixture
def runs(tmp_path):
    """A baseline with 30 of 90 right, one with 60 more, and one that is wrong on all."""
    samples = toy_samples(90)
    for name, chosen in (("insertion", range(30)), ("good", range(90)), ("bad", ())):
        write_run(tmp_path / "all" / name, name, samples, right(samples, chosen))
    return tmp_path / "all"


def test_runs_side_by_side(runs):
    compared = compare_runs(with_baseline(find_runs([runs]), None), resamples=300)
    assert compared.baseline == "insertion"
    (task,) = compared.tasks
    good, bad = task.differences["good"]["accuracy"], task.differences["bad"]["accuracy"]
    assert good.value == pytest.approx(2 / 3)
    assert (good.wins, good.losses, good.n) == (60, 0, 90)
    assert (good.verdict(), bad.verdict()) == ("better", "worse")
    assert (compared.wins("good"), compared.wins("bad")) == ((1, 1), (0, 1))
    assert with_baseline(find_runs([runs]), "bad")[0].name == "bad"
    with pytest.raises(ValueError, match=r"no run is called 'god' \(did you mean 'good'\?\)"):
        with_baseline(find_runs([runs]), "god")


def test_only_common_samples_are_compared(runs, tmp_path):
    samples = toy_samples(90)[:30]
    write_run(tmp_path / "few", "few", samples, right(samples, range(30)))
    models = with_baseline(find_runs([runs, tmp_path / "few"]), None)
    (task,) = compare_runs(models, resamples=200).tasks
    assert len(task.samples) == 30
    assert task.left_out == "30 samples that all runs have; some have 90"
    assert task.value("insertion", "accuracy") == 1.0
    assert task.differences["few"]["accuracy"].value == 0


def test_seeds_of_one_name_are_one_model_and_two_runs_of_one_name_are_refused(tmp_path):
    samples = toy_samples(30)
    for seed, chosen in enumerate((range(10), range(20))):
        write_run(tmp_path / "c" / "CA" / f"seed-{seed}", "CA", samples, right(samples, chosen), seed=seed)
        write_run(tmp_path / "c" / "insertion" / f"seed-{seed}", "insertion", samples, right(samples, ()), seed=seed)
    models = find_runs([tmp_path / "c"])
    assert [(m.name, len(m.folders)) for m in models] == [("insertion", 2), ("CA", 2)]
    (task,) = compare_runs(models, resamples=200).tasks
    assert task.value("CA", "accuracy") == pytest.approx(0.5)
    assert task.spread("CA", "accuracy") == pytest.approx(np.std([1 / 3, 2 / 3], ddof=1))
    with pytest.raises(ValueError, match="2 runs are called 'CA'"):
        find_runs([tmp_path / "c" / "CA" / "seed-0", tmp_path / "c" / "CA" / "seed-0"])


def test_report_is_one_file_with_every_table_in_four_formats(runs, tmp_path):
    lines = write_report(
        [runs], tmp_path / "r", baseline=None, published="all", resamples=200, command="crossfuse compare x"
    )
    page = (tmp_path / "r" / "report.html").read_text()
    assert 'src="http' not in page
    assert "<script" not in page
    assert "better than insertion: good (+66.7 points)" in page
    assert any("worse than insertion: bad (-33.3 points)" in line for line in lines)
    for ending in (".md", ".csv", ".json", ".tex"):
        assert (tmp_path / "r" / "tables" / f"differences{ending}").is_file()
    rows = json.loads((tmp_path / "r" / "tables" / "differences.json").read_text())["rows"]
    row = next(r for r in rows if r["model"] == "good" and r["metric"] == "accuracy")
    assert row["difference"] == pytest.approx(2 / 3)
    assert row["verdict"] == "better"


def test_one_model_is_no_comparison(runs, tmp_path):
    with pytest.raises(ValueError, match="needs two models; these folders hold 'good' alone"):
        write_report([runs / "good"], tmp_path / "r", baseline=None, published="all", resamples=200, command="")


def test_folders_without_a_run_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        find_runs([tmp_path / "none"])
    with pytest.raises(ValueError, match="holds no finished run"):
        find_runs([tmp_path])


def test_threshold_table_orders_thresholds_and_starts_with_the_baseline(tmp_path):
    samples = toy_samples(30)
    for name, threshold, count in (("insertion", None, 10), ("a", 0.08, 20), ("b", 0.16, 15)):
        fusion = {"name": "insertion"} if threshold is None else {"name": "text-anchors", "threshold": threshold}
        write_run(tmp_path / "t" / name, name, samples, right(samples, range(count)), fusion)
    table = thresholds_table(compare_runs(find_runs([tmp_path / "t"]), resamples=200))
    assert list(table.columns) == ["task", "metric", "source", "1", "0.16", "0.08", "best"]
    assert list(table.rows[0][3:]) == [pytest.approx(1 / 3), 0.5, pytest.approx(2 / 3), "0.08"]


def test_less_hallucination_is_a_win(tmp_path):
    from crossfuse.evaluation.benchmarks import benchmark

    lists = {"words": ["dog", "cat"], "safe": [], "there": {"dog": 0}, "imagined": {}, "truth": ["dog"], "hallu": []}
    samples = [BenchmarkSample(Record.of_question(f"q{i}", f"describe {i}"), lists) for i in range(12)]
    for name, said in (("first", "a dog and a cat"), ("second", "a dog")):
        folder = tmp_path / name
        write_samples(folder / "amber-generative.samples.jsonl", samples)
        settings = RunSettings(name, {"name": "none"}, {}, "float32", "sdpa", 1)
        with PredictionFile(folder / "amber-generative.predictions.jsonl", settings) as file:
            file.append((s.record.id, f"describe {i}", said) for i, s in enumerate(samples))
        (folder / "run.json").write_text(json.dumps({"name": name, "fusion": {"name": "none"}}))
        write_scores(folder, {"amber-generative": score_task(folder, "amber-generative")})
    comparison = compare_runs(find_runs([tmp_path]), resamples=100)
    key = benchmark("amber-generative").metric
    assert comparison.tasks[0].differences["second"][key].value == -50
    assert verdict(comparison.tasks[0].differences["second"][key], key) == "better"
    assert comparison.wins("second") == (1, 1)
    lines = write_report(
        [tmp_path], tmp_path / "cmp", baseline=None, published="none", resamples=100, command="crossfuse compare"
    )
    assert any("better than first: second (-50" in line for line in lines)


def test_published_numbers_are_those_of_the_papers():
    rows = {(r.model, r.fusion): r.values for r in published_rows()}
    assert rows["TinyLLaVA-1B", "text-anchors"]["pope.accuracy"] == 84.83
    assert rows["CASA-Qwen2_5-VL-3B", "cross-attention"]["infovqa.anls"] == 59.6
    assert published_thresholds()["mme.total"] == {
        "1": 1392, "0.16": 1391, "0.14": 1371, "0.12": 1452, "0.10": 1424, "0.08": 1465
    }  # fmt: skip
    assert {r.model for r in matching_rows("qwen", ["pope.accuracy"])} == {"Qwen2.5-VL-3B"}
    assert matching_rows("none", ["pope.accuracy"]) == []
    with pytest.raises(ValueError, match="no published row is called 'gpt'"):
        matching_rows("gpt", ["pope.accuracy"])


def test_published_keys_are_metrics_of_benchmarks():
    from crossfuse.evaluation.tasks import tasks

    known = tasks()
    for row in published_rows():
        for key in row.values:
            name, _, metric = key.partition(".")
            if name in known:
                assert metric == known[name].metric or (name, metric) == ("scienceqa", "image")


def test_describe_run_says_what_was_evaluated(tmp_path, embedded):
    describe_run(tmp_path, embedded[0], "mine", seed=3)
    found = json.loads((tmp_path / "run.json").read_text())
    assert (found["name"], found["fusion"], found["seed"]) == ("mine", {"name": "none"}, 3)
    assert found["parameters"] == sum(p.numel() for p in embedded[0].parameters())
