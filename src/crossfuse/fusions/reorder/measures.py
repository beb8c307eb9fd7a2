"""What AttAnchor reports of learned reordering, measured: L² memory, noisy gradients, collapse to the identity."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from crossfuse.devices import on_device_of
from crossfuse.fusions.reorder.scorer import ReorderScorer
from crossfuse.fusions.reorder.sinkhorn import best_order, gumbel_sinkhorn


def learned_orders(model: Any, inputs: dict[str, Any]) -> list[Tensor]:
    """The hard order of every sample with an image: (K,) long, the token at each place among those that may move.

    ``inputs`` as for a forward (labels or prompt_mask say where the prompt ends). The model's mode is kept.
    """
    scorer = _scorer(model)
    orders: list[Tensor] = []

    def note(module: nn.Module, args: tuple[Tensor, ...], result: tuple[Tensor, Tensor]) -> None:
        mask = args[2]
        found = best_order(result[0], mask)
        orders.extend(order[real] for order, real in zip(found, mask, strict=True))

    training, hook = model.training, scorer.register_forward_hook(note)
    try:
        with torch.no_grad():
            model.eval()(**inputs)
    finally:
        hook.remove()
        model.train(training)
    return orders


def distance_from_identity(order: Tensor) -> float:
    """Spearman's footrule of an order (K,) against the identity, as a share of its largest value.

    0: nothing moves; 1: as far as can be (a reversal); about 2/3 for a random order.
    """
    count = len(order)
    moved = (order - torch.arange(count, device=order.device)).abs().sum().item()
    return moved / max(count * count // 2, 1)


@dataclasses.dataclass(frozen=True)
class GradientNoise:
    """Gradients of the scoring network over several draws of the Gumbel noise on one batch."""

    draws: int
    mean_norm: float  # of the mean gradient
    spread: float  # root of the summed variances
    losses: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Spread over mean: above 1 a single draw says more about the noise than about the data."""
        return self.spread / self.mean_norm if self.mean_norm else float("inf")


def gradient_noise(model: Any, inputs: dict[str, Any], draws: int = 8) -> GradientNoise:
    """Repeat a training forward (``inputs`` hold labels) under ``draws`` seeds; nothing of the model is changed.

    ValueError for fewer than 2 draws or without labels.
    """
    if draws < 2:
        raise ValueError(f"draws must be at least 2 to have a spread; got {draws}")
    if inputs.get("labels") is None:
        raise ValueError("gradient_noise needs labels in its inputs; the gradient is that of the loss")
    scorer = _scorer(model)
    parameters = [p for p in scorer.parameters() if p.requires_grad]
    training, steps = model.training, scorer.steps.clone()
    gradients, losses = [], []
    try:
        model.train()
        with torch.random.fork_rng():
            for seed in range(draws):
                torch.manual_seed(seed)
                loss = model(**inputs, use_cache=False, return_logits=False).loss
                found = torch.autograd.grad(loss, parameters)
                gradients.append(torch.cat([g.flatten().float() for g in found]))
                losses.append(float(loss.detach()))
                scorer.steps.copy_(steps)
    finally:
        model.train(training)
        scorer.steps.copy_(steps)
    stacked = torch.stack(gradients)
    return GradientNoise(draws, stacked.mean(0).norm().item(), stacked.var(0).sum().sqrt().item(), tuple(losses))


def sinkhorn_bytes(length: int, iterations: int = 20, noise: float = 1.0) -> int:
    """Bytes that one soft permutation of ``length`` tokens keeps for its backward pass, counted tensor by tensor."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    scores = torch.zeros(1, length, length, requires_grad=True)
    mask = torch.ones(1, length, dtype=torch.bool)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        soft = gumbel_sinkhorn(scores, mask, 1.0, iterations, noise)
    total = sum(kept.values())
    del soft  # alive until here, so that no two storages shared an address
    return total


class OrderTracker(TrainerCallback):
    """Measures the mean `distance_from_identity` on one batch every ``every`` optimiser steps of a Trainer.

    ``records`` holds (step, distance). The batch is moved to the model's device.
    """

    def __init__(self, inputs: dict[str, Any], every: int = 10):
        self.inputs, self.every = inputs, every
        self.records: list[tuple[int, float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._measure(model, int(state.global_step))

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step % self.every == 0:
            self._measure(model, int(state.global_step))

    def _measure(self, model: Any, step: int) -> None:
        orders = learned_orders(model, on_device_of(model, self.inputs))
        distances = [distance_from_identity(order) for order in orders]
        if distances:
            self.records.append((step, sum(distances) / len(distances)))


def _scorer(model: nn.Module) -> ReorderScorer:
    found = [module for module in model.modules() if isinstance(module, ReorderScorer)]
    if not found:
        raise ValueError("the model has no reordering network; fuse it with GumbelReorder() first")
    return found[-1]  # under PEFT the trained copy comes after the original
