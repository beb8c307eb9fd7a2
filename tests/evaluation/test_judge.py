"""The judge of commentaries, against a fake endpoint on this machine."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from golden_files import GOLDEN, expected

from crossfuse.evaluation.benchmarks import benchmark
from crossfuse.evaluation.judge import Endpoint, judge, read_verdicts, win_rate, win_rate_by_step


class _Fake(BaseHTTPRequestHandler):
    """Chooses by the number in the model's words; the server's `failures` are answered first."""

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.asked.append((self.path, body, self.headers.get("Authorization")))
        if server.failures:
            self.send_error(server.failures.pop(0))
            return
        prompt = body["messages"][0]["content"]
        a, b = (prompt.split(f"---Commentary {name}---\n")[1].split("\n")[0] for name in "AB")
        event = int((a if a.startswith("model") else b).split()[-1])
        if event % 3 == 0:  # the model wins in both orders
            reply = f"Commentary {'A' if a.startswith('model') else 'B'} is better aligned with the human commentary"
        elif event % 3 == 1:  # whatever stands first wins
            reply = "Commentary A is better aligned with the human commentary"
        else:
            reply = "Both are fine."
        content = json.dumps({"choices": [{"message": {"role": "assistant", "content": reply}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    fake = ThreadingHTTPServer(("127.0.0.1", 0), _Fake)
    fake.asked, fake.failures = [], []
    thread = threading.Thread(target=fake.serve_forever, daemon=True)
    thread.start()
    yield fake
    fake.shutdown()
    fake.server_close()


@pytest.fixture
def endpoint(server, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return Endpoint(f"http://127.0.0.1:{server.server_address[1]}/v1", "fake-judge", pause=0.0, timeout=10)


@pytest.fixture
def golden():
    return benchmark("livesports3k").load(GOLDEN / "livesports3k"), expected("livesports3k")["answers"]


def test_win_rate_worked_out_by_hand(server, endpoint, golden, tmp_path):
    samples, answers = golden
    verdicts = judge(answers, samples, endpoint, tmp_path / "verdicts.jsonl")
    metrics = win_rate(verdicts)
    # Events 3 to 8: 3 and 6 are won in both orders (4), 4 and 7 in one of two (2), 5 and 8 are ties: 6 of 12.
    assert metrics["win_rate"].value == 50
    assert metrics["ties"].value == pytest.approx(100 * 4 / 12)
    assert metrics["order_decided"].value == 2
    assert metrics["win_rate"].n == 6
    assert "judge fake-judge, baseline GPT-4o" in metrics["win_rate"].variant
    path, body, key = server.asked[0]
    assert (path, key) == ("/v1/chat/completions", None)
    assert (body["temperature"], body["seed"], body["model"]) == (0, 42, "fake-judge")
    assert "human words 3" in body["messages"][0]["content"]


def test_verdicts_are_kept_and_not_asked_again(server, endpoint, golden, tmp_path):
    samples, answers = golden
    file = tmp_path / "verdicts.jsonl"
    server.failures[:] = []
    judge(answers, samples[:2], endpoint, file)
    with file.open("a") as lines:
        lines.write('{"sample_id": "half a li')  # a run killed while writing
    asked = len(server.asked)
    verdicts = judge(answers, samples, endpoint, file)
    assert len(server.asked) - asked == 2 * 4
    assert read_verdicts(file) == verdicts
    changed = answers | {samples[0].record.id: "model words 33"}
    judge(changed, samples, endpoint, file)
    assert len(server.asked) - asked == 2 * 5


def test_scoring_asks_nobody(golden, tmp_path, server, endpoint):
    samples, answers = golden
    assert benchmark("livesports3k").score(answers, samples)["win_rate"].value is None
    for sample, verdict in zip(samples, judge(answers, samples, endpoint, tmp_path / "v.jsonl"), strict=True):
        sample.reference["verdict"] = verdict.__dict__
    asked = len(server.asked)
    assert benchmark("livesports3k").score(answers, samples)["win_rate"].value == 50
    assert len(server.asked) == asked


def test_win_rate_by_training_step(endpoint, golden, tmp_path):
    samples, answers = golden
    later = dict.fromkeys(answers, "model words 3")
    curve = win_rate_by_step({200: later, 100: answers}, samples, endpoint, tmp_path / "v.jsonl")
    assert [(step, metric.value) for step, metric in curve.items()] == [(100, 50.0), (200, 100.0)]


def test_busy_endpoints_are_asked_again_and_refusals_are_not(server, endpoint, golden, tmp_path):
    samples, answers = golden
    server.failures[:] = [429, 503]
    assert judge(answers, samples[:1], endpoint, tmp_path / "a.jsonl")[0].first == "model"
    server.failures[:] = [401]
    with pytest.raises(RuntimeError, match="answered 401"):
        judge(answers, samples[:1], endpoint, tmp_path / "b.jsonl")
    assert not server.failures


def test_missing_words_and_addresses_are_refused(endpoint, golden, tmp_path):
    samples, _ = golden
    with pytest.raises(ValueError, match="needs an answer"):
        judge({}, samples, endpoint, tmp_path / "v.jsonl")
    with pytest.raises(ValueError, match="must start with http"):
        Endpoint("localhost:1", "x").ask("?")
    with pytest.raises(RuntimeError, match="no usable reply in 2 tries"):
        Endpoint("http://127.0.0.1:9/v1", "x", tries=2, pause=0).ask("?")
