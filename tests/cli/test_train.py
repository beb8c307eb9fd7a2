"""`crossfuse train` and `crossfuse export`: plans, runs, exports that answer like the trained model."""

import json
import math

import pytest
import torch

import crossfuse as xf
from crossfuse.cli.main import main
from crossfuse.data.collate import Collator
from crossfuse.data.records import Record
from crossfuse.training.export import load_export, merged_model, read_run
from crossfuse.training.trainer import TrainingRun

TINY = ["steps=2", "batch_size=2", "data.0.limit=8", "validation.0.limit=4", "eval_every=1", "warmup_steps=0"]


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    out, err = capsys.readouterr()
    return stop.value.code, out, err


@pytest.mark.parametrize("name", ["attanchor-tinyllava-1b", "embedded-casa-helium1-2b"])
def test_a_dry_run_prints_steps_tokens_memory_and_time(capsys, name):
    code, out, _ = call(capsys, "train", name, "--dry-run")
    assert code == 0
    for word in ("parameters", "steps ", "tokens ", "memory ", "time "):
        assert word in out
    assert ("39,036" if name.startswith("att") else "300") in out


def test_the_list_names_every_recipe_with_what_it_does(capsys):
    code, out, _ = call(capsys, "train", "list")
    assert code == 0
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert "LLaVA-Instruct-150K" in lines["attanchor-tinyllava-1b"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "attanchor-tinyllava"), "did you mean 'attanchor-tinyllava-1b'?"),
        (("train", "attanchor-tinyllava-1b", "lora.rnk=3"), "did you mean 'lora.rank'?"),
        (("train", "attanchor-tinyllava-1b", "--dry-run", "fusion.treshold=1"), "did you mean 'threshold'?"),
        (("export", "nowhere"), "nowhere holds no run: recipe.json is missing"),
        (("export", "nowhere", "--checkpoint", "first"), "--checkpoint must be best or last; got 'first'"),
        (("export", "nowhere", "--scores", "none.json"), "no such file: none.json"),
    ],
)
def test_mistakes_are_told_in_one_line(capsys, arguments, message):
    code, _, err = call(capsys, *arguments)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


@torch.no_grad()
def logits(model, processor):
    record = Record.of_question("q", "what color is the circle?", "red", [xf_image()])
    return model(**Collator(processor)([record])).logits


def xf_image():
    from crossfuse.data.scenes import make_scene, render

    return render(make_scene(0))


@pytest.mark.parametrize("name", ["embedded-attanchor-tinyllava-1b", "embedded-casa-helium1-2b"])
def test_a_run_is_trained_exported_and_loaded_again(capsys, tmp_path, name):
    run, merged, adapter = tmp_path / "run", tmp_path / "merged", tmp_path / "adapter"
    code, out, err = call(capsys, "train", name, *TINY, "--out", str(run))
    assert code == 0, err
    assert "2 steps in" in out
    losses = [json.loads(line)["loss"] for line in (run / "log.jsonl").read_text().splitlines() if '"loss"' in line]
    assert len(losses) == 2
    assert all(map(math.isfinite, losses))
    scores = tmp_path / "scores.json"
    metric = {"value": 0.625, "n": 8, "scale": "0-1"}
    scores.write_text(
        json.dumps({"scenes": {"metrics": {"accuracy": metric}, "shuffled_images": {"accuracy": metric}}})
    )
    assert call(capsys, "export", str(run), "--out", str(merged), "--scores", str(scores))[0] == 0
    assert call(capsys, "export", str(run), "--out", str(adapter), "--adapter-only")[0] == 0
    trained, processor = merged_model(*read_run(run))
    expected = logits(trained, processor)
    start, _ = xf.load_embedded("start")
    base = logits(xf.fuse(start, xf.fusion_of(trained)), processor)
    assert (expected - base).abs().max() > 1e-3
    assert torch.equal(logits(xf.from_pretrained(merged).eval(), processor), expected)
    assert torch.equal(logits(*load_export(adapter)), expected)
    assert not (adapter / "model.safetensors").exists()
    card = (merged / "README.md").read_text()
    assert "| scenes | accuracy | 0.625 | 0.625 | 8 | 0-1 |" in card
    assert "| `fusion.name` |" in card
    assert "| `steps` | `2` | - |" in card
    assert "2 optimiser steps, 4 samples" in card


def test_a_finished_run_is_not_written_over(capsys, tmp_path):
    arguments = ("train", "embedded-attanchor-tinyllava-1b", *TINY, "validation=null", "--out", str(tmp_path / "run"))
    assert call(capsys, *arguments)[0] == 0
    code, _, err = call(capsys, *arguments)
    assert code == 2
    assert "holds a run already" in err
    assert call(capsys, *arguments, "--resume")[0] == 0


def test_the_last_line_comes_from_one_process_alone(capsys, tmp_path, monkeypatch):
    from accelerate import PartialState

    arguments = ("train", "embedded-attanchor-tinyllava-1b", *TINY, "validation=null", "--out", str(tmp_path))
    monkeypatch.setattr("crossfuse.training.trainer.run", lambda *args, **kwargs: TrainingRun([(1, 2.0)], 3.0, 1, 2, 4))
    assert call(capsys, *arguments) == (0, f"1 steps in 3 s (finished), last loss 2.000; {tmp_path}\n", "")
    monkeypatch.setattr(PartialState, "is_main_process", property(lambda self: False))
    assert call(capsys, *arguments) == (0, "", "")
