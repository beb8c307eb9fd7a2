"""What trains: parts, rates, LoRA only where meant, precision, checkpointing, and the table that says so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "fusions" / "anchors"))

from tiny_qwen import qwen

import crossfuse as xf
from crossfuse.training.groups import part_of, summarise, trainable, trainable_table, vision_blocks
from crossfuse.training.trainable import prepare_trainable
from crossfuse.training.trainer import train
from tiny import assert_close, batch, labelled, llava
from training_runs import EVERYTHING, FULL, Rows, collate, model_for, recipe

FAMILIES = {"llava": llava, "qwen": qwen}


def parts(names) -> set[str]:
    return {part_of(name) for name in names}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("projector", ["frozen", "lora", "full"])
@pytest.mark.parametrize("target", [None, "all-linear"])
def test_p2_lora_reaches_the_decoder_and_the_projector_only_if_the_recipe_says_so(family, projector, target):
    chosen = recipe(trainable={"llm": "lora", "projector": projector}, lora={"rank": 2, "target_modules": target})
    model = prepare_trainable(xf.fuse(FAMILIES[family](), xf.TextAnchors()), chosen)
    adapted = [name for name, _ in model.named_parameters() if "lora_" in name]
    assert parts(adapted) == ({"llm", "projector"} if projector == "lora" else {"llm"})
    assert not any("patch_embed" in name or "lm_head" in name for name in adapted)
    trained = [name for name, _ in trainable(model) if "lora_" not in name]
    assert parts(trained) == ({"projector"} if projector == "full" else set())


@pytest.mark.parametrize("family", FAMILIES)
def test_p2_new_layers_are_trained_in_full_or_adapted_never_both(family):
    everywhere = r".*\.(q|k|v|o)_proj"
    for full in (True, False):
        chosen = recipe(trainable={"fusion": full}, lora={"rank": 2, "target_modules": everywhere})
        model = prepare_trainable(xf.fuse(FAMILIES[family](), xf.CrossAttention()), chosen)
        names = [name for name, _ in trainable(model)]
        cross = [name for name in names if ".cross." in name]
        assert cross
        assert all(("lora_" in name) is not full for name in cross)
        assert not any(part_of(name) == "vision" for name in names)
        assert all("language_model.layers" in name for name in names)


def test_p2_replaced_self_attention_gets_no_adapter():
    chosen = recipe(lora={"rank": 2})
    model = prepare_trainable(xf.fuse(llava(), xf.CrossAttention(every=2, replace=True)), chosen)
    adapted = {name for name, _ in model.named_modules() if name.endswith("lora_A")}
    assert not any("layers.1.self_attn" in name for name in adapted)
    assert any("layers.1.mlp" in name for name in adapted)
    assert any("layers.0.self_attn" in name for name in adapted)


def test_p2_a_pattern_that_matches_nothing_says_what_it_is_matched_against():
    chosen = recipe(lora={"target_modules": "q_proj"})
    with pytest.raises(ValueError, match=r"'q_proj' matches no linear layer .* such as model\.language_model\.layers"):
        prepare_trainable(xf.fuse(llava(), xf.Insertion()), chosen)


def test_full_llm_with_an_adapted_projector_is_refused():
    chosen = recipe(trainable={"llm": "full", "projector": "lora"})
    with pytest.raises(ValueError, match="would keep the LLM twice; use projector=full or frozen"):
        prepare_trainable(xf.fuse(llava(), xf.Insertion()), chosen)


def test_the_last_vision_blocks_are_the_last_ones_in_use():
    """LLaVA reads an inner layer: what lies behind it would never see a gradient."""
    model = llava()
    assert vision_blocks(model, 1)[0].endswith("layers.1")
    model.config.vision_feature_layer = -2
    assert vision_blocks(model, 1)[0].endswith("layers.0")
    with pytest.raises(ValueError, match="must be at most 1, the blocks in use; got 2"):
        vision_blocks(model, 2)
    assert vision_blocks(qwen(), 2) == ["model.visual.blocks.0", "model.visual.blocks.1"]


@pytest.mark.parametrize("llm", ["lora", "frozen", "full"])
def test_every_part_moves_at_its_own_rate_and_nothing_else_moves(llm):
    """One step of Adam moves a weight by about its rate."""
    rates = {"llm": 1e-3, "projector": 2e-3, "fusion": 4e-3, "vision": 8e-3}
    chosen = recipe(
        steps=1, trainable={**EVERYTHING, "llm": llm}, learning_rates=rates, lora={"rank": 4}, max_grad_norm=1e9,
        scheduler="constant",
    )  # fmt: skip
    model = model_for(xf.CrossAttention(), chosen)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trained = {name for name, _ in trainable(model)}
    train(model, Rows(), collate, chosen)
    moved = {
        n: (t - before[n]).abs().max().item() for n, t in model.state_dict().items() if not torch.equal(t, before[n])
    }
    assert set(moved) <= trained
    assert (
        parts(trained) == parts(moved) == ({"projector", "fusion", "vision"} | ({"llm"} if llm != "frozen" else set()))
    )
    for name, distance in moved.items():
        if name.endswith("k_proj.bias"):
            continue  # a bias of all keys alike changes no attention: its gradient is rounding noise
        assert distance == pytest.approx(rates[part_of(name)], rel=0.02), name


def test_g2_a_frozen_tower_keeps_nothing_for_the_backward_pass():
    """Checkpointing and LoRA: no tensor saved inside the tower, for the baseline too."""
    for fusion in (xf.Insertion(), xf.TextAnchors(threshold=0.1), xf.CrossAttention()):
        chosen = recipe(steps=1, gradient_checkpointing=True, lora={"rank": 2})
        model = model_for(fusion, chosen)
        tower = model.get_base_model().model.vision_tower
        saved, states = [], []
        inside = [False]
        tower.register_forward_pre_hook(lambda m, a, inside=inside: inside.__setitem__(0, True))
        tower.register_forward_hook(
            lambda m, a, out, inside=inside, states=states: (
                inside.__setitem__(0, False), states.append(out.last_hidden_state.requires_grad)
            )[0]
        )  # fmt: skip
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, inside=inside, saved=saved: (saved.append(t.nbytes) if inside[0] else None, t)[1], lambda t: t
        ):
            train(model, Rows(), collate, chosen)
        assert states == [False]
        assert sum(saved) == 0


@pytest.mark.parametrize("fusion", [xf.Insertion(), xf.CrossAttention()])
def test_gradient_checkpointing_changes_no_loss(fusion):
    runs = []
    for checkpointing in (False, True):
        chosen = recipe(steps=3, trainable=EVERYTHING, gradient_checkpointing=checkpointing)
        runs.append([loss for _, loss in train(model_for(fusion, chosen), Rows(), collate, chosen).losses])
    assert runs[1] == pytest.approx(runs[0], rel=1e-5)


@pytest.mark.parametrize("fusion", [xf.Insertion(), xf.TextAnchors(threshold=0.1), xf.CrossAttention(joint_text=True)])
@pytest.mark.parametrize("chosen", [{"trainable": EVERYTHING, "lora": {"rank": 4}}, {"trainable": FULL}])
def test_bf16_trains_float32_weights_close_to_float32(fusion, chosen):
    losses = {}
    for precision in ("fp32", "bf16"):
        settings = recipe(steps=3, precision=precision, learning_rate=1e-4, **chosen)
        model = xf.fuse(llava(), fusion)
        for parameter in model.model.language_model.parameters():
            parameter.data.div_(3 if parameter.ndim == 2 else 1)  # bfloat16 keeps 3 digits; the tiny model amplifies
        torch.manual_seed(0)
        model = prepare_trainable(model, settings)
        assert {p.dtype for _, p in trainable(model)} == {torch.float32}
        losses[precision] = [loss for _, loss in train(model, Rows(), collate, settings).losses]
        assert "forward" not in model.__dict__  # accelerate's autocast wrapper is off again
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.05)
    assert losses["bf16"] != losses["fp32"]


def test_the_table_counts_every_parameter_once():
    chosen = recipe(trainable=EVERYTHING, lora={"rank": 4}, learning_rates={"fusion": 1e-4})
    plain = xf.fuse(llava(), xf.CrossAttention())
    expected = {part: sum(p.numel() for n, p in plain.named_parameters() if part_of(n) == part) for part in
                ("llm", "projector", "fusion", "vision")}  # fmt: skip
    model = model_for(xf.CrossAttention(), chosen)
    lines = {line.part: line for line in summarise(model, chosen)}
    assert {part: line.parameters for part, line in lines.items()} == expected
    assert lines["fusion"].trained == expected["fusion"]
    assert lines["projector"].trained == expected["projector"]
    assert lines["llm"].trained == lines["llm"].lora > 0
    assert lines["llm"].modules == 3 * 7
    assert 0 < lines["vision"].trained < expected["vision"]
    assert lines["vision"].lora == 0
    table = trainable_table(model, chosen).splitlines()
    assert table[0].split("  ")[0].strip() == "part"
    assert table[3].split()[:3] == ["fusion", f"{expected['fusion']:,}", f"{expected['fusion']:,}"]
    assert "0.0001" in table[3]
    assert table[-1].startswith("all")


def test_frozen_weights_beside_lora_are_half_precision():
    chosen = recipe(precision="bf16", lora={"rank": 2})
    model = prepare_trainable(xf.fuse(llava(), xf.Insertion()), chosen)
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}


def test_wrapped_blocks_give_the_outputs_of_the_plain_model():
    """PEFT's wrappers (projector, vision blocks, cross-attention in full) change nothing before the first step."""
    inputs = labelled(batch([2, "I", 6], [1, "I", 5]))
    chosen = recipe(trainable=EVERYTHING)
    plain = xf.fuse(llava(), xf.CrossAttention()).eval()
    model = model_for(xf.CrossAttention(), chosen).eval()
    with torch.no_grad():
        assert_close(model(**inputs).logits, plain(**inputs).logits)
