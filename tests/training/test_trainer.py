"""Fine-tuning: what trains, equal budgets, and an evaluation that keeps no logits."""

import gc

import psutil
import pytest
import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import crossfuse as xf
from crossfuse.training.recipe import Recipe
from crossfuse.training.trainer import fine_tune, mean_loss, prepare_trainable

IMAGE, PATCHES = 1, 16


def tiny_llava(vocabulary: int = 64, seed: int = 0) -> LlavaForConditionalGeneration:
    torch.manual_seed(seed)
    text = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=2,
    )
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8
    )
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE, vision_feature_layer=-1)
    return LlavaForConditionalGeneration(config).eval()


class Samples(torch.utils.data.Dataset):
    """Random images, each with a prompt of `prompt` tokens and an answer of three."""

    def __init__(self, count: int, prompt: int = 6, vocabulary: int = 64) -> None:
        generator = torch.Generator().manual_seed(3)
        self.pixels = torch.randn(count, 3, 32, 32, generator=generator)
        self.text = torch.randint(3, vocabulary, (count, prompt + 3), generator=generator)

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        image = torch.full((PATCHES,), IMAGE)
        ids = torch.cat([torch.tensor([2]), image, self.text[index]])
        labels = ids.clone()
        labels[:-3] = -100
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "labels": labels,
            "pixel_values": self.pixels[index],
        }


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def parts_with_gradient(model: torch.nn.Module) -> set[str]:
    marks = {"vision_tower": "vision tower", "multi_modal_projector": "projector", ".cross.": "cross", "lora_": "LoRA"}
    found = set()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found.add(next((part for mark, part in marks.items() if mark in name), "language model"))
    return found


@pytest.mark.parametrize(
    ("fusion", "train", "expected"),
    [
        (xf.Insertion(), "lora", {"LoRA"}),
        (xf.TextAnchors(threshold=0.1), "lora", {"LoRA"}),
        (xf.CrossAttention(), "frozen", {"cross"}),
        (xf.CrossAttention(), "lora", {"LoRA", "cross"}),
        (xf.CrossAttention(share_projections=True), "lora", {"LoRA"}),
    ],
)
def test_only_the_parts_that_the_recipe_names_are_trained(fusion, train, expected):
    model = prepare_trainable(xf.fuse(tiny_llava(), fusion), Recipe(trainable={"llm": train}))
    assert parts_with_gradient(model) == expected
    adapted = [name for name, _ in model.named_modules() if name.endswith("lora_A")]
    assert all("language_model.layers" in name and ".cross." not in name for name in adapted)


def test_fusion_without_weights_cannot_be_trained_alone():
    with pytest.raises(ValueError, match=r"no weights of its own to train; use trainable\.llm=lora"):
        prepare_trainable(xf.fuse(tiny_llava(), xf.Insertion()), Recipe(trainable={"llm": "frozen"}))


@pytest.mark.parametrize(
    ("fusion", "train"),
    [(xf.Insertion(), "lora"), (xf.TextAnchors(threshold=0.1), "lora"), (xf.CrossAttention(), "frozen")],
)
def test_training_lowers_the_loss_and_leaves_the_rest_alone(fusion, train):
    model = xf.fuse(tiny_llava(), fusion)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    recipe = Recipe(trainable={"llm": train}, steps=40, batch_size=4, learning_rate=3e-2, warmup_steps=2)
    trained = prepare_trainable(model, recipe)
    steps = []
    run = fine_tune(trained, Samples(4), collate, recipe, progress=steps.append)
    assert [step for step, _ in run.losses] == list(range(1, 41))
    assert sum(steps) == run.steps == 40
    assert run.samples == 160
    assert run.losses[-1][1] < 0.95 * run.losses[0][1]
    state = trained.state_dict()
    for name, tensor in before.items():
        if ".cross." not in name:
            now = next(v for k, v in state.items() if k.endswith(name) or k.replace("base_layer.", "").endswith(name))
            assert torch.equal(now, tensor), f"{name} was frozen, yet it changed"


def test_equal_budgets_show_the_same_batches_to_every_fusion():
    seen: dict[str, list[list[int]]] = {}

    def run(name: str, fusion: xf.Fusion, train: str) -> None:
        rows: list[list[int]] = []
        seen[name] = rows

        def note(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
            rows.extend(row["input_ids"].tolist() for row in batch)
            return collate(batch)

        recipe = Recipe(trainable={"llm": train}, steps=3, batch_size=2, seed=5)
        fine_tune(prepare_trainable(xf.fuse(tiny_llava(), fusion), recipe), Samples(8), note, recipe)

    run("insertion", xf.Insertion(), "lora")
    run("cross-attention", xf.CrossAttention(), "frozen")
    assert seen["insertion"] == seen["cross-attention"]


def test_same_seed_same_losses():
    recipe = Recipe(steps=4, batch_size=2)
    runs = [
        fine_tune(prepare_trainable(xf.fuse(tiny_llava(), xf.Insertion()), recipe), Samples(8), collate, recipe)
        for _ in range(2)
    ]
    assert runs[0].losses == runs[1].losses


def test_mean_loss_is_the_loss_of_all_batches_joined():
    model = xf.fuse(tiny_llava(), xf.Insertion())
    rows = [Samples(6)[i] for i in range(6)]
    rows[0]["labels"][:-1] = -100
    whole = model(**collate(rows), use_cache=False).loss
    parts = mean_loss(model, [collate(rows[:1]), collate(rows[1:3]), collate(rows[3:])])
    assert parts == pytest.approx(whole.item(), abs=1e-5)


def test_mean_loss_without_labels_is_refused():
    rows = [Samples(1)[0]]
    rows[0]["labels"][:] = -100
    with pytest.raises(ValueError, match="no token of these batches has a label"):
        mean_loss(xf.fuse(tiny_llava(), xf.Insertion()), [collate(rows)])


@pytest.mark.parametrize("fusion", [xf.Insertion(), xf.TextAnchors(threshold=0.1), xf.CrossAttention()])
def test_c5_evaluation_keeps_no_logits(fusion):
    """Vocabulary of 150,000, 200 items of 128 tokens: all logits together would take 15 GB, those of labels 0.36 GB."""
    samples = Samples(8, prompt=128 - 3 - PATCHES - 1, vocabulary=150_000)
    model = xf.fuse(tiny_llava(vocabulary=150_000), fusion)
    process = psutil.Process()
    batches = (collate([samples[i % 8]]) for i in range(201))
    first = next(batches)
    mean_loss(model, [first])
    gc.collect()
    start = process.memory_info().rss
    peak = start

    def watched():
        nonlocal peak
        for batch in batches:
            peak = max(peak, process.memory_info().rss)
            yield batch

    mean_loss(model, watched())
    peak = max(peak, process.memory_info().rss)
    assert peak - start < 200 * 2**20


def test_c5_trainer_evaluation_keeps_no_logits(tmp_path):
    from transformers import TrainingArguments

    from crossfuse.training.trainer import FusedTrainer

    model = xf.fuse(tiny_llava(vocabulary=50_000), xf.Insertion())
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        report_to=[],
        disable_tqdm=True,
        per_device_eval_batch_size=4,
        prediction_loss_only=True,
        remove_unused_columns=False,
    )
    samples = Samples(8, vocabulary=50_000)
    trainer = FusedTrainer(model=model, args=arguments, data_collator=collate, eval_dataset=samples)
    output = trainer.predict(samples)
    assert output.predictions is None
    expected = mean_loss(model, [collate([samples[i] for i in range(8)])])
    assert output.metrics["test_loss"] == pytest.approx(expected, abs=1e-4)
