"""Training over every fusion: gradients, checkpointing, the loss alone, steps without images (invariant 9, G2, D3)."""

from __future__ import annotations

import pytest
import torch

import crossfuse as xf
from matrix import CONFIGURATIONS, adds_tokens, cross_attention, each_fusion, every_fusion, name_of
from tiny import I, assert_close, batch, fused, gradients, labelled, llava, rows_of

ROWS = [[2, I, 5], [6], [1, I, 2, I, 4]]
# CLIP reads its class token through this norm only; the language model never sees it (stock LLaVA too).
UNUSED = ("post_layernorm",)


@every_fusion
def test_every_trainable_parameter_receives_gradient_and_no_frozen_one(fusion):
    model = fused(fusion, text="qwen2", vision="clip")
    frozen = "multi_modal_projector.linear_1"
    for name, parameter in model.named_parameters():
        if frozen in name:
            parameter.requires_grad_(False)
    found = gradients(model, labelled(batch(*ROWS)))
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert name not in found
            continue
        if any(part in name for part in UNUSED):
            continue
        assert torch.isfinite(found[name]).all(), name
        if name.endswith("cross.k_proj.bias") and not fusion.joint_text:
            continue  # one bias for all keys shifts every score alike: its gradient is identically zero
        if name.endswith("attention.key.bias"):  # the same in the Q-Former
            continue
        assert found[name].abs().sum() > 0, name


@every_fusion
def test_checkpointing_changes_no_gradient(fusion):
    inputs = labelled(batch(*ROWS))
    whole = gradients(fused(fusion), inputs, use_cache=False)
    model = fused(fusion)
    model.activation_checkpointing_enable({"use_reentrant": False})
    checkpointed = gradients(model, inputs, use_cache=False)
    assert set(whole) == set(checkpointed)
    for name, gradient in whole.items():
        assert_close(checkpointed[name], gradient, msg=lambda text, name=name: f"{name}: {text}")


@cross_attention
def test_reentrant_checkpointing_is_refused_with_the_remedy(fusion):
    model, inputs = fused(fusion), labelled(batch(*ROWS))
    model.activation_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match=r"use_reentrant=True.*\{'use_reentrant': False\}"):
        model.train()(**inputs, use_cache=False)
    model.eval()(**inputs)  # nothing is checkpointed outside training


def test_reentrant_checkpointing_set_on_one_layer_is_found():
    """`every_n_layers` leaves the first or the last layer out; any one that checkpoints is enough to refuse."""
    import functools

    from torch.utils.checkpoint import checkpoint

    model, inputs = fused(xf.CrossAttention()), labelled(batch(*ROWS))
    layer = model.model.language_model.layers[2]
    layer.gradient_checkpointing = True
    layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=True)
    with pytest.raises(ValueError, match="use_reentrant"):
        model.train()(**inputs, use_cache=False)
    layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)
    model.train()(**inputs, use_cache=False)


@every_fusion
def test_the_loss_alone_equals_the_loss(fusion):
    """`return_logits=False`: the same loss and gradients, logits of labelled rows only."""
    inputs = labelled(batch(*ROWS))
    model = fused(fusion)
    for extra in ({}, {"num_items_in_batch": torch.tensor(40)}):
        full = model(**inputs, **extra)
        alone = model(**inputs, **extra, return_logits=False)
        assert_close(alone.loss, full.loss)
        following = torch.nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100) != -100
        assert_close(alone.logits.flatten(0, -2), full.logits[following])
        whole, part = gradients(model, inputs, **extra), gradients(model, inputs, return_logits=False, **extra)
        assert set(whole) == set(part)
        for name, gradient in whole.items():
            assert_close(part[name], gradient, msg=lambda text, name=name: f"{name}: {text}")


@each_fusion
def test_l4_num_items_in_batch_makes_accumulation_exact(fusion):
    """Two half batches divided by the items of both == one batch, with very different answer lengths."""
    model = fused(fusion)
    inputs = labelled(batch([2, I, 7], [9], [3, I, 6], [2, I, 7]), answer=1)
    inputs["labels"][0, -6:] = inputs["input_ids"][0, -6:]
    items = (inputs["labels"][:, 1:] != -100).sum()
    whole = gradients(model, inputs, num_items_in_batch=items)
    total: dict = {}
    singles = rows_of(inputs)
    for row in singles:
        for name, gradient in gradients(model, row, num_items_in_batch=items).items():
            total[name] = total.get(name, 0) + gradient
    for name, gradient in whole.items():
        assert_close(total[name], gradient, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@every_fusion
def test_m2_a_step_without_images_touches_every_parameter(fusion):
    """Every rank runs tower, projector and cross-attention in every step; the loss is that of the text alone."""
    inputs = labelled(batch([6], [4]))
    model = fused(fusion)
    found = gradients(model, inputs)
    if fusion.is_identity:
        return  # the unfused model outside a distributed run; see the test below
    for name, parameter in model.named_parameters():
        part = ".cross." in name or "vision_tower" in name or "multi_modal_projector" in name
        if parameter.requires_grad and part and not any(u in name for u in UNUSED):
            assert name in found, name
            if not getattr(fusion, "replace", False):
                assert not found[name].any(), name
    loss = model.train()(**inputs).loss
    if not getattr(fusion, "replace", False) and not adds_tokens(fusion):
        assert_close(loss, llava()(**inputs).loss)


@pytest.mark.parametrize("fusion", [f for f in CONFIGURATIONS if f.is_identity], ids=name_of)
def test_m2_identities_touch_tower_and_projector_in_a_distributed_run(fusion, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    model, inputs = fused(fusion), labelled(batch([6], [4]))
    found = gradients(model, inputs)
    missing = [
        n for n, p in model.named_parameters() if p.requires_grad and n not in found and not any(u in n for u in UNUSED)
    ]
    assert not missing
    assert_close(model.train()(**inputs).loss, llava()(**inputs).loss)


@each_fusion
def test_g2_a_frozen_tower_keeps_no_activations(fusion):
    """Memory saved for the backward does not grow inside the tower; unfreezing works without fusing again."""
    model = fused(fusion)
    tower = model.model.vision_tower
    tower.requires_grad_(False)
    model.activation_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    states = []
    tower.register_forward_hook(lambda module, args, out: states.append(out.last_hidden_state.requires_grad))
    saved = []

    def bytes_saved(images):
        tower_storages = []
        inside = [False]
        before = tower.register_forward_pre_hook(lambda module, args: inside.__setitem__(0, True))
        after = tower.register_forward_hook(lambda module, args, out: inside.__setitem__(0, False))
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: tower_storages.append(t.nbytes) or t if inside[0] else t, lambda t: t
        ):
            model.train()(**labelled(batch([1, *[I, 1] * images, 4])), use_cache=False).loss.backward()
        before.remove()
        after.remove()
        return sum(tower_storages)

    saved = [bytes_saved(1), bytes_saved(4)]
    tower.requires_grad_(True)
    unfrozen = bytes_saved(1)
    if fusion.is_identity:
        return  # the stock body runs the stock tower, whatever that keeps
    assert saved == [0, 0]
    assert states[:2] == [False, False]
    assert unfrozen > 0
    assert states[2] is True


@every_fusion
def test_d3_vision_in_float32_and_the_language_model_in_bfloat16(fusion):
    """Parts of different precision meet without autocast: new layers take the LLM's dtype, the loss stays close."""
    inputs = labelled(batch(*ROWS), 3)

    def calmer():
        """Weights scaled down: bfloat16 rounds to 3 digits, and the tiny model amplifies that on purpose."""
        model = llava()
        for parameter in model.model.language_model.parameters():
            parameter.data.div_(3 if parameter.ndim == 2 else 1)
        return model

    exact = xf.fuse(calmer(), fusion).train()(**inputs).loss.item()
    model = calmer()
    model.model.language_model.bfloat16()
    model.lm_head.bfloat16()
    model = xf.fuse(model, fusion)
    if fusion.is_identity:
        model.model.multi_modal_projector.float()
    loss = model.train()(**inputs).loss
    loss.backward()
    new = xf.fusion_parameters(model)
    assert {p.dtype for p in new.values()} <= {torch.bfloat16}
    assert abs(loss.item() - exact) < 0.02 * exact
    assert all(torch.isfinite(p.grad).all() for p in new.values() if p.requires_grad)


@each_fusion
def test_unfuse_after_training_leaves_the_base_weights_untouched(fusion):
    model, inputs = llava(), labelled(batch(*ROWS))
    model.requires_grad_(False)
    before, out = {n: t.clone() for n, t in model.state_dict().items()}, model(**inputs).logits
    model = xf.fuse(model, fusion)
    new = list(xf.fusion_parameters(model).values())
    if new:
        optimiser = torch.optim.SGD(new, lr=1.0)
        model.train()(**inputs).loss.backward()
        optimiser.step()
        model.eval()
        assert any(
            not torch.equal(p, q) for p, q in zip(new, xf.fusion_parameters(fused(fusion)).values(), strict=True)
        )
    xf.unfuse(model)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert torch.equal(model(**inputs).logits, out)


def test_replaced_self_attention_is_frozen_and_thawed_to_what_it_was():
    model = llava()
    user_frozen = model.model.language_model.layers[1].self_attn.k_proj.weight
    user_frozen.requires_grad_(False)
    before = {n: p.requires_grad for n, p in model.named_parameters()}
    xf.fuse(model, xf.CrossAttention(every=2, replace=True))
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {f"model.language_model.layers.1.self_attn.{k}_proj.weight" for k in "qkvo"}
    assert all(p.requires_grad for p in xf.fusion_parameters(model).values())
    xf.unfuse(model)
    assert {n: p.requires_grad for n, p in model.named_parameters()} == before


def test_new_layers_train_although_the_user_froze_the_model_before():
    model = llava()
    model.requires_grad_(False)
    xf.fuse(model, xf.CrossAttention())
    assert {n for n, p in model.named_parameters() if p.requires_grad} == set(xf.fusion_parameters(model))
