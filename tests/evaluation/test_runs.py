"""Evaluation runs: killed and gone on with, shared by processes, failing task by task, and light on memory."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

import crossfuse as xf
from crossfuse.evaluation.predictions import PredictionFile, of_shard, read_predictions
from crossfuse.evaluation.runs import ask, load_samples, prediction_files, score_task
from crossfuse.evaluation.samples import StoredSamples, picture_key, with_other_pictures
from crossfuse.evaluation.tasks import parse_tasks, task

COMMAND = [sys.executable, "-m", "crossfuse"]
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def evaluate(out: Path, *more: str, **options) -> subprocess.CompletedProcess:
    command = [*COMMAND, "evaluate", "embedded", "--out", str(out), *more]
    return subprocess.run(command, capture_output=True, text=True, env=ONE_THREAD, **options)


def answers(folder: Path, name: str = "scenes") -> dict[str, str]:
    predictions, _ = read_predictions(prediction_files(folder, name))
    return {i: p.answer for i, p in predictions.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run over ten scenes questions, asked one by one."""
    out = tmp_path_factory.mktemp("whole")
    done = evaluate(out, "--tasks", "scenes", "--limit", "10", "--batch-size", "1")
    assert done.returncode == 0, done.stderr
    return out / "embedded"


def test_u1_killed_after_four_answers_asks_the_other_six(whole, tmp_path, monkeypatch):
    script = textwrap.dedent(
        f"""
        import os, signal, sys
        import torch
        torch.set_num_threads(1)
        import crossfuse.evaluation.predictions as predictions
        append = predictions.PredictionFile.append
        def dying(self, answers):
            append(self, answers)
            if len(self) == 4: os.kill(os.getpid(), signal.SIGKILL)
        predictions.PredictionFile.append = dying
        from crossfuse.cli.main import main
        main(["evaluate", "embedded", "--tasks", "scenes", "--limit", "10", "--batch-size", "1",
              "--out", {str(tmp_path)!r}])
        """
    )
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=ONE_THREAD)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    folder = tmp_path / "embedded"
    assert len(answers(folder)) == 4
    assert not (folder / "scores.json").exists()
    model, processor = xf.load_embedded()
    calls = []
    generate = type(model).generate
    monkeypatch.setattr(type(model), "generate", lambda self, **kw: calls.append(kw) or generate(self, **kw))
    samples = load_samples(task("scenes"), None, None, 10)
    ask(model, processor, "embedded", task("scenes"), samples, folder, batch_size=1)
    assert len(calls) == 6
    assert answers(folder) == answers(whole)
    assert score_task(folder, "scenes") == score_task(whole, "scenes")
    assert score_task(folder, "scenes").metrics["accuracy"].n == 10


def test_u1_killed_at_any_moment_gives_the_same_score(whole, tmp_path):
    """SIGKILL from outside at three moments; no id is ever in the files twice."""
    for moment in (1.5, 4.0, 5.5):
        process = subprocess.Popen(
            [*COMMAND, "evaluate", "embedded", "--tasks", "scenes", "--limit", "10", "--batch-size", "1", "--out",
             str(tmp_path)],
            env=ONE_THREAD, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        time.sleep(moment)
        process.kill()
        process.wait()
    done = evaluate(tmp_path, "--tasks", "scenes", "--limit", "10", "--batch-size", "1")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "embedded"
    ids = [json.loads(line)["sample_id"] for line in (folder / "scenes.predictions.jsonl").read_text().splitlines()]
    assert len(ids) == len(set(ids)) == 10
    assert answers(folder) == answers(whole)
    assert json.loads((folder / "scores.json").read_text()) == json.loads((whole / "scores.json").read_text())


def test_u1_a_failing_task_leaves_the_earlier_ones_and_the_exit_code_tells(run, tmp_path):
    (tmp_path / "files").mkdir()
    code, out, _ = run(
        "evaluate", "embedded", "--tasks", "scenes,pope,easy-vqa", "--local", str(tmp_path / "files"), "--limit", "3",
        "--out", str(tmp_path),
    )  # fmt: skip
    assert code == 1
    assert "pope failed: ValueError" in out
    scores = json.loads((tmp_path / "embedded" / "scores.json").read_text())
    assert scores["scenes"]["metrics"]["accuracy"]["n"] == scores["easy-vqa"]["metrics"]["accuracy"]["n"] == 3
    assert "error" in scores["pope"]


def test_m3_two_processes_ask_each_sample_once(whole, tmp_path):
    """`accelerate launch` with two gloo processes: ten unique ids, the metric of one process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    config = Path(__file__).parents[2] / "recipes" / "accelerate" / "ddp-cpu.yaml"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    asked = ["evaluate", "embedded", "--tasks", "scenes", "--limit", "10", "--batch-size", "2", "--out", str(tmp_path)]
    done = subprocess.run(
        [*launch, "--main_process_port", port, "-m", "crossfuse", *asked],
        capture_output=True, text=True, env=ONE_THREAD, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "embedded"
    files = prediction_files(folder, "scenes")
    assert [f.name for f in files] == [f"scenes.predictions-{i}-of-2.jsonl" for i in range(2)]
    ids = [json.loads(line)["sample_id"] for f in files for line in f.read_text().splitlines()]
    assert len(ids) == len(set(ids)) == 10
    assert all(f.read_text() for f in files), "both processes had work"
    assert answers(folder) == answers(whole)
    assert score_task(folder, "scenes") == score_task(whole, "scenes")


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_m3_shards_are_a_partition(count):
    ids = [f"sample-{i}" for i in range(200)]
    parts = [[i for i in ids if of_shard(i, shard, count)] for shard in range(count)]
    assert sorted(i for part in parts for i in part) == sorted(ids)
    assert min(map(len, parts)) > 200 / count / 2


def test_m3_another_number_of_processes_goes_on_with_what_there_is(whole, tmp_path):
    model, processor = xf.load_embedded()
    samples = load_samples(task("scenes"), None, None, 10)
    for shard, count in ((0, 3), (0, 2), (0, 1)):
        ask(model, processor, "embedded", task("scenes"), samples, tmp_path, batch_size=4, shard=(shard, count))
    lines = [line for f in prediction_files(tmp_path, "scenes") for line in f.read_text().splitlines()]
    assert len(lines) == 10
    assert answers(tmp_path) == answers(whole)


def test_b3_any_batch_size_gives_the_answers_of_one_by_one(whole, tmp_path):
    model, processor = xf.load_embedded()
    samples = load_samples(task("scenes"), None, None, 10)
    ask(model, processor, "embedded", task("scenes"), samples, tmp_path, batch_size=7)
    assert answers(tmp_path) == answers(whole)
    line = json.loads((tmp_path / "scenes.predictions.jsonl").read_text().splitlines()[0])
    recorded = {"sample_id", "prompt_hash", "model", "fusion", "decoding", "dtype", "attn_implementation", "batch_size"}
    assert recorded <= set(line)


def test_c5_evaluation_keeps_no_logits(tmp_path):
    """200 items over a vocabulary of 150,000: the logits of all would be 120 MB a token."""
    psutil = pytest.importorskip("psutil")
    model, processor = _wide_embedded()
    samples = load_samples(task("scenes"), None, None, 200)
    process = psutil.Process()
    ask(model, processor, "wide", task("scenes"), samples[:8], tmp_path / "warm", batch_size=8, max_new_tokens=2)
    before = process.memory_info().rss
    ask(model, processor, "wide", task("scenes"), samples, tmp_path, batch_size=8, max_new_tokens=2)
    assert process.memory_info().rss - before < 200 * 2**20
    assert len(answers(tmp_path)) == 200


def _wide_embedded():
    """The embedded model with a head and embeddings of 150,000 rows."""
    model, processor = xf.load_embedded()
    with torch.no_grad():
        model.resize_token_embeddings(150_000, mean_resizing=False)
    return model.eval(), processor


def test_a_file_that_another_process_writes_is_refused(tmp_path, whole):
    settings_line = json.loads((whole / "scenes.predictions.jsonl").read_text().splitlines()[0])
    from crossfuse.evaluation.predictions import RunSettings

    settings = RunSettings(**{f: settings_line[f] for f in RunSettings.__dataclass_fields__})
    with (
        PredictionFile(tmp_path / "p.jsonl", settings),
        pytest.raises(ValueError, match="being written by another process"),
        PredictionFile(tmp_path / "p.jsonl", settings),
    ):
        pass


def test_line_separators_inside_answers_are_no_new_lines(tmp_path, whole):
    settings_line = json.loads((whole / "scenes.predictions.jsonl").read_text().splitlines()[0])
    from crossfuse.evaluation.predictions import RunSettings

    settings = RunSettings(**{f: settings_line[f] for f in RunSettings.__dataclass_fields__})
    odd = "a\u2028b\u0085c\x0cd"
    with PredictionFile(tmp_path / "p.jsonl", settings) as file:
        file.append([("q", "p", odd)])
    assert PredictionFile(tmp_path / "p.jsonl", settings).answered("q", "p") == odd


def test_shuffled_pictures_are_another_samples():
    samples = load_samples(task("easy-vqa"), None, None, 40)
    exchanged = with_other_pictures(samples)
    assert [s.record.id for s in exchanged] == [s.record.id for s in samples]
    assert all(picture_key(a.record) != picture_key(b.record) for a, b in zip(samples, exchanged, strict=True))


def test_scores_need_no_data_set_again(whole):
    stored = StoredSamples(whole / "scenes.samples.jsonl")
    assert all(not sample.record.images for sample in stored)
    assert len(set(stored.pictures)) == 10


def test_unknown_tasks_are_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"unknown task 'scene' \(did you mean 'scenes'\?\)"):
        parse_tasks("scene")


def test_score_command_is_pure_and_counts_missing_answers(run, whole, tmp_path):
    code, out, _ = run("score", str(whole), "--out", str(tmp_path / "s.json"))
    assert code == 0
    assert "accuracy/existence" in out
    rows = json.loads((tmp_path / "s.json").read_text())["rows"]
    stored = json.loads((whole / "scores.json").read_text())["scenes"]["metrics"]
    assert {r["metric"]: r["value"] for r in rows} == {k: m["value"] for k, m in stored.items()}
    lines = (whole / "scenes.predictions.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "scenes.samples.jsonl").write_text((whole / "scenes.samples.jsonl").read_text())
    (tmp_path / "scenes.predictions.jsonl").write_text("".join(lines[:7]))
    code, _, err = run("score", str(tmp_path / "scenes.predictions.jsonl"))
    assert code == 2
    assert "3 of 10 samples have no answer" in err
    code, out, _ = run("score", "--partial", str(tmp_path / "scenes.predictions.jsonl"))
    assert code == 0
    assert {row.split("|")[5].strip() for row in out.splitlines() if "| accuracy " in row} == {"7"}
