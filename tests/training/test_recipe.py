"""Recipes: unknown fields are refused with the nearest name at every level, impossible values with the limit."""

import pytest

import crossfuse as xf
from crossfuse.training.recipe import Recipe


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"learning_rat": 1e-3}, r"a recipe has no field 'learning_rat' \(did you mean 'learning_rate'\?\)"),
        ({"lora": {"rnk": 3}}, r"`lora` of a recipe has no field 'rnk' \(did you mean 'rank'\?\)"),
        ({"trainable": {"lm": "full"}}, r"`trainable` of a recipe has no field 'lm' \(did you mean 'llm'\?\)"),
        ({"data": [{"pth": "x"}]}, r"`data` of a recipe has no field 'pth' \(did you mean 'path'\?\)"),
        ({"packing": {"max_text": 3}}, r"no field 'max_text' \(did you mean 'max_text_tokens'\?\)"),
        ({"fusion": {"name": "text-anchor"}}, r"unknown fusion 'text-anchor' \(did you mean 'text-anchors'\?\)"),
        ({"fusion": {"name": "text-anchors", "treshold": 0.1}}, r"no field 'treshold' \(did you mean 'threshold'\?\)"),
        ({"fusion": {"threshold": 0.1}}, "`fusion` needs a name"),
    ],
)
def test_unknown_fields_suggest_the_nearest(fields, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**fields)


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"steps": 0}, "greater than or equal to 1"),
        ({"learning_rate": 0}, "greater than 0"),
        ({"trainable": {"llm": "all"}}, "'frozen', 'lora' or 'full'"),
        ({"lora": {"dropout": 1.0}}, "less than 1"),
        ({"fusion": {"name": "text-anchors", "threshold": -1}}, "threshold must be at least 0"),
        ({"steps": 3, "epochs": 1}, "steps and epochs exclude each other"),
        ({"warmup_steps": 3, "warmup_ratio": 0.1}, "warmup_steps and warmup_ratio exclude"),
        ({"model": "a", "compose": {"llm": "b", "vision": "c"}}, "model and compose exclude"),
        ({"validation": "scenes", "validation_share": 0.1}, "validation and validation_share exclude"),
        ({"patience": 10}, "needs a validation loss"),
        ({"image_pixels": {"min": 4, "max": 2}}, "exceeds image_pixels.max=2"),
        ({"alignment_weight": 1.0}, "moves nothing while the projector is frozen"),
    ],
)
def test_impossible_values_name_the_limit(fields, limit):
    with pytest.raises(ValueError, match=limit):
        Recipe(**fields)


def test_defaults_are_said_in_the_recipe():
    recipe = Recipe()
    assert (recipe.steps, recipe.epochs, recipe.warmup_steps, recipe.warmup_ratio) == (100, None, 10, None)
    assert Recipe(epochs=2).steps is None


def test_a_recipe_survives_json():
    recipe = Recipe(steps=7, data="scenes", fusion="cross-attention", packing={"max_text_tokens": 9})
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
    assert recipe.data[0].path == "scenes"
    assert recipe.make_fusion() == xf.CrossAttention()


def test_changes_take_the_place_of_what_they_exclude_and_lose_their_tag():
    recipe = Recipe(steps=7, data=["scenes"], lora={"rank": 4, "alpha": 8}, tags={"steps": "paper", "lora": "paper"})
    changed = recipe.changed({"epochs": 2, "lora.rank": 8, "data.0.limit": 3, "packing.max_text_tokens": 5})
    assert (changed.steps, changed.epochs, changed.lora.rank, changed.lora.alpha) == (None, 2, 8, 8)
    assert changed.data[0].limit == 3
    assert changed.packing.max_text_tokens == 5
    assert "lora.rank" not in changed.tags
    assert changed.tags["lora.alpha"] == "paper"
    assert recipe.lora.rank == 4
    with pytest.raises(ValueError, match="'5' is no item of a list of 1"):
        recipe.changed({"data.5.limit": 3})
