"""Order of samples, mixtures, packing, and what a run writes while it trains."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers.modeling_outputs import BaseModelOutputWithPooling

sys.path.insert(0, str(Path(__file__).parents[1] / "fusions" / "anchors"))

from tiny_qwen import batch as qwen_batch
from tiny_qwen import qwen

import crossfuse as xf
from crossfuse.data.packing import pack_batch
from crossfuse.training.batches import Joined, PackedCollator, TrainingBatches, evaluation_batches, training_loader
from crossfuse.training.checkpoints import trained_state
from crossfuse.training.guards import save_batch
from crossfuse.training.lengths import sample_lengths
from crossfuse.training.logs import StepInfo
from crossfuse.training.progress import describe, training_bar
from crossfuse.training.trainer import prepare_trainable, train
from tiny import labelled, llava
from training_runs import FULL, Rows, collate, lengths, model_for, recipe


def test_processes_share_out_the_batches_of_one():
    alone = TrainingBatches(range(23), 2, seed=4)
    parts = [TrainingBatches(range(23), 2, seed=4, rank=rank, world=2) for rank in range(2)]
    for epoch in (0, 3):
        for sampler in (alone, *parts):
            sampler.set_epoch(epoch)
        whole, (first, second) = list(alone), [list(part) for part in parts]
        assert len(whole) == 11
        assert [b for pair in zip(first, second, strict=True) for b in pair] == whole[:10]
    alone.set_epoch(0)
    before = list(alone)
    alone.set_epoch(1)
    assert list(alone) != before
    assert sorted(i for b in before for i in b) != list(range(23))  # an incomplete last batch is left out


@pytest.mark.parametrize("world", [1, 2, 3])
def test_m3_validation_counts_every_sample_once(world):
    batches = [evaluation_batches(range(5), 2, rank, world) for rank in range(world)]
    assert sorted(i for part in batches for batch in part for i in batch) == [0, 1, 2, 3, 4]


def test_a_mixture_draws_by_weight_and_plain_sets_once_an_epoch():
    plain = Joined([list("abc"), list("defg")], [None, None])
    draw = np.random.default_rng(0)
    assert sorted(plain[int(i)] for i in plain.order(draw)) == list("abcdefg")
    mixed = Joined([[0] * 1000, [1] * 3000], [3.0, 1.0])
    drawn = [mixed[int(i)] for i in mixed.order(draw)]
    assert len(drawn) == 4000
    assert np.mean(drawn) == pytest.approx(0.25, abs=0.03)
    small = Joined([list(range(10)), list(range(10, 1000))], [1.0, 1.0])
    counts = np.bincount([small[int(i)] for i in small.order(draw)])[:10]
    assert counts.max() - counts.min() <= 1  # a small set is used up before it comes again


@pytest.mark.parametrize("fusion", [xf.Insertion(), xf.TextAnchors(threshold=0.1), xf.CrossAttention(joint_text=True)])
def test_a_packed_step_is_the_step_of_its_samples(fusion):
    """One packed row of all samples == the same samples padded: loss and weights after the step."""
    rows = Rows(4, text_only=4)
    text, image = lengths(rows)
    budget = {"max_text_tokens": sum(text), "max_image_tokens": sum(image)}
    states, losses = [], []
    for packing, size in ((None, 4), (budget, 1)):
        chosen = recipe(steps=1, batch_size=size, packing=packing, trainable=FULL, learning_rate=1e-3)
        model = model_for(fusion, chosen)
        losses.append(train(model, rows, collate, chosen).losses[0][1])
        states.append(trained_state(model))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for name, tensor in states[1].items():
        assert torch.isclose(tensor, states[0][name], atol=1e-4).float().mean() > 0.98, name


def test_packed_rows_fill_the_budget_and_hold_every_sample():
    rows = Rows(30)
    chosen = recipe(packing={"max_text_tokens": 56, "max_image_tokens": 64}, batch_size=2)
    loader = training_loader(rows, collate, chosen, lengths=lengths(rows))
    seen = [name for batch in loader for name in batch["id"]]
    assert len(set(seen)) == len(seen) >= 24
    for packed in loader:
        assert packed["input_ids"].shape[0] == 2
        is_image = packed["input_ids"] == 1
        assert (((packed["segment_ids"] >= 0) & ~is_image).sum(1) <= 56).all()
        assert (is_image.sum(1) <= 64).all()


def test_stacked_packed_rows_give_the_losses_of_single_ones():
    rows = Rows(6, text_only=3)
    groups = [[rows[0], rows[1]], [rows[2]], [rows[3], rows[4], rows[5]]]
    model = xf.fuse(llava(), xf.CrossAttention())
    stacked = PackedCollator(collate)(groups)
    assert stacked["input_ids"].shape[0] == 3
    items = torch.tensor(1)
    with torch.no_grad():
        plain = {k: v for k, v in stacked.items() if k != "id"}
        whole = model(**plain, use_cache=False, num_items_in_batch=items).loss
        single = sum(
            model(
                **{k: v for k, v in pack_batch(collate(group)).items() if k != "id"},
                use_cache=False,
                num_items_in_batch=items,
            ).loss
            for group in groups
        )
    torch.testing.assert_close(whole, single, atol=1e-3, rtol=1e-5)


def test_lengths_from_headers_are_those_of_the_collator(embedded):
    from crossfuse.data.collate import Collator
    from crossfuse.data.formats import load_records

    model, processor = embedded
    records = load_records("scenes", limit=6)
    quick = sample_lengths(records, Collator(processor), (model.config.image_token_id,))
    slow = sample_lengths(records, lambda rows: Collator(processor)(rows), (model.config.image_token_id,))
    assert [part.tolist() for part in quick] == [part.tolist() for part in slow]
    assert quick[1].min() > 0


class EncodedRows(Rows):
    """The same samples with what the tower made of their images in place of pixels, as `generate` passes it."""

    def __init__(self, tower, **options):
        super().__init__(**options)
        for row in self.rows:
            with torch.no_grad():
                row["encoded"] = tower.get_image_features(pixel_values=row["pixel_values"]).pooler_output


def encoded_collate(rows):
    made = collate([{k: v for k, v in row.items() if k != "pixel_values"} for row in rows])
    features = [image for row in rows for image in row["encoded"]]
    return made | {"mm_encoder_outputs": {"image": BaseModelOutputWithPooling(pooler_output=features)}}


def test_what_the_model_takes_besides_tensors_reaches_it(tmp_path):
    """Encoded images train as their pixels do; ids of records never reach the model; a bad batch is saved whole."""
    chosen = recipe(steps=3, trainable={"llm": "lora", "projector": "frozen"})
    model = model_for(xf.CrossAttention(), chosen)
    expected = train(model, Rows(), collate, chosen, validation=Rows(4, seed=1))
    again = model_for(xf.CrossAttention(), chosen)
    tower = llava()
    found = train(again, EncodedRows(tower), encoded_collate, chosen, validation=EncodedRows(tower, count=4, seed=1))
    assert [loss for _, loss in found.losses] == pytest.approx([loss for _, loss in expected.losses], abs=1e-5)
    assert [loss for _, loss in found.validation] == pytest.approx([x for _, x in expected.validation], abs=1e-5)
    save_batch(tmp_path, encoded_collate(EncodedRows(tower).rows[:2]), {"step": 1})
    assert {"mm_encoder_outputs/image/pooler_output/0", "input_ids"} <= set(load_file(tmp_path / "batch.safetensors"))
    assert json.loads((tmp_path / "batch.json").read_text()) == {"step": 1, "id": ["row-0", "row-1"]}


def test_a_run_writes_json_lines_and_tensorboard_events(tmp_path):
    tensorboard = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    chosen = recipe(steps=3, eval_every=3, learning_rates={"fusion": 1e-3}, trainable={"llm": "lora"})
    reports: list[StepInfo] = []
    rows = Rows(text_only=3)
    done = train(
        model_for(xf.CrossAttention(), chosen), rows, collate, chosen, out=tmp_path, validation=Rows(3, seed=5),
        progress=reports.append,
    )  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert set(steps[0]["learning_rate"]) == {"llm", "fusion"}
    assert steps[0]["learning_rate"]["llm"] == pytest.approx(10 * steps[0]["learning_rate"]["fusion"])
    assert lines[-1]["validation_loss"] == done.validation[-1][1]
    _, image = lengths(rows)
    assert done.text_tokens + done.image_tokens == sum(line["text_tokens"] + line["image_tokens"] for line in steps)
    # Six samples were seen, each once: three steps of two.
    assert 0 < done.image_tokens <= sum(image)
    assert done.image_tokens % 16 == 0
    assert reports[-1].step == reports[-1].steps == 3
    assert reports[-1].text_rate > 0 < reports[-1].image_rate
    assert reports[-1].memory > 2**20
    events = tensorboard.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3]
    assert events.Scalars("loss")[1].value == pytest.approx(steps[1]["loss"], rel=1e-5)
    assert {"validation_loss", "learning_rate/fusion", "image_tokens_per_second", "memory_bytes"} <= set(
        events.Tags()["scalars"]
    )


def test_the_bar_shows_tokens_of_text_and_image_and_memory():
    info = StepInfo(3, 10, 1.25, 100, 200, 950.0, 12_340.0, 1_500_000_000, 1.5)
    assert describe(info) == "loss 1.250 · validation 1.500 · 950 text/s · 12.3k image/s · 1.5 GB"
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with training_bar(console) as show:
        show(info)
    assert "950 text/s" in console.file.getvalue()
    silent = Console(file=io.StringIO())
    with training_bar(silent) as show:
        show(info)
    assert silent.file.getvalue().strip() == ""


def test_a_packed_step_of_qwen_is_the_step_of_its_samples():
    """Positions of three rows, images of different grids, a text among them; the sampler and the collator included."""
    singles = [labelled(qwen_batch(row, seed=i)) for i, row in enumerate([[3, (4, 4), 6], [2, (4, 8), 5], [8]])]
    rows = [{n: v[0] if v.shape[0] == 1 and n in QWEN_ALIGNED else v for n, v in row.items()} for row in singles]
    lost = {}
    for packing, size in ((None, 3), ({"max_text_tokens": 100, "max_image_tokens": 100}, 1)):
        chosen = recipe(steps=1, batch_size=size, packing=packing, trainable={"llm": "full"})
        model = prepare_trainable(xf.fuse(qwen(), xf.CrossAttention(joint_text=True)), chosen)
        lost[size] = train(model, rows, qwen_collate, chosen).losses[0][1]
    assert lost[1] == pytest.approx(lost[3], rel=1e-5)


QWEN_ALIGNED = {"input_ids": 0, "attention_mask": 0, "labels": -100, "mm_token_type_ids": 0}


def qwen_collate(rows):
    made = {n: torch.nn.utils.rnn.pad_sequence([r[n] for r in rows], True, fill) for n, fill in QWEN_ALIGNED.items()}
    for name in ("pixel_values", "image_grid_thw"):
        found = [row[name] for row in rows if name in row]
        if found:
            made[name] = torch.cat(found)
    return made
