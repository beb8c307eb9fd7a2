"""transformers' Trainer for fused models: the loss alone, groups of rates, our order of batches and checkpoints."""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerState, get_scheduler
from transformers.trainer import TRAINER_STATE_NAME

from crossfuse.fusions.reorder import annealing_step, set_annealing_step
from crossfuse.training.batches import evaluation_batches, training_loader
from crossfuse.training.checkpoints import (
    OPTIMIZER,
    TRAINING,
    CheckpointFolder,
    fusion_state,
    load_optimizer_state,
    optimizer_state,
    random_state,
    read_weights,
    set_random_state,
    trained_state,
    write_json,
    write_weights,
)
from crossfuse.training.distributed import (
    gather_in_one_order,
    layer_classes,
    shard_again,
    shard_on_cpus,
    steps_like_an_image_batch,
)
from crossfuse.training.groups import optimizer_groups, plain_model
from crossfuse.training.guards import StepGuard
from crossfuse.training.recipe import Recipe


class FusedTrainer(Trainer):
    """Trainer for fused models: no cache, and the loss alone.

    Without `use_cache=False` transformers may keep a cache in training, which hides packing; without
    `return_logits=False` the evaluation would hold the logits of a whole vocabulary for every token.

    With a `recipe` the order of samples, the optimiser's groups and the schedule come from it; with `checkpoints`
    states are written by `crossfuse.training.checkpoints` instead of pickled.
    """

    model: Any
    optimizer: Any
    lr_scheduler: Any
    data_collator: Any
    recipe: Recipe | None = None
    checkpoints: CheckpointFolder | None = None
    guard: StepGuard | None = None
    alignment_weight = 0.0
    return_logits = False
    image_token_ids: tuple[int, ...] = ()
    lengths: Any = None
    _resumed: dict[str, Any] | None = None
    _tokens: Tensor | None = None
    _forward_names: frozenset[str] | None = None

    # Batches and loss

    def get_train_dataloader(self) -> DataLoader[Any]:
        if self.recipe is None:
            return super().get_train_dataloader()
        loader = training_loader(
            self.train_dataset,
            self.data_collator,
            self.recipe,
            self.args.process_index,
            self.args.world_size,
            self.lengths,
        )
        return loader

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor | int | None:
        items = super()._get_num_items_in_batch(batch_samples, device)
        # A step without a single label has the loss 0, not 0 / 0.
        return items.clamp(min=1) if isinstance(items, Tensor) else items

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        given, inputs = inputs, self._model_inputs(inputs)
        if model.training:
            self._count_tokens(inputs)
        inputs |= {"use_cache": False, "return_logits": self.return_logits}
        if "alignment_tokens" in inputs:
            loss, outputs = self._aligned_loss(model, inputs, num_items_in_batch)
        else:
            loss, outputs = super().compute_loss(
                model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
            )
        if self.guard is not None and model.training:
            self.guard.check_loss(loss, given)
        return (loss, outputs) if return_outputs else loss

    def _model_inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        """All tensors, and of the rest what the model's forward names (`mm_encoder_outputs`), not ids of records."""
        if self._forward_names is None:
            self._forward_names = frozenset(inspect.signature(type(plain_model(self.model)).forward).parameters)
        return {k: v for k, v in batch.items() if isinstance(v, Tensor) or k in self._forward_names}

    def _aligned_loss(self, model: nn.Module, inputs: dict[str, Any], items: Tensor | int | None) -> tuple[Any, Any]:
        from crossfuse.fusions.anchors.alignment import aligned_forward

        if items is not None and self.model_accepts_loss_kwargs:
            inputs["num_items_in_batch"] = items
        scale = self.accelerator.num_processes if items is not None and self.args.average_tokens_across_devices else 1
        weight = self.alignment_weight / self.args.gradient_accumulation_steps / scale
        outputs = aligned_forward(model, inputs, weight)
        return outputs["loss"] * scale, outputs

    def _count_tokens(self, inputs: dict[str, Any]) -> None:
        ids = inputs.get("input_ids")
        if ids is None:
            return
        mask = inputs.get("attention_mask")
        if "segment_ids" in inputs:
            mask = inputs["segment_ids"] >= 0
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        image = torch.zeros_like(real)
        for token in self.image_token_ids:
            image |= ids == token
        counts = torch.stack([(real & ~image).sum(), (real & image).sum()])
        self._tokens = counts if self._tokens is None else self._tokens + counts

    def take_tokens(self) -> tuple[int, int]:
        """(text, image) tokens of this process since the last call."""
        counts, self._tokens = self._tokens, None
        text, image = (0, 0) if counts is None else counts.tolist()
        return text, image

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        return 0  # transformers would count all parameters again for every batch

    # Optimiser and schedule

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.recipe is None or self.optimizer is not None:
            return super().create_optimizer(model)
        target: Any = self.model if model is None else model
        groups = optimizer_groups(target, self.recipe, set(self.get_decay_parameter_names(target)))
        cls, options = self.get_optimizer_cls_and_kwargs(self.args, target)
        self.optimizer = cls(groups, **options)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        if self.recipe is None:
            return super().create_scheduler(num_training_steps, optimizer)
        recipe = self.recipe
        warmup = recipe.warmup_steps
        if warmup is None:
            warmup = math.ceil((recipe.warmup_ratio or 0.0) * num_training_steps)
        self.lr_scheduler = get_scheduler(
            recipe.scheduler, self.optimizer, num_warmup_steps=warmup, num_training_steps=num_training_steps
        )
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if shard_on_cpus(self.accelerator):
            self.is_fsdp_enabled = True
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is not None and not plugin.transformer_cls_names_to_wrap:
            # transformers' own list names classes that lie elsewhere in a vision-language model, or none.
            plugin.transformer_cls_names_to_wrap = layer_classes(self.model)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if self.is_fsdp_enabled:
            gather_in_one_order(self.model)
        return prepared

    # Validation

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Mean loss in nats a supervised token over the whole set; every sample counts once, however many processes."""
        dataset: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        rank, world = self.args.process_index, self.args.world_size
        batches: list[list[int]] = evaluation_batches(dataset, self.args.eval_batch_size, rank, world)
        rounds = len(evaluation_batches(dataset, self.args.eval_batch_size, 0, world))
        model: Any = self.model
        was_training = model.training
        model.eval()
        sums = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for number in range(rounds):
                counted = number < len(batches)
                if not counted and not self.is_fsdp_enabled:
                    break
                # A sharded model needs every process in every round; the repeated batch does not count.
                indices = batches[number] if counted else list(range(min(self.args.eval_batch_size, len(dataset))))
                batch = self._prepare_inputs(self.data_collator([dataset[i] for i in indices]))
                loss, tokens = self._batch_loss(model, batch)
                if counted:
                    sums += torch.tensor([loss * tokens, tokens], dtype=torch.float64)
        model.train(was_training)
        if self.is_fsdp_enabled:
            shard_again(model)
        if world > 1:
            sums = self.accelerator.reduce(sums.to(self.args.device), reduction="sum").cpu()
        if not sums[1]:
            raise ValueError("no token of the validation data has a label; the loss over nothing is undefined")
        metrics = {f"{metric_key_prefix}_loss": float(sums[0] / sums[1]), f"{metric_key_prefix}_tokens": int(sums[1])}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _batch_loss(self, model: Any, batch: dict[str, Any]) -> tuple[float, int]:
        inputs = {k: v for k, v in self._model_inputs(batch).items() if not k.startswith("alignment_")}
        tokens = int((inputs["labels"][:, 1:] != -100).sum())
        if not tokens and not self.is_fsdp_enabled:
            return 0.0, 0
        with steps_like_an_image_batch(model, inputs, self.is_fsdp_enabled):
            loss = model(**inputs, use_cache=False, return_logits=False).loss
        return (float(loss) if tokens else 0.0), tokens

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        better = super()._determine_best_metric(metrics, trial)
        if better and self.checkpoints is not None:
            self.state.best_global_step = self.state.global_step
            self.control.should_save = True
        return better

    # Checkpoints

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self.checkpoints is None:
            super()._save_checkpoint(model, trial)
            return
        step = self.state.global_step
        if self.is_fsdp_enabled:
            shard_again(self.model)
        state, fusion = trained_state(self.model), fusion_state(self.model)
        tensors, values = optimizer_state(self.model, _inner(self.optimizer))
        states: list[Any] = [None] * self.args.world_size
        if self.args.world_size > 1:
            torch.distributed.all_gather_object(states, random_state())
        else:
            states = [random_state()]
        if self.args.process_index == 0:
            from safetensors.torch import save_file

            fresh = self.checkpoints.begin(step)
            write_weights(fresh, self.model, state, fusion)
            save_file(tensors, fresh / OPTIMIZER)
            scaler = getattr(self.accelerator, "scaler", None)
            write_json(
                fresh / TRAINING,
                {
                    "step": step,
                    "processes": self.args.world_size,
                    "optimizer": values,
                    "rates": [group["lr"] for group in self.optimizer.param_groups],
                    "scheduler": self.lr_scheduler.state_dict(),
                    "scaler": scaler.state_dict() if scaler is not None else None,
                    "annealing": annealing_step(self.model),
                    "random": states,
                },
            )
            self.state.log_history = [entry for entry in self.state.log_history if "eval_loss" in entry]
            self.state.save_to_json(str(fresh / TRAINER_STATE_NAME))
            self.checkpoints.finish(fresh, step, best=self.state.best_global_step == step)
        if self.args.world_size > 1:
            torch.distributed.barrier()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.checkpoints is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        read_weights(Path(resume_from_checkpoint), self.model)
        annealed = json.loads((Path(resume_from_checkpoint) / TRAINING).read_text()).get("annealing")
        if annealed is not None:
            set_annealing_step(self.model, annealed)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.checkpoints is None or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        from safetensors.torch import load_file

        stored = json.loads((Path(checkpoint) / TRAINING).read_text())
        inner = _inner(self.optimizer)
        load_optimizer_state(self.model, inner, load_file(Path(checkpoint) / OPTIMIZER), stored["optimizer"])
        self.lr_scheduler.load_state_dict(stored["scheduler"])
        for group, rate in zip(inner.param_groups, stored["rates"], strict=True):
            group["lr"] = rate

    def _load_scaler(self, checkpoint: str | None) -> None:
        if self.checkpoints is None or checkpoint is None:
            super()._load_scaler(checkpoint)
            return
        stored = json.loads((Path(checkpoint) / TRAINING).read_text())["scaler"]
        if stored is not None and getattr(self.accelerator, "scaler", None) is not None:
            self.accelerator.scaler.load_state_dict(stored)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self.checkpoints is None or checkpoint is None:
            super()._load_rng_state(checkpoint)
            return
        states = json.loads((Path(checkpoint) / TRAINING).read_text())["random"]
        if len(states) == self.args.world_size:  # on another number of processes, dropout draws differ anyway
            set_random_state(states[self.args.process_index])


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """The optimiser inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def resumed_step(checkpoint: Path) -> int:
    """The step that a checkpoint was written after."""
    return TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME)).global_step
