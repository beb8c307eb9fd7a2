"""What one training step costs: processor time, floating-point operations, and what is kept for the backward pass."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from crossfuse.devices import on_device_of


@dataclasses.dataclass(frozen=True)
class StepCost:
    """cpu_seconds: processor time of a step, forward, backward and optimiser (it hardly depends on what else runs; on a
    GPU it is wall time). operations: forward and backward. activation_bytes: tensors kept for the
    backward pass, parameters left out. samples: of the batch that was measured."""

    cpu_seconds: float
    operations: int
    activation_bytes: int
    samples: int


def step_cost(model: Any, batches: Sequence[dict[str, Any]]) -> StepCost:
    """Measure training steps on `batches` (collated, with labels), which change the model: give a copy.

    The model must be ready for training (`prepare_trainable`); the first batch warms up. Raises `ValueError` for fewer
    than two batches.
    """
    if len(batches) < 2:
        raise ValueError(f"a step's cost needs at least 2 batches (one warms up); got {len(batches)}")
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-9)
    times = []
    for batch in batches:
        started = _now(trained[0])
        _loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(_now(trained[0]) - started)
    operations = _operations(model, batches[0])
    kept = _activation_bytes(model, batches[0])
    samples = int(batches[0]["input_ids"].shape[0])
    return StepCost(statistics.median(times[1:]), operations, kept, samples)


def _loss(model: Any, batch: dict[str, Any]) -> Tensor:
    loss: Tensor = model(**on_device_of(model, batch), use_cache=False, return_logits=False).loss
    return loss


def _now(parameter: Tensor) -> float:
    if parameter.device.type == "cuda":
        torch.cuda.synchronize(parameter.device)
        return time.perf_counter()
    return time.process_time()


def _operations(model: Any, batch: dict[str, Any]) -> int:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    # The counter knows the plain kernel's products; CPU's fused one it does not see.
    with sdpa_kernel(SDPBackend.MATH), counter:
        _loss(model, batch).backward()
    model.zero_grad()
    return int(counter.get_total_flops())


def _activation_bytes(model: Any, batch: dict[str, Any]) -> int:
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = _loss(model, batch)
    del loss
    return sum(kept.values())
