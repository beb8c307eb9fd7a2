"""`run`: from a recipe to a directory with logs and checkpoints, on the embedded model."""

from __future__ import annotations

import json
import signal

import pytest
import torch
from safetensors.torch import load_file

import crossfuse as xf
from crossfuse.training.logs import StepInfo
from crossfuse.training.recipe import Recipe
from crossfuse.training.start import set_image_pixels, starting_model
from crossfuse.training.trainer import for_this_machine, run


def embedded_recipe(**fields) -> Recipe:
    scenes = {"path": "scenes", "kinds": ["colour"], "limit": 24}
    return Recipe(
        **{
            "model": "embedded:start", "fusion": {"name": "cross-attention"}, "data": [scenes], "steps": 4,
            "validation": [{**scenes, "split": "validation", "limit": 5}], "batch_size": 4, "eval_every": 2,
            "lora": {"rank": 4, "dropout": 0.1}, "trainable": {"projector": "full"}, "warmup_steps": 1, **fields,
        }
    )  # fmt: skip


def test_a_run_and_the_same_run_cut_in_two(tmp_path):
    said: list[str] = []
    whole = run(embedded_recipe(), tmp_path / "whole", say=said.append)
    assert any(line.startswith("part ") for line in said)
    assert json.loads((tmp_path / "whole" / "run.json").read_text())["steps"] == 4
    assert Recipe.model_validate_json((tmp_path / "whole" / "recipe.json").read_text()) == embedded_recipe()

    def interrupt(info: StepInfo) -> None:
        if info.step == 2:
            signal.raise_signal(signal.SIGTERM)

    said.clear()
    first = run(embedded_recipe(), tmp_path / "cut", progress=interrupt, say=said.append)
    assert first.stopped == "signal"
    assert said[-1] == f"SIGTERM: saved after step {first.steps}; go on with --resume"
    second = run(embedded_recipe(), tmp_path / "cut", resume=True, say=said.append)
    assert first.losses + second.losses == whole.losses
    assert dict(first.validation + second.validation) == dict(whole.validation)
    states = [load_file(tmp_path / name / "last" / "adapter_model.safetensors") for name in ("whole", "cut")]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def test_packed_training_of_the_embedded_model_and_the_stage_after_it(tmp_path):
    """`start_from` begins where the stage before has ended."""
    packed = embedded_recipe(
        packing={"max_text_tokens": 64, "max_image_tokens": 256}, batch_size=1, steps=2,
        trainable={"llm": "full", "projector": "full"},
    )  # fmt: skip
    done = run(packed, tmp_path / "first", say=lambda line: None)
    assert done.image_tokens > 0
    next_stage = embedded_recipe(start_from=str(tmp_path / "first"))
    model, _ = starting_model(next_stage)
    best = tmp_path / "first" / "best"
    trained = load_file(best / "trained.safetensors") | load_file(best / "fusion.safetensors")
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in trained.items())
    fresh = xf.fuse(xf.load_embedded("start")[0], xf.CrossAttention()).state_dict()
    assert any(not torch.equal(fresh[name], tensor) for name, tensor in trained.items())


def test_a_lora_stage_is_merged_into_the_next(tmp_path):
    run(embedded_recipe(steps=2), tmp_path / "first", say=lambda line: None)
    model, _ = starting_model(embedded_recipe(start_from=str(tmp_path / "first")))
    assert not any("lora_" in name or "base_layer" in name for name in model.state_dict())
    fresh = xf.fuse(xf.load_embedded("start")[0], xf.CrossAttention()).state_dict()
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, fresh[name])}
    assert any(name.endswith("self_attn.q_proj.weight") for name in moved)
    assert any("multi_modal_projector" in name for name in moved)
    assert any(".cross." in name for name in moved)
    with pytest.raises(ValueError, match="no such run"):
        starting_model(embedded_recipe(start_from=str(tmp_path / "nothing")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is replaced on a GPU")
def test_what_a_cpu_cannot_do_is_replaced_and_said():
    said: list[str] = []
    changed = for_this_machine(Recipe(precision="fp16", optimizer="paged_adamw_8bit"), said.append)
    assert (changed.precision, changed.optimizer) == ("fp32", "adamw")
    assert len(said) == 2
    assert "fp16" in said[0]
    assert "paged_adamw_8bit" in said[1]
    assert for_this_machine(Recipe(precision="bf16"), said.append).precision == "bf16"


def test_what_a_recipe_lacks_is_named(tmp_path):
    with pytest.raises(ValueError, match="names no model"):
        run(embedded_recipe(model=None), tmp_path / "a", say=lambda line: None)
    with pytest.raises(ValueError, match="names no data"):
        run(embedded_recipe(data=[]), tmp_path / "b", say=lambda line: None)
    with pytest.raises(ValueError, match="no kind of question is called 'color'"):
        run(embedded_recipe(data=[{"path": "scenes", "kinds": ["color"]}]), tmp_path / "c", say=lambda line: None)
    with pytest.raises(ValueError, match="processors that keep the aspect ratio"):
        set_image_pixels(xf.load_embedded()[1], 1, 2)
