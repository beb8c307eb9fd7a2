"""What transformers' Trainer is told of a recipe, and when it logs, validates and saves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainingArguments

from crossfuse.training.groups import part_of
from crossfuse.training.recipe import Recipe

_OPTIMIZERS = {
    "adamw": "adamw_torch",
    "adamw_fused": "adamw_torch_fused",
    "adamw_8bit": "adamw_bnb_8bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
    "adafactor": "adafactor",
}


class Schedule(TrainerCallback):
    """When to log, validate and save: by the recipe's steps, or at the end of every epoch; always at the end."""

    def __init__(self, recipe: Recipe, saves: bool, validates: bool) -> None:
        self.recipe, self.saves, self.validates = recipe, saves, validates
        self._done = -1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step, ends = state.global_step, state.global_step >= state.max_steps
        control.should_log = step % self.recipe.log_every == 0 or ends
        eval_every, save_every = self.recipe.eval_every, self.recipe.save_every or self.recipe.eval_every
        ends = ends or control.should_training_stop
        due = bool(eval_every and step % eval_every == 0)
        control.should_evaluate = self.validates and (due or step >= state.max_steps)
        if self.saves and (ends or (save_every and step % save_every == 0)):
            control.should_save = True
        if step >= state.max_steps:
            control.should_training_stop = True
        self._note(step, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._done == state.global_step or state.global_step >= state.max_steps:
            return
        by_epoch = self.recipe.eval_every is None
        control.should_evaluate = self.validates and by_epoch
        control.should_save = self.saves and by_epoch and self.recipe.save_every is None

    def _note(self, step: int, control: Any) -> None:
        if control.should_evaluate or control.should_save:
            self._done = step


def training_arguments(recipe: Recipe, out: Path, saves: bool, validates: bool) -> TrainingArguments:
    """What transformers' Trainer is told; data order, groups, schedule and checkpoints are ours (`FusedTrainer`)."""
    accelerated = torch.cuda.is_available() or (hasattr(torch, "xpu") and torch.xpu.is_available())
    return TrainingArguments(
        output_dir=str(out),
        max_steps=recipe.steps if recipe.steps is not None else -1,
        num_train_epochs=recipe.epochs if recipe.epochs is not None else 1,
        per_device_train_batch_size=recipe.batch_size,
        per_device_eval_batch_size=recipe.batch_size,
        gradient_accumulation_steps=recipe.accumulation,
        learning_rate=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.max_grad_norm,
        optim=_OPTIMIZERS[recipe.optimizer],
        bf16=recipe.precision == "bf16",
        fp16=recipe.precision == "fp16",
        use_cpu=not accelerated,
        # Every trained parameter takes part in every step (blank images see to that), so none has to be searched for.
        ddp_find_unused_parameters=False,
        seed=recipe.seed,
        data_seed=recipe.seed,
        logging_steps=recipe.log_every,
        logging_nan_inf_filter=False,
        save_strategy="steps" if saves else "no",
        save_steps=10**9,
        eval_strategy="steps" if validates else "no",
        eval_steps=10**9,
        metric_for_best_model="loss" if validates else None,
        greater_is_better=False,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        prediction_loss_only=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )


@contextlib.contextmanager
def gradient_checkpointing(model: Any) -> Iterator[None]:
    """Checkpoint the blocks of a plain model inside the block, non-reentrantly; not those of a frozen vision encoder.

    transformers hooks the embeddings to require gradients, which only reentrant checkpointing needs: it would make the
    input of a frozen vision encoder differentiable, and the encoder keep all its activations.
    """
    model.activation_checkpointing_enable({"use_reentrant": False})
    if getattr(model, "_require_grads_hooks", None):
        model.disable_input_require_grads()
    for name, module in model.named_modules():
        frozen = part_of(name) == "vision" and not any(p.requires_grad for p in module.parameters())
        if frozen and getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False
    try:
        yield
    finally:
        model.activation_checkpointing_disable()
