"""Recipes: unknown fields are refused with the nearest name, impossible values with the limit."""

import pytest

from crossfuse.training.recipe import Recipe


def test_unknown_field_suggests_the_nearest():
    with pytest.raises(ValueError, match=r"a recipe has no field 'learning_rat' \(did you mean 'learning_rate'\?\)"):
        Recipe(learning_rat=1e-3)


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [("steps", 0, "greater than or equal to 1"), ("learning_rate", 0, "greater than 0"), ("train", "all", "'lora'")],
)
def test_impossible_values_name_the_limit(field, value, limit):
    with pytest.raises(ValueError, match=limit):
        Recipe(**{field: value})


def test_a_recipe_survives_json():
    recipe = Recipe(train="fusion", steps=7)
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
