"""GumbelReorder: what moves and what never does, training against use, annealing, saving, PEFT, measures."""

from __future__ import annotations

import pytest
import torch

import crossfuse as xf
from crossfuse.fusions.reorder import set_annealing_step
from crossfuse.fusions.reorder.measures import (
    OrderTracker,
    distance_from_identity,
    gradient_noise,
    learned_orders,
    sinkhorn_bytes,
)
from crossfuse.fusions.reorder.scorer import ReorderScorer
from tiny import BOS, I, batch, fused, gradients, labelled, llava, logits, prompt_mask

FUSION = xf.GumbelReorder(width=16, depth=1)
ROWS = [[3, I, 6], [2, I, 1, I, 5]]


def seen_embeddings(model, inputs):
    """What the decoder gets, (B, F, d)."""
    seen = {}
    hook = model.model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True
    )
    logits(model, inputs, use_cache=False)
    hook.remove()
    return seen["inputs_embeds"]


def same_tokens(one, two):
    """The same vectors in any order."""
    return torch.equal(one[one[:, 0].argsort()], two[two[:, 0].argsort()])


# ---------------------------------------------------------------- evaluation: a hard order
def test_prompt_tokens_change_places_and_nothing_else_moves():
    model, inputs = fused(FUSION), batch([3, I, 6])
    inputs["input_ids"][0, 0] = BOS
    inputs["prompt_mask"] = prompt_mask(inputs, 2)
    plain, moved = seen_embeddings(llava(), inputs | {"prompt_mask": None}), seen_embeddings(model, inputs)
    (order,) = learned_orders(model, inputs)
    columns = torch.arange(1, 23)  # without bos and the answer
    assert len(order) == len(columns)
    assert torch.equal(moved[0, columns], plain[0, columns[order]])
    assert torch.equal(moved[0, [0, 23, 24]], plain[0, [0, 23, 24]])
    assert distance_from_identity(order) > 0.2
    assert same_tokens(moved[0], plain[0])


def test_no_leak_an_answer_changes_no_order_and_no_earlier_output():
    model, inputs = fused(FUSION), batch([3, I, 6])
    inputs["prompt_mask"] = prompt_mask(inputs, 3)
    before, orders = logits(model, inputs), learned_orders(model, inputs)
    changed = {**inputs, "input_ids": inputs["input_ids"].clone()}
    changed["input_ids"][0, -2] = (inputs["input_ids"][0, -2] + 7) % 50 + 5
    after = logits(model, changed)
    assert torch.equal(learned_orders(model, changed)[0], orders[0])
    assert torch.equal(before[:, :-2], after[:, :-2])
    assert not torch.allclose(before[:, -2:], after[:, -2:], atol=1e-3)


def test_no_leak_from_answers_in_training_either():
    """The soft order reads the prompt alone: labels and prompt_mask agree about where it ends."""
    fusion = xf.GumbelReorder(width=16, depth=1, noise=0.0, final_temperature=1.0)
    inputs = labelled(batch([3, I, 6]), 3)
    model = fused(fusion).train()
    changed = {**inputs, "input_ids": inputs["input_ids"].clone()}
    changed["input_ids"][0, -1] = (inputs["input_ids"][0, -1] + 7) % 50 + 5
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits[:, :-1], model(**changed).logits[:, :-1])
    with pytest.raises(ValueError, match="cannot tell the prompt from the answer"):
        model(**{n: v for n, v in inputs.items() if n != "labels"})


def test_a_network_that_prefers_the_identity_equals_the_unfused_model():
    """The whole path with an order that is the input's own: the layout changes nothing."""
    model = xf.fuse(llava(), xf.GumbelReorder(width=16, depth=1, identity_start=1e4))
    inputs = batch(*ROWS)
    for order in learned_orders(model, inputs):
        assert distance_from_identity(order) == 0
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(logits(model, inputs)[real], logits(llava(), inputs)[real], atol=1e-5, rtol=1e-5)
    trained = model.train()(**labelled(inputs))  # soft, at a score gap that no noise reaches
    torch.testing.assert_close(trained.loss, llava().train()(**labelled(inputs)).loss, atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------- training: a soft order that hardens
def test_the_temperature_falls_with_training_forwards_and_can_be_set():
    fusion = xf.GumbelReorder(width=16, depth=1, temperature=1.0, final_temperature=0.01, anneal_steps=4)
    model, inputs = fused(fusion), labelled(batch(*ROWS))
    scorer = next(m for m in model.modules() if isinstance(m, ReorderScorer))
    temperatures = []
    scorer.register_forward_hook(lambda module, args, out: temperatures.append(float(out[1])))
    model.train()
    for _ in range(6):
        model(**inputs)
    assert temperatures == pytest.approx([1.0, 10**-0.5, 0.1, 10**-1.5, 0.01, 0.01])
    model.eval()(**inputs)
    with torch.no_grad():
        model.train()(**inputs)
    assert int(scorer.steps) == 6  # neither use nor validation anneals
    set_annealing_step(model, 2)
    model(**inputs)
    assert temperatures[-1] == pytest.approx(0.1)
    with pytest.raises(ValueError, match="no reordering network"):
        set_annealing_step(llava(), 1)


def test_a_cold_soft_order_is_the_hard_one():
    fusion = xf.GumbelReorder(width=16, depth=1, noise=0.0, temperature=0.002, final_temperature=0.002, iterations=400)
    model, inputs = fused(fusion), labelled(batch([3, I, 6]))
    torch.testing.assert_close(model.train()(**inputs).loss, model.eval()(**inputs).loss, atol=5e-2, rtol=2e-2)


def test_the_network_learns_where_an_order_pays():
    """Only the scores train, and the loss on one batch falls."""
    model = xf.fuse(llava(), xf.GumbelReorder(width=16, depth=1, noise=0.0, anneal_steps=0, final_temperature=0.5))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".cross." in name)
    inputs, losses = labelled(batch(*ROWS)), []
    optimiser = torch.optim.AdamW(xf.fusion_parameters(model).values(), lr=5e-3)
    for _ in range(25):
        loss = model.train()(**inputs, use_cache=False).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]


def test_m2_images_after_the_first_answer_still_run_the_network():
    model, inputs = fused(FUSION), batch([4, I, 3])
    inputs["labels"] = inputs["input_ids"].clone()
    inputs["labels"][:, 0] = -100
    inputs["labels"][inputs["input_ids"] == 1] = -100
    found = gradients(model, inputs)
    for name in xf.fusion_parameters(model):
        assert name in found
        assert not found[name].any()


# ---------------------------------------------------------------- weights
def test_new_weights_live_under_cross_and_peft_saves_them(tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    lora = LoraConfig(
        target_modules=r".*language_model\.layers\.\d+\.self_attn\.[qv]_proj", modules_to_save=["cross"], r=2
    )
    model = fused(FUSION)
    assert all(name.startswith("model.cross.") for name in xf.fusion_parameters(model))
    tuned = get_peft_model(model, lora)
    trained = {n for n, p in tuned.named_parameters() if p.requires_grad}
    assert any(".cross.modules_to_save.default.input.weight" in n for n in trained)
    assert not any("lora_" in n and ".cross." in n for n in trained)
    inputs = labelled(batch(*ROWS))
    optimiser = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], lr=0.1)
    tuned.train()(**inputs, use_cache=False).loss.backward()
    optimiser.step()
    expected = logits(tuned.eval(), inputs)
    tuned.save_pretrained(tmp_path)
    read = PeftModel.from_pretrained(xf.fuse(llava(), FUSION), tmp_path).eval()
    assert torch.equal(logits(read, inputs), expected)


def test_fields_are_checked():
    for fields, message in (
        ({"score": "fixed"}, "score must be one of learned, identity; got 'fixed'"),
        ({"width": 10, "heads": 4}, "multiple of heads=4; got 10"),
        ({"iterations": 0}, "iterations must be a whole number of at least 1; got 0"),
        ({"temperature": 0.0}, r"temperature must be above 0 .* got 0.0"),
        ({"noise": -1}, r"noise must be at least 0 .* got -1"),
        ({"identity_start": float("nan")}, "identity_start must be a number; got nan"),
    ):
        with pytest.raises(ValueError, match=message):
            xf.GumbelReorder(**fields)
    with pytest.raises(ValueError, match="did you mean 'temperature'"):
        xf.make_fusion("gumbel-reorder", temprature=1.0)


# ---------------------------------------------------------------- what the paper complains of, measured
def test_distance_from_identity():
    assert distance_from_identity(torch.arange(9)) == 0
    assert distance_from_identity(torch.arange(8).flip(0)) == 1
    assert distance_from_identity(torch.arange(9).flip(0)) == 1
    assert distance_from_identity(torch.tensor([0])) == 0
    random = [torch.randperm(60) for _ in range(50)]
    assert sum(map(distance_from_identity, random)) / 50 == pytest.approx(2 / 3, abs=0.03)


def test_memory_of_the_soft_order_grows_with_the_square_of_the_length():
    sizes = {length: sinkhorn_bytes(length, iterations=5) for length in (32, 64, 128)}
    assert sizes[64] / sizes[32] == pytest.approx(4, rel=0.05)
    assert sizes[128] / sizes[64] == pytest.approx(4, rel=0.03)
    assert sizes[128] >= 2 * 5 * 128 * 128 * 4  # two matrices an iteration
    assert sinkhorn_bytes(64, iterations=20) > 3 * sinkhorn_bytes(64, iterations=5)


def test_gradient_noise_is_that_of_the_gumbel_draws_and_leaves_no_trace():
    inputs = labelled(batch(*ROWS))
    quiet = gradient_noise(fused(xf.GumbelReorder(width=16, depth=1, noise=0.0)), inputs, 3)
    assert quiet.ratio < 1e-5
    assert quiet.mean_norm > 0
    model = fused(FUSION)
    before, state = torch.get_rng_state(), {n: p.clone() for n, p in model.state_dict().items()}
    noisy = gradient_noise(model, inputs, 4)
    assert noisy.ratio > 0.1
    assert len(set(noisy.losses)) == 4
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(p, state[n]) for n, p in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not model.training
    assert gradient_noise(model, inputs, 4) == noisy
    with pytest.raises(ValueError, match="at least 2"):
        gradient_noise(model, inputs, 1)
    with pytest.raises(ValueError, match="needs labels"):
        gradient_noise(model, batch(*ROWS))


def test_the_tracker_records_the_distance_during_a_trainers_run(tmp_path):
    from transformers import Trainer, TrainingArguments

    model = xf.fuse(llava(), FUSION)
    row = {n: v[0] for n, v in labelled(batch([3, I, 6])).items()}
    tracker = OrderTracker(labelled(batch(*ROWS)), every=2)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=1, report_to=[], save_strategy="no",
        disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=[row] * 4, callbacks=[tracker]).train()
    assert [step for step, _ in tracker.records] == [0, 2, 4]
    assert all(0 < distance < 1 for _, distance in tracker.records)
    assert tracker.records[0][1] == pytest.approx(
        sum(map(distance_from_identity, learned_orders(xf.fuse(llava(), FUSION), labelled(batch(*ROWS))))) / 2
    )
