"""`crossfuse bench stream`: the curve is drawn of what was measured, and what is judged is judged by rule."""

from __future__ import annotations

import csv
import json

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from crossfuse.cli.bench import bench
from crossfuse.streaming import benchmark
from crossfuse.streaming.benchmark import METHODS, Method, Subject, measure, verdicts
from crossfuse.streaming.endless import endless

SMALL = {
    "grid": 4, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def subject():
    draw = torch.Generator().manual_seed(0)
    frames = [torch.randn(16, 32, generator=draw) for _ in range(3)]
    return Subject("small", benchmark.build(SMALL), benchmark.words_processor(64), frames, (4, 4))


def test_caches_of_all_methods_are_what_they_should_be(subject):
    """16 image tokens, 1 delimiter, 8 words a frame; 3 layers, 2 key heads of 8, float32."""
    methods = {method.name: method for method in measure(subject, 6, every=2)}
    token = 3 * 2 * 2 * 8 * 4
    tokens = {name: method.session.memory()["self_attention"] / token for name, method in methods.items()}
    assert tokens["text only"] == tokens["cross-attention"] == 6 * 9
    assert tokens["insertion"] == 6 * (16 + 9)
    assert tokens["insertion, 4 : 1 pooled"] == 6 * (4 + 9)
    assert tokens["insertion, 16 : 1 pooled"] == 6 * (1 + 9)
    assert methods["cross-attention"].session.memory()["images"] == 16 * token
    assert methods["cross-attention, every third"].session.memory()["images"] == 16 * token / 3
    for method in methods.values():
        assert method.exact
        assert method.frames == [1, 2, 4, 5, 6]
        assert len(method.seconds) == len(method.megabytes) == 5


def test_ratios_are_judged_at_smollm2_from_frame_60_only(subject):
    methods = [Method(name, subject) for name in METHODS]
    slow = {"insertion": 6.5, "cross-attention": 1.0, "text only": 0.8, "cross-attention, every third": 1.0}
    for method in methods:
        method.frames, method.seconds = [58, 59, 60], [slow.get(method.name, 1.0)] * 3
    named = Subject("smollm2-135m", *list(vars(subject).values())[1:])
    assert [row.met for row in verdicts(named, methods)] == [True, True, False, True]
    assert [row.measured for row in verdicts(named, methods)][:3] == [6.5, 1.25, 1.25]
    assert [row.met for row in verdicts(subject, methods)] == [None, None, None, True]
    methods[1].exact = False
    assert verdicts(subject, methods)[-1].met is False


def test_interrupt_reports_what_there_is(subject):
    def stop(number):
        if number == 5:
            raise KeyboardInterrupt

    assert {tuple(method.frames) for method in measure(subject, 50, progress=stop)} == {(1, 2, 3, 4, 5)}
    with pytest.raises(ValueError, match="frames must be at least 3 and every at least 1; got 2 and 1"):
        measure(subject, 2)


def test_command_writes_picture_table_and_verdicts(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "NEW_TOKENS", 2)
    result = CliRunner().invoke(
        bench, ["stream", "--shape", "embedded", "--frames", "4", "--out", str(tmp_path), "--threads", "1"]
    )
    assert result.exit_code == 0, result.output
    assert "not judged" in result.output
    assert "cache is not exact" in result.output
    with Image.open(tmp_path / "stream-embedded.png") as picture:
        assert picture.size[0] > 1000
    rows = list(csv.DictReader((tmp_path / "stream-embedded.csv").open()))
    assert len(rows) == 4 * len(METHODS)
    written = json.loads((tmp_path / "stream-embedded.json").read_text())
    assert [method["method"] for method in written["methods"]] == list(METHODS)
    assert written["settings"]["image_tokens"] == 64
    assert {row["what"]: row["met"] for row in written["targets"]}["step: cross-attention / text only"] is None


def test_unknown_shape_is_refused_with_the_nearest():
    result = CliRunner().invoke(bench, ["stream", "--shape", "smollm2-135"])
    assert result.exit_code == 2
    assert "smollm2-135m" in result.output


def test_endless_stream_in_short():
    rows = {row.what: row for row in endless(60, new_tokens=1)}
    assert rows["largest position"].measured <= benchmark.BOUND
    assert rows["logits moved by the last frame's pixels"].met
    assert len(rows) == 4
    with pytest.raises(ValueError, match="at least 40 frames"):
        endless(10)
