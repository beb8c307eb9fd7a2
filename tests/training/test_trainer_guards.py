"""What ends a run early: a loss that is no number, SIGTERM, no better validation loss; and a loss that stays right."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import crossfuse as xf
from crossfuse.training.checkpoints import CheckpointFolder, trained_state
from crossfuse.training.guards import watch_sigterm
from crossfuse.training.trainer import NonFiniteLossError, mean_loss, train
from matrix import EACH, name_of
from training_runs import FULL, Rows, collate, model_for, recipe


@pytest.mark.parametrize("fusion", [f for f in EACH if f.compress is None][:4], ids=name_of)
def test_l4_accumulation_changes_neither_losses_nor_weights(fusion):
    """Batches of 6 == 2 x 3 == 3 x 2, with answers of 1 to 5 tokens in them."""
    trained, losses = [], []
    for size, accumulation in ((6, 1), (3, 2), (2, 3)):
        chosen = recipe(steps=3, batch_size=size, accumulation=accumulation, trainable=FULL, learning_rate=1e-3)
        model = model_for(fusion, chosen)
        losses.append([loss for _, loss in train(model, Rows(18), collate, chosen).losses])
        trained.append(trained_state(model))
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-4)
    for state in trained[1:]:
        # AdamW turns a gradient of rounding noise into a step of the full rate: compare what moved together.
        for name, tensor in state.items():
            close = torch.isclose(tensor, trained[0][name], rtol=1e-4, atol=1e-4)
            assert close.float().mean() > 0.98, name


def test_l4_the_logged_loss_is_the_mean_over_supervised_tokens():
    chosen = recipe(steps=1, batch_size=2, accumulation=3, learning_rate=1e-9)
    seen = []

    def note(rows):
        seen.append(collate(rows))
        return seen[-1]

    model = model_for(xf.Insertion(), chosen)
    logged = train(model, Rows(6), note, chosen).losses[0][1]
    batches = [{k: v for k, v in batch.items() if k != "id"} for batch in seen[:3]]
    assert logged == pytest.approx(mean_loss(model.eval(), batches), rel=1e-4)


def test_tau_1_trains_to_the_bit_as_insertion():
    """A threshold of 1 is exactly the original model through 20 steps: losses and weights."""
    runs = []
    for fusion in (xf.Insertion(), xf.TextAnchors(threshold=1.0), xf.ImageAnchors(threshold=1.0)):
        chosen = recipe(steps=20, trainable=FULL, learning_rate=3e-3, weight_decay=0.01)
        model = model_for(fusion, chosen)
        done = train(model, Rows(text_only=4), collate, chosen)
        runs.append((done.losses, trained_state(model)))
    for losses, state in runs[1:]:
        assert losses == runs[0][0]
        assert all(torch.equal(tensor, runs[0][1][name]) for name, tensor in state.items())
    assert len(runs[0][0]) == 20
    assert runs[0][0][-1] != runs[0][0][0]


class Poisoned(Rows):
    """The pixels of one sample are nan."""

    def __getitem__(self, index):
        row = super().__getitem__(index)
        return row if index != 5 else row | {"pixel_values": torch.full_like(row["pixel_values"], float("nan"))}


def test_a_loss_that_is_no_number_stops_with_the_batch_saved(tmp_path):
    chosen = recipe(steps=12, accumulation=2, trainable=FULL, save_every=1)
    model = model_for(xf.CrossAttention(), chosen)
    with pytest.raises(
        NonFiniteLossError, match=r"the loss of step \d+ is not finite; its batch is in .*bad-batch-step"
    ):
        train(model, Poisoned(), collate, chosen, out=tmp_path)
    (folder,) = tmp_path.glob("bad-batch-step-*")
    facts = json.loads((folder / "batch.json").read_text())
    assert "row-5" in facts["id"]
    assert facts["loss"] == "nan"
    saved = load_file(folder / "batch.safetensors")
    assert torch.isnan(saved["pixel_values"]).any()
    assert {"input_ids", "attention_mask", "labels", "pixel_values"} <= set(saved)
    assert all(torch.isfinite(tensor).all() for tensor in trained_state(model).values())
    last = CheckpointFolder(tmp_path).last
    assert last is None or int(last.name[5:]) == facts["step"] - 1


def test_a_step_without_any_label_is_no_stop():
    class Unlabelled(Rows):
        def __getitem__(self, index):
            row = super().__getitem__(index)
            return row | {"labels": torch.full_like(row["labels"], -100)}

    chosen = recipe(steps=2)
    assert [loss for _, loss in train(model_for(xf.Insertion(), chosen), Unlabelled(), collate, chosen).losses] == [
        0,
        0,
    ]


def test_patience_stops_and_keeps_the_best(tmp_path):
    """A rate that ruins the model: the first validation loss stays the best one."""
    chosen = recipe(steps=40, eval_every=2, learning_rate=1.0)
    chosen = chosen.model_copy(update={"patience": 4})
    done = train(model_for(xf.Insertion(), chosen), Rows(), collate, chosen, out=tmp_path, validation=Rows(3, seed=5))
    assert done.stopped == "patience"
    assert done.steps == done.best_step + 4 < 40
    assert CheckpointFolder(tmp_path).best.name == f"step-{done.best_step:06d}"


def test_validation_loss_is_the_mean_over_tokens_and_leaves_training_alone():
    chosen = recipe(steps=3, lora={"rank": 4, "dropout": 0.3})
    rows = Rows(5, text_only=2, seed=5)
    with_it = model_for(xf.CrossAttention(), chosen)
    checked = train(with_it, Rows(), collate, chosen.changed({"eval_every": 1}), validation=rows)
    without = train(model_for(xf.CrossAttention(), chosen), Rows(), collate, chosen)
    assert checked.losses == without.losses
    batches = [{k: v for k, v in collate([rows[i]]).items() if k != "id"} for i in range(5)]
    assert checked.validation[-1][1] == pytest.approx(mean_loss(with_it.eval(), batches), rel=1e-5)


SCRIPT = """
import sys, time
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
import crossfuse as xf
from pathlib import Path
from crossfuse.training.guards import watch_sigterm
from crossfuse.training.trainer import train
from training_runs import Rows, collate, model_for, recipe
chosen = recipe(steps=10_000)
with watch_sigterm() as stop:
    def slow(info):
        print(info.step, flush=True)
        time.sleep(0.05)
    model = model_for(xf.Insertion(), chosen)
    done = train(model, Rows(), collate, chosen, out=Path({out!r}), stop=stop, progress=slow)
print("stopped by", done.stopped, "after", done.steps, flush=True)
"""


def test_sigterm_saves_and_exits_with_0(tmp_path):
    tests = str(Path(__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(tests=tests, out=str(tmp_path))],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.strip() == "3":
            process.send_signal(signal.SIGTERM)
            break
    rest, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    stopped = int(rest.split()[-1])
    assert "stopped by signal" in rest
    assert CheckpointFolder(tmp_path).last.name == f"step-{stopped:06d}"
    assert stopped < 10_000


def test_sigterm_before_and_after_the_block_is_what_it_was():
    before = signal.getsignal(signal.SIGTERM)
    with watch_sigterm() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        assert stop.received
    assert signal.getsignal(signal.SIGTERM) is before


def test_too_little_data_says_so():
    chosen = recipe(batch_size=16)
    with pytest.raises(
        ValueError, match=r"hold 12 samples, fewer than one step needs \(16 x accumulation 1 x 1 processes\)"
    ):
        train(model_for(xf.Insertion(), chosen), Rows(), collate, chosen)
