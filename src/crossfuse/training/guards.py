"""What stops a run early, in the same step on every process: a loss that is no number, SIGTERM, no better loss."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class NonFiniteLossError(RuntimeError):
    """The loss became nan or infinite. The weights are those from before the step; the batch is on disk."""


class StopSignal:
    """Whether SIGTERM has come since the handler was set."""

    received = False


@contextlib.contextmanager
def watch_sigterm() -> Iterator[StopSignal]:
    """Note SIGTERM instead of dying of it, inside the block. Does nothing outside the main thread."""
    stop = StopSignal()

    def note(number: int, frame: FrameType | None) -> None:
        stop.received = True

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.signal(signal.SIGTERM, note)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)


def save_batch(folder: Path, inputs: dict[str, Any], facts: dict[str, Any]) -> None:
    """``batch.safetensors`` (the tensors; nested ones as "name/inner"), ``batch.json`` (ids and the like, `facts`)."""
    from safetensors.torch import save

    from crossfuse.storage import replace_file

    folder.mkdir(parents=True, exist_ok=True)
    flat = dict(_flat(inputs))
    tensors = {k: v.detach().cpu().contiguous().clone() for k, v in flat.items() if isinstance(v, Tensor)}
    values = {k: v for k, v in inputs.items() if not any(name == k or name.startswith(f"{k}/") for name in tensors)}
    replace_file(folder / "batch.safetensors", save(tensors))
    replace_file(folder / "batch.json", (json.dumps(facts | values, indent=2, default=str) + "\n").encode())


def _flat(inputs: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(name, value) of what is no mapping and no list of tensors, with the names on the way to it."""
    inner: list[tuple[Any, Any]] | None = None
    if isinstance(inputs, Mapping):
        inner = list(inputs.items())
    elif isinstance(inputs, list | tuple) and inputs and isinstance(inputs[0], Tensor):
        inner = list(enumerate(inputs))
    if inner is None:
        yield name, inputs
        return
    for key, value in inner:
        yield from _flat(value, f"{name}/{key}" if name else str(key))


class StepGuard(TrainerCallback):
    """Before each optimiser step all processes agree on: is a loss not finite, has SIGTERM come, how many tokens.

    One reduction of four numbers a step. A process that stopped alone would leave the others waiting for it.
    """

    def __init__(self, trainer: Any, folder: Path | None, stop: StopSignal | None) -> None:
        self.trainer, self.folder, self.stop = trainer, folder, stop
        self.stopping = False
        self.bad: Path | None = None
        self.tokens = (0, 0)

    def check_loss(self, loss: Tensor, inputs: dict[str, Any]) -> None:
        """Note (and save) the first batch of a step whose loss is not finite."""
        if self.bad is not None or bool(torch.isfinite(loss.detach()).all()):
            return
        step = self.trainer.state.global_step + 1
        root = self.folder or Path(self.trainer.args.output_dir)
        rank = self.trainer.args.process_index
        self.bad = root / (
            f"bad-batch-step-{step:06d}" + (f"-process-{rank}" if self.trainer.args.world_size > 1 else "")
        )
        save_batch(self.bad, inputs, {"step": step, "loss": str(loss.detach().float().item()), "process": rank})

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        text, image = self.trainer.take_tokens()
        facts = torch.tensor([self.bad is not None, bool(self.stop and self.stop.received), text, image]).double()
        if args.world_size > 1:
            facts = facts.to(args.device, torch.float32 if args.device.type == "mps" else torch.float64)
            torch.distributed.all_reduce(facts)
        bad, stop, text, image = facts.tolist()
        self.tokens = (int(text), int(image))
        if bad:
            where = self.bad or "the folder of the process that met it"
            raise NonFiniteLossError(
                f"the loss of step {state.global_step + 1} is not finite; its batch is in {where}: look at its "
                f"records, or lower learning_rate (now {self.trainer._get_learning_rate():.3g}); the last checkpoint "
                "holds weights from before"
            )
        self.stopping = self.stopping or bool(stop)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.stopping:
            control.should_training_stop = True
            control.should_save = self.trainer.checkpoints is not None


class Patience(TrainerCallback):
    """Stops after `steps` without a better validation loss, counted from the best one."""

    def __init__(self, steps: int | None) -> None:
        self.steps = steps
        self.ran_out = False

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        losses = [(entry["eval_loss"], entry["step"]) for entry in state.log_history if "eval_loss" in entry]
        if self.steps is None or not losses:
            return
        _, best = min(losses)
        if state.global_step - best >= self.steps:
            self.ran_out = True
            control.should_training_stop = True
