"""The paper recipes, end to end, on tiny random models of the same classes and processors."""

import math

import pytest
import torch
from paper_models import helium, llava, llava_json, qwen

import crossfuse as xf
from crossfuse.training.export import export_run
from crossfuse.training.recipe_files import load_recipe
from crossfuse.training.trainer import run

STEPS = 4


def run_recipe(name, tmp_path, *changes, side=56):
    """Four steps of a shipped recipe on the data made here; (recipe, result, folder, lines said)."""
    file, pictures = llava_json(tmp_path / "data", side=side)
    recipe = load_recipe(
        name,
        [
            f"steps={STEPS}",
            f"data=[{{path: {file}, images: {pictures}}}]",
            "validation_share=null",
            "patience=null",
            "workers=0",
            *changes,
        ],
    )
    said = []
    torch.manual_seed(0)
    result = run(recipe, tmp_path / "run", progress=lambda info: None, say=said.append)
    assert result.steps == STEPS
    assert [step for step, _ in result.losses] == [1, 2, 3, 4]
    assert all(math.isfinite(loss) for _, loss in result.losses)
    return recipe, result, tmp_path / "run", said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attanchor-tinyllava-1b", "attanchor-llava-1.5-7b"])
def test_attanchor_llava_recipe_runs(name, tmp_path):
    recipe, result, folder, said = run_recipe(
        name, tmp_path, f"model={llava(tmp_path / 'model')}", "batch_size=2", "accumulation=2"
    )
    assert result.image_tokens % 576 == 0
    assert result.image_tokens > 0
    assert any("fp16 is replaced by fp32" in line for line in said)
    assert any("paged_adamw_8bit is replaced" in line for line in said) == (recipe.optimizer == "paged_adamw_8bit")
    export_run(folder, tmp_path / "merged")
    model = xf.from_pretrained(tmp_path / "merged")
    assert type(model).__name__ == "LlavaForConditionalGeneration"
    assert xf.fusion_of(model) == xf.TextAnchors(threshold=0.12)


@pytest.mark.slow
def test_attanchor_qwen_recipe_runs_with_576_image_tokens(tmp_path):
    _, result, _, said = run_recipe(
        "attanchor-qwen2.5-vl-3b",
        tmp_path,
        f"model={qwen(tmp_path / 'model')}",
        "batch_size=2",
        "accumulation=1",
    )
    assert result.image_tokens % 576 == 0
    assert result.image_tokens > 0
    assert any("paged_adamw_8bit is replaced" in line for line in said)


@pytest.mark.slow
def test_casa_helium_recipe_runs(tmp_path):
    _, result, folder, said = run_recipe(
        "casa-helium1-2b",
        tmp_path,
        f"compose.llm={helium(tmp_path / 'llm')}",
        f"compose.vision={qwen(tmp_path / 'vision')}",
        "packing.max_text_tokens=64",
        "packing.max_image_tokens=64",
    )
    assert result.image_tokens > 0
    table = next(line for line in said if "parameters" in line and "trained" in line)
    trained = {row.split()[0]: int(row.split()[2].replace(",", "")) for row in table.splitlines()[1:]}
    assert all(trained[part] > 0 for part in ("llm", "projector", "fusion", "vision"))
    export_run(folder, tmp_path / "merged")
    assert xf.fusion_of(xf.from_pretrained(tmp_path / "merged")) == xf.CrossAttention()
