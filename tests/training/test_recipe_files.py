"""Recipes from YAML: parents, changes, names, and the shipped ones against what the papers state."""

import subprocess
import sys

import pytest

from crossfuse.training.recipe import Recipe
from crossfuse.training.recipe_files import find_recipe, load_recipe, shipped_recipes, untagged_fields

NAMES = sorted(shipped_recipes())
ATTANCHOR = ["attanchor-tinyllava-1b", "attanchor-llava-1.5-7b", "attanchor-qwen2.5-vl-3b"]
CASA = [
    "casa-helium1-2b",
    "casa-helium1-2b-insertion",
    "casa-qwen2.5-vl-3b",
    "casa-qwen2.5-vl-3b-video",
    "casa-qwen2.5-vl-3b-livecc",
]


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        path = tmp_path / f"{name}.yaml"
        path.write_text(text)
        return path

    return write


def test_a_child_keeps_what_it_does_not_set(write):
    write(
        "parent", "description: p\nepochs: 2\nlora: {rank: 32, alpha: 64}\nlearning_rate: 1e-4\ntags: {epochs: paper}"
    )
    child = write("child", "description: c\nextends: parent\nsteps: 4\nlora: {rank: 8}\n")
    recipe = load_recipe(child)
    assert (recipe.steps, recipe.epochs) == (4, None)
    assert (recipe.lora.rank, recipe.lora.alpha) == (8, 64)
    assert recipe.learning_rate == 1e-4
    assert recipe.tags == {}


def test_another_fusion_replaces_the_fields_of_the_first(write):
    write("parent", "description: p\nfusion: {name: text-anchors, threshold: 0.2, copy_order: prompt}")
    same = write("same", "extends: parent\nfusion: {threshold: 0.3}")
    other = write("other", "extends: parent\nfusion: {name: image-anchors}")
    assert load_recipe(same).fusion == {"name": "text-anchors", "threshold": 0.3, "copy_order": "prompt"}
    assert load_recipe(other).fusion == {"name": "image-anchors"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: recipe\n", "runs in a circle: recipe -> recipe"),
        ("extends: [a, b]\n", "takes the name of one recipe"),
        ("extends: attanchor-tinyllava-1\n", r"did you mean 'attanchor-tinyllava-1b'\?"),
        ("steps: 3\nsteps: 4\n", "'steps' stands twice"),
        ("stepps: 3\n", r"recipe.yaml: a recipe has no field 'stepps' \(did you mean 'steps'\?\)"),
        ("lora: {rnk: 3}\n", r"recipe.yaml: `lora` of a recipe has no field 'rnk'"),
        ("tags: {learning_rat: paper}\n", r"`tags` names no field 'learning_rat' \(did you mean 'learning_rate'\?\)"),
        ("tags: {steps: mine}\nsteps: 3\n", "Input should be 'paper' or 'ours'"),
        ("- 3\n", "holds no recipe"),
        ("steps: [\n", "cannot be read"),
    ],
)
def test_files_with_faults_are_refused_in_one_line(write, text, message):
    with pytest.raises(ValueError, match=message) as error:
        load_recipe(write("recipe", text))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("lora.rnk=3", r"no field 'lora.rnk' \(did you mean 'lora.rank'\?\)"),
        ("learning_rat=3", r"did you mean 'learning_rate'\?"),
        ("steps.x=3", "'steps' is no section"),
        ("fusion.treshold=1", r"did you mean 'threshold'\?"),
        ("data.7.limit=1", "no item of a list of 1"),
        ("epochs", "is written key=value"),
        ("epochs=0", "epochs: Input should be greater than 0"),
        ("lora.rank=x", "lora.rank: Input should be a valid integer"),
    ],
)
def test_changes_with_faults_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        load_recipe("attanchor-tinyllava-1b", [change])


def test_changes_are_read_as_yaml():
    recipe = load_recipe(
        "attanchor-tinyllava-1b",
        [
            "learning_rate=3e-4",
            "steps=5",
            "data.0.limit=7",
            "validation_share=null",
            "patience=null",
            "data.0.path=a b",
        ],
    )
    assert (recipe.learning_rate, recipe.steps, recipe.epochs) == (3e-4, 5, None)
    assert (recipe.data[0].limit, recipe.data[0].path) == (7, "a b")
    assert "learning_rate" not in recipe.tags
    assert recipe.tags["scheduler"] == "paper"


@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_recipe_is_valid_and_says_where_each_setting_comes_from(name):
    recipe = load_recipe(name)
    assert recipe.description
    assert recipe.data
    assert untagged_fields(find_recipe(name)) == []


def test_every_paper_recipe_has_an_embedded_one():
    assert {f"embedded-{name}" for name in [*ATTANCHOR, *CASA]} <= set(NAMES)
    assert {f"{name}-{twin}" for name in ATTANCHOR for twin in ("baseline", "image-into-text")} <= set(NAMES)


@pytest.mark.parametrize("name", [n for n in NAMES if n.endswith(("-baseline", "-image-into-text"))])
def test_twins_differ_from_their_recipe_in_the_fusion_alone(name):
    twin, own = load_recipe(name), load_recipe(name.removesuffix("-baseline").removesuffix("-image-into-text"))
    different = {field for field in Recipe.model_fields if getattr(twin, field) != getattr(own, field)}
    assert different - {"tags"} == {"fusion", "description"}
    assert twin.fusion["name"] == ("insertion" if name.endswith("baseline") else "image-anchors")
    if "threshold" in twin.fusion:
        assert twin.fusion["threshold"] == own.fusion["threshold"]


# The settings that AttAnchor states, one line a model.
STATED = {
    "attanchor-tinyllava-1b": {
        "model": "bczhou/tiny-llava-v1-hf", "epochs": 4, "best_epoch": 2, "patience": 10000, "precision": "fp16",
        "threshold": 0.12, "rank": 32, "alpha": 64, "batch_size": 4, "accumulation": 4, "learning_rate": 1e-4,
        "warmup_ratio": 0.03, "weight_decay": 0.003, "optimizer": "adamw",
    },
    "attanchor-llava-1.5-7b": {
        "model": "llava-hf/llava-1.5-7b-hf", "epochs": 2, "best_epoch": 1, "patience": 5000, "precision": "fp16",
        "threshold": 0.12, "rank": 8, "alpha": 16, "batch_size": 8, "accumulation": 4, "learning_rate": 2e-4,
        "warmup_ratio": 0.03, "weight_decay": 0, "optimizer": "paged_adamw_8bit",
    },
    "attanchor-qwen2.5-vl-3b": {
        "model": "Qwen/Qwen2.5-VL-3B-Instruct", "epochs": 2, "best_epoch": 2, "patience": 4500, "precision": "bf16",
        "threshold": 0.08, "rank": 32, "alpha": 64, "batch_size": 8, "accumulation": 4, "learning_rate": 1e-4,
        "warmup_ratio": 0.1, "weight_decay": 0.03, "optimizer": "paged_adamw_8bit",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ATTANCHOR)
def test_attanchor_recipes_hold_what_the_paper_states(name):
    recipe = load_recipe(name)
    places = {"rank": recipe.lora.rank, "alpha": recipe.lora.alpha, "threshold": recipe.fusion["threshold"]}
    for field, value in STATED[name].items():
        assert places.get(field, getattr(recipe, field, None)) == value, field
        tagged = {"rank": "lora", "alpha": "lora", "threshold": "fusion"}.get(field, field)
        assert recipe.tags[tagged] == "paper", field
    assert recipe.lora.dropout == 0.05
    assert recipe.scheduler == "cosine"
    assert recipe.trainable.model_dump() == {"llm": "lora", "projector": "lora", "fusion": True, "vision_blocks": 0}
    if "qwen" in name:
        assert recipe.image_pixels.min == recipe.image_pixels.max == 672**2 == 576 * 28**2


def test_casa_recipes_hold_what_the_paper_states():
    helium, insertion, qwen, video, livecc = (load_recipe(name) for name in CASA)
    assert (helium.steps, helium.devices, helium.batch_size * helium.devices, helium.accumulation) == (40000, 64, 64, 2)
    assert (helium.packing.max_text_tokens, helium.packing.max_image_tokens) == (2048, 20480)
    assert helium.image_pixels.max == 952**2 == 1156 * 28**2
    assert helium.trainable.model_dump() == {"llm": "full", "projector": "full", "fusion": True, "vision_blocks": 4}
    assert insertion.packing.max_text_tokens * 2 == helium.packing.max_text_tokens
    assert insertion.packing.max_image_tokens * 2 == helium.packing.max_image_tokens
    assert insertion.batch_size == 2 * helium.batch_size
    assert insertion.fusion == {"name": "insertion"}
    assert (qwen.steps, qwen.trainable.llm, qwen.trainable.vision_blocks) == (25000, "frozen", 4)
    assert (video.steps, video.trainable.vision_blocks, video.packing) == (15000, 0, None)
    assert (video.video.fps, video.video.max_seconds, video.video.max_pixels) == (2, 180, 504**2)
    assert video.video.max_image_tokens == 46080
    assert any("LLaVA-Video-178K" in source.path for source in video.data)
    assert len(video.data) > 1
    assert livecc.fusion == {"name": "cross-attention", "joint_text": True, "video_windows": "frame"}
    assert (livecc.data[0].layout, video.data[0].layout) == ("stream", "chat")
    assert video.make_fusion().video_windows == "all"  # with a window a frame a question would see the last one alone
    for name in ("learning_rate", "optimizer", "warmup_steps"):
        assert helium.tags[name] == "ours"


def test_recipes_are_found_by_name_from_any_folder(tmp_path):
    code = "from crossfuse.training.recipe_files import find_recipe; print(find_recipe('casa-helium1-2b').is_file())"
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "True"


@pytest.mark.parametrize("name", ["attanchor-tinyllava", "nothing/here.yaml"])
def test_unknown_recipes_are_refused_with_the_shipped_ones(name):
    with pytest.raises(ValueError, match="attanchor-tinyllava-1b"):
        find_recipe(name)
