"""Checkpoints: an interrupted run goes on with the losses of an unbroken one; files are whole or not there."""

from __future__ import annotations

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

import crossfuse as xf
from crossfuse.fusions.reorder import annealing_step
from crossfuse.training.checkpoints import CheckpointFolder, plain_name, trained_state
from crossfuse.training.guards import StopSignal
from crossfuse.training.trainer import check_directory, train
from tiny import batch, labelled, llava, logits
from training_runs import EVERYTHING, FULL, Rows, collate, model_for, recipe

CASES = {
    "lora": (xf.Insertion(), {"lora": {"rank": 4, "dropout": 0.2}}),
    "lora-and-full-parts": (xf.CrossAttention(), {"trainable": EVERYTHING, "lora": {"rank": 4, "dropout": 0.2}}),
    "fusion": (xf.CrossAttention(joint_text=True), {"trainable": {"llm": "frozen"}}),
    "full": (xf.TextAnchors(threshold=0.1), {"trainable": FULL, "accumulation": 2}),
}


def interrupted(fusion, chosen, out, at, **options):
    """The same run, stopped by a signal after `at` steps and resumed in a fresh model."""
    stop = StopSignal()

    def watch(info):
        stop.received = stop.received or info.step == at - 1

    first = train(model_for(fusion, chosen), Rows(), collate, chosen, out=out, stop=stop, progress=watch, **options)
    assert (first.stopped, first.steps) == ("signal", at)
    torch.manual_seed(99)  # a new process has another random state
    model = model_for(fusion, chosen)
    second = train(model, Rows(), collate, chosen, out=out, resume=True, **options)
    return first.losses + second.losses, second, model


@pytest.mark.parametrize("case", CASES)
def test_p3_resume_gives_the_losses_and_weights_of_an_unbroken_run(case, tmp_path):
    """8 steps of 2 in epochs of 6: the resume lies inside an epoch, and a later epoch follows."""
    fusion, fields = CASES[case]
    chosen = recipe(steps=8, weight_decay=0.01, warmup_steps=2, **fields)
    unbroken = model_for(fusion, chosen)
    whole = train(unbroken, Rows(), collate, chosen, out=tmp_path / "whole")
    losses, second, resumed = interrupted(fusion, chosen, tmp_path / "broken", at=3)
    assert losses == whole.losses
    assert second.samples == 5 * 2 * chosen.accumulation
    expected, found = trained_state(unbroken), trained_state(resumed)
    assert set(expected) == set(found)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    lines = [
        [json.loads(x) for x in (tmp_path / n / "log.jsonl").read_text().splitlines()] for n in ("whole", "broken")
    ]
    assert [(x["step"], x["loss"]) for x in lines[0]] == [(x["step"], x["loss"]) for x in lines[1]]


def test_p3_resume_at_the_end_of_an_epoch(tmp_path):
    fusion, fields = CASES["lora"]
    chosen = recipe(steps=9, **fields)
    whole = train(model_for(fusion, chosen), Rows(), collate, chosen)
    losses, _, _ = interrupted(fusion, chosen, tmp_path, at=6)
    assert losses == whole.losses


@pytest.mark.parametrize("case", ["lora", "lora-and-full-parts", "full", "fusion"])
def test_p3_a_checkpoint_holds_everything_that_was_trained(case, tmp_path):
    """Loaded into the untrained base by PEFT and `load_fusion` alone (or by name), it gives the trained model."""
    fusion, fields = CASES[case]
    chosen = recipe(**fields)
    model = model_for(fusion, chosen)
    train(model, Rows(), collate, chosen, out=tmp_path)
    folder = tmp_path / "last"
    assert not list(folder.glob("*.pt")) + list(folder.glob("*.pth")) + list(folder.glob("*.bin"))
    fresh = xf.load_fusion(llava(), folder)
    if (folder / "adapter_config.json").is_file():
        fresh = PeftModel.from_pretrained(fresh, folder)
    elif (folder / "trained.safetensors").is_file():
        fresh.load_state_dict(load_file(folder / "trained.safetensors"), strict=False)
    inputs = labelled(batch([2, "I", 6], [1, "I", 5]))
    assert torch.equal(logits(fresh.eval(), inputs), logits(model.eval(), inputs))
    base = xf.fuse(llava(), fusion)
    assert not torch.allclose(logits(base, inputs), logits(model, inputs), atol=1e-3)


def test_p3_a_continued_lora_run_saves_a_clean_adapter(tmp_path):
    """LoRA, save, continue, save, load: the same keys; the projector that was trained in full is in the file."""
    fusion, fields = CASES["lora-and-full-parts"]
    chosen = recipe(**fields)
    train(model_for(fusion, chosen), Rows(), collate, chosen, out=tmp_path / "first")
    loaded = PeftModel.from_pretrained(
        xf.load_fusion(llava(), tmp_path / "first" / "last"), tmp_path / "first" / "last"
    )
    from crossfuse.training.trainable import prepare_trainable

    again = prepare_trainable(loaded, chosen)
    train(again, Rows(seed=1), collate, chosen, out=tmp_path / "second")
    files = [load_file(tmp_path / run / "last" / "adapter_model.safetensors") for run in ("first", "second")]
    assert set(files[0]) == set(files[1])
    assert not any("base_layer" in key or ".default" in key for key in files[1])
    projector = [key for key in files[1] if "multi_modal_projector" in key]
    assert projector
    assert all(not torch.equal(files[0][key], files[1][key]) for key in projector)
    final = PeftModel.from_pretrained(
        xf.load_fusion(llava(), tmp_path / "second" / "last"), tmp_path / "second" / "last"
    )
    inputs = labelled(batch([2, "I", 6]))
    assert torch.equal(logits(final.eval(), inputs), logits(again.eval(), inputs))


def test_a_write_that_fails_leaves_the_checkpoint_before_it(tmp_path, monkeypatch):
    chosen = recipe(save_every=2, **CASES["lora"][1])
    calls = []

    def failing(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise OSError("No space left on device")
        return real(*args, **kwargs)

    import crossfuse.training.fused_trainer as module

    real = module.write_json
    monkeypatch.setattr(module, "write_json", failing)
    with pytest.raises(OSError, match="No space"):
        train(model_for(xf.Insertion(), chosen), Rows(), collate, chosen, out=tmp_path)
    monkeypatch.undo()
    assert CheckpointFolder(tmp_path).last == (tmp_path / "checkpoints" / "step-000002").resolve()
    whole = train(model_for(xf.Insertion(), chosen), Rows(), collate, chosen)
    resumed = train(model_for(xf.Insertion(), chosen), Rows(), collate, chosen, out=tmp_path, resume=True)
    assert resumed.losses == whole.losses[2:]
    assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == ["step-000004"]


def test_best_and_last_are_kept_and_nothing_else(tmp_path):
    chosen = recipe(steps=8, eval_every=2, learning_rate=0.3, **CASES["lora"][1])
    done = train(model_for(xf.Insertion(), chosen), Rows(), collate, chosen, out=tmp_path, validation=Rows(3, seed=5))
    best = min(done.validation, key=lambda entry: entry[1])[0]
    assert done.best_step == best
    assert [step for step, _ in done.validation] == [2, 4, 6, 8]
    folders = CheckpointFolder(tmp_path)
    assert folders.best == folders.path(best).resolve()
    assert folders.last == folders.path(8).resolve()
    assert {f.name for f in folders.folder.iterdir()} == {f"step-{best:06d}", "step-000008"}


def test_a_checkpoint_that_does_not_fit_names_the_keys(tmp_path):
    chosen = recipe(**CASES["lora"][1])
    train(model_for(xf.Insertion(), chosen), Rows(), collate, chosen, out=tmp_path)
    other = recipe(steps=6, lora={"rank": 8})
    with pytest.raises(ValueError, match=r"does not fit this model: .*lora_A.* has shape"):
        train(model_for(xf.Insertion(), other), Rows(), collate, other, out=tmp_path, resume=True)


def test_a_directory_with_a_run_is_not_written_over(tmp_path):
    from crossfuse.training.checkpoints import write_json

    chosen = recipe(**CASES["lora"][1])
    train(model_for(xf.Insertion(), chosen), Rows(), collate, chosen, out=tmp_path)
    write_json(tmp_path / "recipe.json", chosen.model_dump(mode="json"))
    with pytest.raises(ValueError, match=r"holds a run already \(step 4\); go on with resume"):
        check_directory(tmp_path, chosen, resume=False)
    check_directory(tmp_path, chosen.changed({"save_every": 3}), resume=True)
    with pytest.raises(ValueError, match=r"has another learning_rate; resume with its own recipe"):
        check_directory(tmp_path, chosen.changed({"learning_rate": 0.5}), resume=True)


def test_names_without_peft():
    assert plain_name("base_model.model.model.x.cross.modules_to_save.default.q.weight") == "model.x.cross.q.weight"
    assert plain_name("base_model.model.a.q_proj.base_layer.weight") == "a.q_proj.weight"


def test_the_annealing_of_a_reordering_goes_on_after_a_resume(tmp_path):
    """Its counter is no weight; without it the resumed run would start over at the first temperature."""
    fusion = xf.GumbelReorder(width=16, depth=1, temperature=1.0, final_temperature=0.05, anneal_steps=6)
    chosen = recipe(steps=6, trainable={"llm": "frozen"})
    unbroken = model_for(fusion, chosen)
    whole = train(unbroken, Rows(), collate, chosen, out=tmp_path / "whole")
    losses, _, resumed = interrupted(fusion, chosen, tmp_path / "broken", at=3)
    assert annealing_step(unbroken) == annealing_step(resumed) == 6
    assert losses == whole.losses
    expected, found = trained_state(unbroken), trained_state(resumed)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert json.loads((tmp_path / "broken" / "last" / "training.json").read_text())["annealing"] == 6
