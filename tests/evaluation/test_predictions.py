"""Prediction files: complete settings in each line, resumed after any interruption, never mixed."""

import json

import pytest

from crossfuse.evaluation.predictions import PredictionFile, RunSettings, prompt_hash

SETTINGS = RunSettings(
    model="tiny",
    fusion={"name": "insertion", "compress": None, "ids": (1, 2)},
    decoding={"do_sample": False},
    dtype="float32",
    attn_implementation="sdpa",
    batch_size=4,
)


def write(path, *answers, settings=SETTINGS):
    with PredictionFile(path, settings) as file:
        file.append(answers)


def test_b3_each_line_records_batch_size_dtype_and_attention(tmp_path):
    write(tmp_path / "p.jsonl", ("q1", "is it?", "yes"))
    (line,) = (tmp_path / "p.jsonl").read_text().splitlines()
    fields = json.loads(line)
    assert fields["batch_size"] == 4
    assert fields["dtype"] == "float32"
    assert fields["attn_implementation"] == "sdpa"
    assert fields["fusion"]["name"] == "insertion"
    assert fields["prompt_hash"] == prompt_hash("is it?")


def test_answers_are_on_disk_before_append_returns(tmp_path):
    path = tmp_path / "p.jsonl"
    with PredictionFile(path, SETTINGS) as file:
        file.append([("q1", "a", "1")])
        assert len(path.read_text().splitlines()) == 1
        file.append([("q2", "b", "2")])
        assert len(path.read_text().splitlines()) == 2


@pytest.mark.parametrize("cut", range(1, 40, 6))
def test_a_half_written_line_is_dropped_and_asked_again(tmp_path, cut):
    path = tmp_path / "p.jsonl"
    write(path, ("q1", "a", "1"), ("q2", "b", "2"))
    path.write_bytes(path.read_bytes()[:-cut])
    with PredictionFile(path, SETTINGS) as file:
        assert file.answered("q1", "a") == "1"
        assert file.answered("q2", "b") is None
        file.append([("q2", "b", "two")])
    assert [p.answer for p in PredictionFile(path, SETTINGS)] == ["1", "two"]


def test_another_prompt_under_the_same_id_is_asked_again(tmp_path):
    write(tmp_path / "p.jsonl", ("q1", "old", "1"))
    assert PredictionFile(tmp_path / "p.jsonl", SETTINGS).answered("q1", "new") is None


def test_answers_of_other_settings_are_not_mixed_in(tmp_path):
    import dataclasses

    write(tmp_path / "p.jsonl", ("q1", "a", "1"))
    with pytest.raises(ValueError, match="line 1 was answered with dtype = 'float32', this run has 'bfloat16'"):
        PredictionFile(tmp_path / "p.jsonl", dataclasses.replace(SETTINGS, dtype="bfloat16"))
    assert len(PredictionFile(tmp_path / "p.jsonl", dataclasses.replace(SETTINGS, batch_size=1))) == 1


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"sample_id": "a"}\n')
    with pytest.raises(ValueError, match="line 1 is no prediction"):
        PredictionFile(tmp_path / "p.jsonl", SETTINGS)


def test_appending_outside_with_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match="with"):
        PredictionFile(tmp_path / "p.jsonl", SETTINGS).append([("q", "a", "b")])
