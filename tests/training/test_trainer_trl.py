"""TRL's SFTTrainer with a fused model, unchanged: prompt-completion data train on the answer alone."""

from __future__ import annotations

import copy

import pytest
import torch

import crossfuse as xf
from crossfuse.data.collate import Collator
from crossfuse.data.formats import load_records
from crossfuse.training.prompt_collator import PromptCollator

trl = pytest.importorskip("trl", reason="TRL is in the extra `train`")
FUSIONS = [xf.Insertion(), xf.TextAnchors(threshold=0.1), xf.CrossAttention(joint_text=True)]


@pytest.fixture(scope="module")
def scenes():
    return load_records("scenes", limit=6)


def columns(records, kind: str):
    """The records as TRL wants them: `images`, and `prompt` + `completion` or `messages`."""
    from datasets import Dataset

    rows = []
    for record in records:
        user = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": record.messages[0].text}]}]
        answer = [{"role": "assistant", "content": [{"type": "text", "text": record.answer}]}]
        texts = {"prompt": user, "completion": answer} if kind == "prompt" else {"messages": user + answer}
        rows.append({"images": list(record.images), **texts})
    return Dataset.from_list(rows)


def trainer(model, processor, data, folder, **options):
    config = trl.SFTConfig(
        output_dir=str(folder), max_steps=2, per_device_train_batch_size=3, learning_rate=1e-3, report_to=[], seed=0,
        use_cpu=True, bf16=False, save_strategy="no", logging_strategy="no", disable_tqdm=True, max_length=None,
        gradient_checkpointing=False, **options,
    )  # fmt: skip
    return trl.SFTTrainer(model=model, args=config, train_dataset=data, processing_class=processor)


@pytest.mark.parametrize("fusion", FUSIONS, ids=lambda f: f.name)
def test_sft_trains_a_fused_model_on_prompt_and_completion(fusion, embedded, scenes, tmp_path):
    model, processor = embedded
    model = xf.fuse(copy.deepcopy(model), fusion)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sft = trainer(model, processor, columns(scenes, "prompt"), tmp_path)
    if fusion.needs_prompt:
        sft.data_collator = PromptCollator(sft.data_collator)
    result = sft.train()
    assert 0 < result.training_loss < 20
    assert xf.fusion_of(sft.model) == fusion
    moved = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])]
    assert any("language_model" in name for name in moved)
    assert set(xf.fusion_parameters(model)) - set(moved) <= {n for n in before if n.endswith("k_proj.bias")}


@pytest.mark.parametrize("fusion", FUSIONS, ids=lambda f: f.name)
def test_sft_computes_the_loss_of_our_trainer(fusion, embedded, scenes, tmp_path):
    """The same batch: TRL's loss == the fused model's own, copies of anchors included."""
    model, processor = embedded
    model = xf.fuse(copy.deepcopy(model), fusion)
    data = columns(scenes, "prompt")
    sft = trainer(model, processor, data, tmp_path)
    batch = PromptCollator(sft.data_collator)([data[i] for i in range(3)])
    loss = sft.compute_loss(sft.model.train(), dict(batch))
    own = {k: v for k, v in batch.items() if k not in ("prompt_mask", "answer_starts")}
    expected = sft.model(**own, use_cache=False).loss
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)


def test_text_anchors_without_a_prompt_mask_say_what_they_need(embedded, scenes, tmp_path):
    model, processor = embedded
    sft = trainer(xf.fuse(copy.deepcopy(model), xf.TextAnchors()), processor, columns(scenes, "prompt"), tmp_path)
    with pytest.raises(ValueError, match="cannot tell the prompt from the answer"):
        sft.train()


def test_prompt_and_completion_supervise_what_our_collator_does(embedded, scenes, tmp_path):
    """With `messages` the prompt and the image placeholders are trained on as well, which the page warns of."""
    model, processor = embedded
    ours = Collator(processor)([scenes[0]])
    expected = ours["labels"][ours["labels"] != -100].tolist()
    labels = {}
    for kind in ("prompt", "messages"):
        data = columns(scenes, kind)
        sft = trainer(xf.fuse(copy.deepcopy(model), xf.Insertion()), processor, data, tmp_path)
        batch = sft.data_collator([data[0]])
        labels[kind] = batch["labels"][batch["labels"] != -100].tolist()
        images = int((batch["input_ids"] == model.config.image_token_id).sum())
        assert images == int((ours["input_ids"] == model.config.image_token_id).sum())
    assert labels["prompt"] == expected
    assert len(labels["messages"]) > len(labels["prompt"])


def test_sft_with_lora_reaches_the_decoder_alone(embedded, scenes, tmp_path):
    from peft import LoraConfig

    from crossfuse.training.trainable import LORA_TARGETS

    model, processor = embedded
    model = xf.fuse(copy.deepcopy(model), xf.CrossAttention())
    config = trl.SFTConfig(
        output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=2, report_to=[], use_cpu=True, bf16=False,
        save_strategy="no", disable_tqdm=True, max_length=None, gradient_checkpointing=False,
    )  # fmt: skip
    lora = LoraConfig(r=2, target_modules=LORA_TARGETS, modules_to_save=["cross"])
    sft = trl.SFTTrainer(
        model=model, args=config, train_dataset=columns(scenes, "prompt"), processing_class=processor, peft_config=lora
    )
    sft.train()
    trained = {name for name, parameter in sft.model.named_parameters() if parameter.requires_grad}
    assert {".cross." in name or "language_model.layers" in name for name in trained} == {True}
    assert any(".cross." in name for name in trained)
