"""Answers in batches equal answers one by one, a killed run goes on, and settings are recorded."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest
from PIL import Image

import crossfuse as xf
from crossfuse.data.records import Record
from crossfuse.evaluation.generation import answer, predict, prompt_text, run_settings
from crossfuse.evaluation.predictions import PredictionFile

FUSIONS = [
    None,
    xf.Insertion(),
    xf.TextAnchors(threshold=0.05),
    xf.CrossAttention(),
    xf.CrossAttention(joint_text=True),
]


def toy_questions() -> list[Record]:
    """Six yes/no questions of different lengths about six pictures."""
    colours = ["red", "blue", "green", "black", "yellow", "gray"]
    prompts = [
        "is there a circle?",
        "does the image contain a blue rectangle?",
        "is there a green shape in the image?",
        "is a star present?",
        "is the red circle left of the blue rectangle?",
        "is there a cross?",
    ]
    records = []
    for i, (colour, prompt) in enumerate(zip(colours, prompts, strict=True)):
        image = Image.new("RGB", (64, 64), "white")
        image.paste(Image.new("RGB", (24, 24), colour), (4 * i, 30 - 4 * i))
        records.append(Record.of_question(f"q{i}", prompt, "yes", [image]))
    return records


@pytest.fixture
def model_and_processor():
    return xf.load_embedded()


@pytest.mark.parametrize("fusion", FUSIONS, ids=str)
def test_b3_batch_size_does_not_change_answers(model_and_processor, fusion):
    model, processor = model_and_processor
    if fusion is not None:
        xf.fuse(model, fusion)
    processor.tokenizer.padding_side = "right"
    records = toy_questions()
    one_by_one = answer(model, processor, records, max_new_tokens=4, batch_size=1)
    assert answer(model, processor, records, max_new_tokens=4, batch_size=3) == one_by_one
    assert answer(model, processor, records, max_new_tokens=4, batch_size=6) == one_by_one
    assert processor.tokenizer.padding_side == "right", "the caller's tokenizer keeps its setting"


def test_records_with_and_without_images_mix(model_and_processor):
    model, processor = model_and_processor
    records = [*toy_questions()[:2], Record.of_question("text", "what color is the sky?")]
    together = answer(model, processor, records, max_new_tokens=3)
    assert together == [answer(model, processor, [record], max_new_tokens=3)[0] for record in records]


def test_the_right_answer_is_no_part_of_the_prompt(model_and_processor):
    model, processor = model_and_processor
    with_answer = toy_questions()[0]
    without = Record(id="q", images=with_answer.images, messages=with_answer.messages[:1])
    assert prompt_text(with_answer) == prompt_text(without) == "is there a circle?"
    options = {"max_new_tokens": 3}
    assert answer(model, processor, [with_answer], **options) == answer(model, processor, [without], **options)


def test_batch_size_below_one_is_refused(model_and_processor):
    with pytest.raises(ValueError, match="batch_size must be at least 1; got 0"):
        answer(*model_and_processor, toy_questions(), batch_size=0)


def test_b3_settings_are_read_off_the_model(model_and_processor):
    model, _ = model_and_processor
    xf.fuse(model, xf.TextAnchors(threshold=0.3))
    settings = run_settings(model, "embedded", batch_size=3, max_new_tokens=4)
    assert settings.fusion["name"] == "text-anchors"
    assert settings.fusion["threshold"] == 0.3
    assert (settings.dtype, settings.batch_size) == ("float32", 3)
    assert settings.attn_implementation == model.config.text_config._attn_implementation


def test_done_questions_are_not_asked_again(model_and_processor, tmp_path, monkeypatch):
    model, processor = model_and_processor
    settings = run_settings(model, "embedded", batch_size=2, max_new_tokens=4)
    path = tmp_path / "answers.jsonl"
    records = toy_questions()
    expected = answer(model, processor, records, max_new_tokens=4)
    predict(model, processor, records[:3], PredictionFile(path, settings))
    calls = []
    generate = type(model).generate
    monkeypatch.setattr(type(model), "generate", lambda self, **kw: calls.append(kw) or generate(self, **kw))
    counted = []
    assert predict(model, processor, records, PredictionFile(path, settings), progress=counted.append) == expected
    assert [len(call["input_ids"]) for call in calls] == [2, 1]
    assert counted == [3, 2, 1]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(line["sample_id"] for line in lines) == [record.id for record in records]
    assert {line["fusion"]["name"] for line in lines} == {"none"}


def test_a_killed_run_goes_on(model_and_processor, tmp_path):
    """The process is killed (SIGKILL) while it asks; what it had is kept, the rest is asked."""
    path = tmp_path / "answers.jsonl"
    script = textwrap.dedent(
        f"""
        import os, signal, sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        import torch
        torch.set_num_threads(1)
        import crossfuse as xf
        from test_generation import toy_questions
        from crossfuse.evaluation.generation import predict, run_settings
        from crossfuse.evaluation.predictions import PredictionFile
        model, processor = xf.load_embedded()
        settings = run_settings(model, "embedded", batch_size=1, max_new_tokens=4)
        done = []
        def progress(n):
            done.append(n)
            if len(done) == 5: os.kill(os.getpid(), signal.SIGKILL)
        predict(model, processor, toy_questions(), PredictionFile({str(path)!r}, settings), progress=progress)
        """
    )
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    model, processor = model_and_processor
    settings = run_settings(model, "embedded", batch_size=1, max_new_tokens=4)
    file = PredictionFile(path, settings)
    assert len(file) == 4
    records = toy_questions()
    assert predict(model, processor, records, file) == answer(model, processor, records, max_new_tokens=4)
    assert len(path.read_text().splitlines()) == 6
