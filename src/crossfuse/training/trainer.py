"""Running a recipe: transformers' Trainer, with what a fused model needs said once."""

from __future__ import annotations

import dataclasses
import re
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from crossfuse.training.recipe import Recipe

# Full names: "q_proj" alone would reach the vision tower and the cross-attention layers too.
LORA_TARGETS = r".*language_model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"

PROJECTOR = r"(^|\.)(multi_modal_projector|visual\.merger)\."


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """What a run did. `losses`: (optimiser step, mean loss in nats a token) of every step."""

    losses: list[tuple[int, float]]
    seconds: float
    steps: int
    samples: int
    trained_parameters: int


class FusedTrainer(Trainer):
    """Trainer for fused models: no cache, and the loss alone.

    Without `use_cache=False` transformers may keep a cache in training, which hides packing; without
    `return_logits=False` the evaluation would hold the logits of a whole vocabulary for every token.
    """

    alignment_weight = 0.0

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        inputs = inputs | {"use_cache": False, "return_logits": False}
        if "alignment_tokens" in inputs:
            from crossfuse.fusions.anchors.alignment import aligned_forward

            if num_items_in_batch is not None and self.model_accepts_loss_kwargs:
                inputs["num_items_in_batch"] = num_items_in_batch
            weight = self.alignment_weight / self.args.gradient_accumulation_steps
            outputs = aligned_forward(model, inputs, weight)
            return (outputs["loss"], outputs) if return_outputs else outputs["loss"]
        return super().compute_loss(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)


class StepReport(TrainerCallback):
    """Collects the loss of every step and hands each step to a progress display."""

    def __init__(self, progress: Callable[[int], None] | None) -> None:
        self.losses: list[tuple[int, float]] = []
        self._progress = progress

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._progress is not None:
            self._progress(1)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs and "loss" in logs:
            self.losses.append((state.global_step, float(logs["loss"])))


def prepare_trainable(model: Any, recipe: Recipe) -> Any:
    """Freeze what the recipe does not train. The model must be fused already; returns the model to train.

    "lora" returns a PEFT model around it, with adapters in the decoder's layers only; the fusion's own
    weights, where there are any, are trained in full beside them.

    Raises:
        ValueError: "fusion" is asked of a fusion without weights.
    """
    from crossfuse import fusion_of, fusion_parameters

    new = fusion_parameters(model)
    if recipe.train == "fusion":
        if not new:
            raise ValueError(f"{fusion_of(model)} has no weights of its own to train; use train='lora'")
        model.requires_grad_(False)
        for parameter in new.values():
            parameter.requires_grad_(True)
        _train_projector(model, recipe)
        return model
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=recipe.lora_rank,
        lora_alpha=recipe.lora_alpha,
        target_modules=LORA_TARGETS,
        modules_to_save=["cross"] if new else None,
    )
    adapted = get_peft_model(model, config)
    _train_projector(adapted, recipe)
    return adapted


def _train_projector(model: nn.Module, recipe: Recipe) -> None:
    for name, parameter in model.named_parameters():
        if recipe.train_projector and re.search(PROJECTOR, name):
            parameter.requires_grad_(True)


def fine_tune(
    model: Any, dataset: Any, collator: Any, recipe: Recipe, *, progress: Callable[[int], None] | None = None
) -> TrainingRun:
    """Train `model` (from `prepare_trainable`) in place.

    Args:
        dataset: map-style; read in an order that depends on the recipe's seed alone, over again where it is
            too short.
        collator: turns a list of its items into model inputs with `labels`.
        progress: called with 1 after each optimiser step.
    """
    report = StepReport(progress)
    with tempfile.TemporaryDirectory(prefix="crossfuse-") as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            max_steps=recipe.steps,
            per_device_train_batch_size=recipe.batch_size,
            learning_rate=recipe.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=recipe.warmup_steps,
            weight_decay=recipe.weight_decay,
            max_grad_norm=recipe.max_grad_norm,
            optim="adamw_torch",
            seed=recipe.seed,
            data_seed=recipe.seed,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            prediction_loss_only=True,
            dataloader_drop_last=True,
            dataloader_pin_memory=torch.cuda.is_available(),
        )
        trainer = FusedTrainer(
            model=model, args=arguments, train_dataset=dataset, data_collator=collator, callbacks=[report]
        )
        trainer.alignment_weight = recipe.alignment_weight
        trainer.remove_callback(PrinterCallback)
        started = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - started
    return TrainingRun(
        losses=report.losses,
        seconds=seconds,
        steps=recipe.steps,
        samples=recipe.steps * recipe.batch_size,
        trained_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
    )


@torch.inference_mode()
def mean_loss(model: nn.Module, batches: Any) -> float:
    """Mean cross-entropy in nats a supervised token over collated batches; logits are never kept."""
    total, tokens = 0.0, 0
    for batch in batches:
        # Labels are shifted by one: the first column predicts nothing.
        supervised = int((batch["labels"][:, 1:] != -100).sum())
        if supervised:
            loss = model(**batch, use_cache=False, return_logits=False).loss
            total += float(loss) * supervised
            tokens += supervised
    if not tokens:
        raise ValueError("no token of these batches has a label; the loss over nothing is undefined")
    return total / tokens
