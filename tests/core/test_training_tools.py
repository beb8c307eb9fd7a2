"""Trainer, PEFT and pipeline work unchanged on a fused model (design §1 and §2)."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Trainer, TrainingArguments

import crossfuse as xf
from matrix import CONFIGURATIONS, MATRIX, each_fusion, name_of
from tiny import I, assert_close, batch, fused, generate, gradients, labelled, llava, logits

DECODER = r".*language_model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"
ROWS = [[2, I, 4], [3, I, 3]]
CHOSEN = [CONFIGURATIONS[1], MATRIX["text-anchors"][0], *MATRIX["cross-attention"][:4]]


class Samples(torch.utils.data.Dataset):
    """Four samples, with a column that no model takes."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        row = labelled(batch([2, I, 5], seed=index))
        return {n: v[0] for n, v in row.items()} | {"question_id": torch.tensor(index)}


def arguments(folder, **options):
    return TrainingArguments(
        str(folder), max_steps=2, per_device_train_batch_size=2, use_cpu=True, report_to=[], disable_tqdm=True,
        save_strategy="no", logging_strategy="no", learning_rate=1e-2, seed=0, **options,
    )  # fmt: skip


@each_fusion
def test_trainer_keeps_the_columns_and_trains(fusion, tmp_path):
    model, seen = fused(fusion), []
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(set(kwargs)), with_kwargs=True)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    trainer = Trainer(model=model, args=arguments(tmp_path), train_dataset=Samples())
    assert trainer.model_accepts_loss_kwargs
    result = trainer.train()
    assert result.training_loss > 0
    assert {"input_ids", "attention_mask", "pixel_values", "labels"} <= seen[0]
    assert "question_id" not in seen[0]
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert {n for n in xf.fusion_parameters(model) if "bias" not in n} <= moved
    assert any("vision_tower" in n for n in moved)
    model.eval()
    xf.unfuse(model)


@pytest.mark.parametrize("fusion", CHOSEN[:3], ids=name_of)
def test_trainer_checkpoints_like_it_does_not(fusion, tmp_path):
    models = []
    for options in ({}, {"gradient_checkpointing": True}):
        model = fused(fusion)
        Trainer(model=model, args=arguments(tmp_path, **options), train_dataset=Samples()).train()
        models.append(model)
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}", atol=1e-4)


def test_a_bf16_trainer_leaves_a_model_that_says_why_it_cannot_be_unfused(tmp_path):
    model = fused(xf.CrossAttention())
    Trainer(model=model, args=arguments(tmp_path, bf16=True), train_dataset=Samples()).train()
    if "forward" in model.__dict__:
        with pytest.raises(ValueError, match="a Trainer's autocast wrapper"):
            xf.unfuse(model)
    else:
        xf.unfuse(model)


def adapted(fusion, **options):
    model = fused(fusion)
    new = bool(xf.fusion_parameters(model))
    config = LoraConfig(
        target_modules=DECODER, r=4, modules_to_save=["cross"] if new else None, init_lora_weights=False, **options
    )
    torch.manual_seed(1)
    return get_peft_model(model, config).eval()


@pytest.mark.parametrize("fusion", CHOSEN, ids=name_of)
def test_p2_lora_by_regex_reaches_the_decoder_alone(fusion):
    model = adapted(fusion)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    lora = {n for n in trained if "lora_" in n}
    assert lora
    assert all("language_model.layers" in n and ".cross." not in n for n in lora)
    rest = trained - lora
    assert all(".cross.modules_to_save.default." in n for n in rest)
    assert len(rest) == len(xf.fusion_parameters(fused(fusion)))
    assert xf.fusion_of(model) == fusion
    found = gradients(model, labelled(batch(*ROWS)))
    assert all(n in found for n in trained)
    assert set(found) <= trained


@pytest.mark.parametrize("fusion", CHOSEN, ids=name_of)
def test_peft_generates_as_the_merged_model(fusion):
    """LoRA inside shared projections included; without adapters it is the fused model."""
    model, inputs = adapted(fusion), batch(*ROWS)
    ids, out = generate(model, inputs), logits(model, labelled(inputs))
    assert torch.equal(ids, generate(model, inputs, use_cache=False))
    plain = fused(fusion)
    with model.disable_adapter():
        assert torch.equal(generate(model, inputs), generate(plain, inputs))
    merged = model.merge_and_unload()
    assert xf.fusion_of(merged) == fusion
    assert_close(logits(merged, labelled(inputs)), out, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(logits(merged, labelled(inputs)), logits(plain, labelled(inputs)), atol=1e-2)
    xf.unfuse(merged)
    assert set(merged.state_dict()) == set(llava().state_dict())


@pytest.mark.parametrize("fusion", CHOSEN, ids=name_of)
def test_peft_saves_and_loads(fusion, tmp_path):
    model, inputs = adapted(fusion), labelled(batch(*ROWS))
    for name, parameter in model.named_parameters():
        if "modules_to_save" in name:
            parameter.data.add_(0.05)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(fused(fusion), tmp_path).eval()
    assert torch.equal(logits(loaded, inputs), logits(model, inputs))


def test_d3_lora_on_a_bfloat16_language_model_with_a_float32_tower():
    model = llava()
    model.model.language_model.bfloat16()
    model.lm_head.bfloat16()
    xf.fuse(model, xf.CrossAttention())
    config = LoraConfig(target_modules=DECODER, r=4, modules_to_save=["cross"])
    model = get_peft_model(model, config, autocast_adapter_dtype=False)
    found = gradients(model, labelled(batch(*ROWS)))
    assert found
    assert all(torch.isfinite(g).all() for g in found.values())
    assert {p.dtype for n, p in model.named_parameters() if ".cross." in n} == {torch.bfloat16}


def test_peft_wrapped_models_are_refused():
    model = get_peft_model(llava(), LoraConfig(target_modules=DECODER, r=4))
    with pytest.raises(ValueError, match=r"wrapped by PEFT; the order is fuse, then PEFT|fuse, then PEFT"):
        xf.fuse(model, xf.CrossAttention())


def test_fusing_below_a_peft_wrapper_is_refused():
    """`fuse(peft_model.base_model.model)` would build cross-attention out of LoRA layers."""
    model = get_peft_model(llava(), LoraConfig(target_modules=DECODER, r=4))
    with pytest.raises(ValueError, match="fuse, then PEFT"):
        xf.fuse(model.base_model.model, xf.CrossAttention())


@pytest.mark.parametrize("fusion", CHOSEN, ids=name_of)
def test_the_pipeline_of_transformers_works(fusion, embedded):
    from PIL import Image
    from transformers import pipeline

    from tiny import clone

    model, processor = embedded
    model = xf.fuse(clone(model), fusion)
    pipe = pipeline("image-text-to-text", model=model, processor=processor, device="cpu")
    picture = Image.new("RGB", (64, 64), "white")
    picture.paste((220, 30, 30), (10, 10, 40, 40))
    messages = [
        {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "what colour?"}]}
    ]
    answer = pipe(text=messages, max_new_tokens=4, return_full_text=False, do_sample=False)
    assert isinstance(answer[0]["generated_text"], str)
    with torch.no_grad():
        inputs = processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        ids = model.generate(**inputs, max_new_tokens=4, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    assert answer[0]["generated_text"].strip() == processor.batch_decode(ids, skip_special_tokens=True)[0].strip()


@pytest.mark.parametrize(
    "fusion",
    [xf.CrossAttention(update_images=True), xf.CrossAttention(share_projections=True), xf.CrossAttention(every=2)],
    ids=name_of,
)
def test_layers_that_peft_copies_go_on_reading_the_models_own_weights(fusion):
    """``modules_to_save`` deep-copies them: norms, feed-forward and shared projections must not be copied along."""

    def moved(model):
        draw = torch.Generator().manual_seed(5)
        for name, parameter in model.named_parameters():
            if "language_model.layers" in name and "lora_" not in name and ".cross." not in name:
                parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=draw))
        return model

    inputs = batch([2, I, 5], [3, I, 4])
    expected = logits(moved(fused(fusion)), inputs)
    model = fused(fusion)
    before = sum(p.numel() for p in model.parameters())
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=DECODER, modules_to_save=["cross"]))
    assert_close(logits(moved(wrapped), inputs), expected)
    copied = before + sum(p.numel() for n, p in wrapped.named_parameters() if "lora_" in n)
    copied += sum(p.numel() for p in xf.fusion_parameters(fused(fusion)).values())
    assert sum(p.numel() for p in wrapped.parameters()) == copied
