"""Plans without weights: shapes, parameters, steps, tokens; what is not known is said."""

import pytest
import torch
from transformers import AutoConfig

import crossfuse as xf
from crossfuse.training.groups import summarise
from crossfuse.training.plan import plan
from crossfuse.training.recipe_files import load_recipe, shipped_recipes
from crossfuse.training.shapes import KNOWN_SHAPES, empty_model
from crossfuse.training.trainable import prepare_trainable


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("attanchor-tinyllava-1b", 1.410), ("attanchor-llava-1.5-7b", 7.063), ("attanchor-qwen2.5-vl-3b", 3.755)],
)
def test_published_shapes_have_the_parameters_of_their_checkpoints(name, billions):
    model = empty_model(load_recipe(name))
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 3) == billions


@pytest.mark.slow
def test_every_shipped_recipe_has_a_plan():
    # Twins and variants have the shapes of theirs; each family once is enough.
    for name in ("casa-helium1-2b", "casa-qwen2.5-vl-3b-livecc", "attanchor-tinyllava-1b-mix-vsft-mini"):
        found = plan(load_recipe(name), measure=False)
        assert all(size >= 0 for size in found.memory.values()), name
        assert found.operations > 0
    for name in shipped_recipes():
        recipe = load_recipe(name)
        wanted = recipe.model or recipe.compose.llm
        assert wanted in KNOWN_SHAPES or wanted.startswith("embedded"), name


def test_the_plan_counts_what_training_would_train():
    recipe = load_recipe("embedded-attanchor-tinyllava-1b")
    model, _ = xf.load_embedded("start")
    real = summarise(prepare_trainable(xf.fuse(model, recipe.make_fusion()), recipe), recipe)
    found = plan(recipe, measure=False)
    assert f"{sum(part.trained for part in real):,}" in found.table
    assert found.steps == recipe.steps
    assert found.samples_per_step == recipe.batch_size
    assert found.image_tokens == recipe.batch_size * 64
    trained = sum(part.trained for part in real)
    assert found.memory["gradients"] == 4 * trained
    assert found.memory["optimiser"] == 8 * trained


def test_steps_follow_from_epochs_and_the_known_size_of_the_data():
    found = plan(load_recipe("attanchor-tinyllava-1b", ["validation_share=null", "patience=null"]), measure=False)
    # 157,712 records: 39,428 batches of 4, 9,857 steps an epoch, 4 epochs.
    assert found.steps == 4 * 9857
    assert found.image_tokens == 16 * 576
    assert any("157,712 records" in note for note in found.notes)


def test_unknown_sizes_are_said():
    recipe = load_recipe("attanchor-tinyllava-1b-mix-vsft-mini", ["data=[{path: somebody/something}]"])
    found = plan(recipe, measure=False)
    assert found.steps is None
    assert any("unknown" in line for line in found.lines())
    assert any("its size not known" in note for note in found.notes)


def test_a_size_is_said_with_who_states_it_or_as_an_estimate():
    mini = plan(load_recipe("attanchor-tinyllava-1b-mix-vsft-mini"), measure=False)
    assert any("8,500 records (an estimate) of 350 text tokens (an estimate)" in note for note in mini.notes)
    assert mini.steps is not None
    whole = plan(load_recipe("attanchor-tinyllava-1b-mix-vsft"), measure=False)
    assert any("259,155 records (by its page, split train)" in note for note in whole.notes)


def test_clips_take_the_tokens_of_their_layout():
    """A minute at 2 fps and 504 x 504: pairs of frames in a chat (60 x 324), single ones in a stream (120 x 324)."""
    changes = ["model=Qwen/Qwen2.5-VL-3B-Instruct", "data=[{path: lmms-lab/LLaVA-Video-178K}]"]
    chat = plan(load_recipe("casa-qwen2.5-vl-3b-video", changes), measure=False)
    stream = plan(load_recipe("casa-qwen2.5-vl-3b-livecc"), measure=False)
    assert chat.image_tokens == 128 * 60 * 18 * 18
    assert stream.image_tokens == 128 * 120 * 18 * 18


def test_the_frames_of_rendered_clips_are_counted():
    questions = plan(load_recipe("embedded-casa-qwen2.5-vl-3b-video"), measure=False)
    events = plan(load_recipe("embedded-casa-qwen2.5-vl-3b-livecc"), measure=False)
    assert questions.image_tokens == events.image_tokens == 16 * 4 * 64


def test_packed_rows_fill_their_budgets_and_the_twin_has_as_many_tokens():
    found = plan(load_recipe("casa-helium1-2b"), measure=False)
    twin = plan(load_recipe("casa-helium1-2b-insertion"), measure=False)
    assert found.text_tokens <= 128 * 2048
    assert found.image_tokens <= 128 * 20480
    assert max(found.text_tokens / (128 * 2048), found.image_tokens / (128 * 20480)) == pytest.approx(1, abs=1e-3)
    assert (twin.text_tokens, twin.image_tokens) == (found.text_tokens, found.image_tokens)
    assert twin.operations > 2 * found.operations


def test_gradient_checkpointing_lowers_memory_and_raises_operations():
    on = plan(load_recipe("attanchor-qwen2.5-vl-3b"), measure=False)
    off = plan(load_recipe("attanchor-qwen2.5-vl-3b", ["gradient_checkpointing=false"]), measure=False)
    assert on.memory["activations"] < off.memory["activations"] / 5
    assert off.operations < on.operations


def test_a_shape_that_is_not_known_is_refused_without_network(monkeypatch):
    def offline(*args, **kwargs):
        raise OSError("offline")

    monkeypatch.setattr(AutoConfig, "from_pretrained", offline)
    recipe = load_recipe("attanchor-tinyllava-1b", ["model=llava-hf/llava-1.5-7b"])
    with pytest.raises(ValueError, match=r"did you mean 'llava-hf/llava-1.5-7b-hf'\?"):
        plan(recipe, measure=False)


def test_a_folder_gives_the_shape_by_its_configuration_alone(tmp_path, embedded):
    embedded[0].config.save_pretrained(tmp_path)
    recipe = load_recipe("embedded-attanchor-tinyllava-1b", [f"model={tmp_path}"])
    model = empty_model(recipe)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in embedded[0].parameters())
    assert torch.device("meta") == next(model.parameters()).device
