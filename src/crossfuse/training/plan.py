"""What a recipe would take: steps, tokens, memory and time, worked out from shapes alone (`crossfuse train --dry-run`).

The counts of parameters, tokens and operations follow from the shapes. Memory and time are estimates; every assumption
is among the plan's notes.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import torch

from crossfuse.training.groups import PartSummary, summarise, trainable_table
from crossfuse.training.plan_data import SampleShape, sample_shape
from crossfuse.training.recipe import Recipe
from crossfuse.training.shapes import empty_model

EFFICIENCY = 0.4
"""Share of the speed of plain matrix products that training is taken to reach."""
H100_BF16 = 989e12
"""Operations a second of an H100 SXM in dense bf16 matrix products, as its maker states them."""
_OPTIMIZER_BYTES = {"adamw": 8, "adamw_fused": 8, "adamw_8bit": 2, "paged_adamw_8bit": 2, "adafactor": 0}


@dataclasses.dataclass(frozen=True)
class Plan:
    """A recipe's plan. Tokens and operations are of one optimiser step on all devices; memory is of one device."""

    table: str
    steps: int | None
    samples_per_step: float
    text_tokens: int
    image_tokens: int
    operations: int
    memory: dict[str, int]
    seconds: dict[str, float]
    """Machine -> seconds of the whole run (of one step, where the number of steps is not known)."""
    notes: list[str]

    def lines(self) -> list[str]:
        """The plan as text."""
        total = sum(self.memory.values())
        parts = ", ".join(f"{name} {_bytes(size)}" for name, size in self.memory.items())
        steps = "unknown: the size of the data is not known here" if self.steps is None else f"{self.steps:,}"
        found = [
            *self.table.splitlines(),
            "",
            f"steps     {steps}, {self.samples_per_step:,.4g} samples each",
            f"tokens    {self.text_tokens:,} of text and {self.image_tokens:,} of images a step",
        ]
        if self.steps is not None:
            text, images = self.steps * self.text_tokens, self.steps * self.image_tokens
            found.append(f"          {text:.3g} of text and {images:.3g} of images in all")
        found.append(f"memory    about {_bytes(total)} a device: {parts}")
        for machine, seconds in self.seconds.items():
            what = "for the run" if self.steps is not None else "a step"
            found.append(f"time      about {_duration(seconds)} {what} on {machine}")
        return found + [f"note      {note}" for note in self.notes]


def plan(recipe: Recipe, *, measure: bool = True) -> Plan:
    """The plan of a recipe; no weights are loaded, and of the data only what lies here.

    Args:
        measure: time a few matrix products for the estimate on this machine (a second).

    Raises:
        ValueError: a shape that is not known, a fusion that does not fit the model, or nothing to train.
    """
    import crossfuse as xf
    from crossfuse.training.trainable import prepare_trainable

    notes: list[str] = []
    model, fusion = empty_model(recipe), recipe.make_fusion()
    shape = sample_shape(recipe, model)
    notes += shape.notes
    cost = _forward(model, fusion, shape)
    vision_parameters, patches = _vision(model, shape)
    config = model.config.get_text_config()
    xf.fuse(model, fusion)
    prepared = prepare_trainable(model, recipe)
    parts = {part.part: part for part in summarise(prepared, recipe)}
    rows = recipe.batch_size * recipe.accumulation * recipe.devices
    samples = rows * shape.samples_per_row
    operations = samples * _step_operations(recipe, parts, cost, vision_parameters, patches)
    row_tokens = shape.samples_per_row * (shape.text_tokens + (0 if fusion.drops_images else shape.image_tokens))
    steps = recipe.steps if recipe.steps is not None else _epoch_steps(recipe, shape)
    if recipe.packing is not None:
        notes.append("packed rows are taken to be full")
    if recipe.devices > 1:
        notes.append(
            f"memory is that of DDP, everything on each of {recipe.devices} devices; FSDP2 shards weights, gradients "
            "and optimiser"
        )
    return Plan(
        table=trainable_table(prepared, recipe),
        steps=steps,
        samples_per_step=samples,
        text_tokens=round(samples * shape.text_tokens),
        image_tokens=round(samples * shape.image_tokens),
        operations=round(operations),
        memory=_memory(recipe, parts, config, recipe.batch_size * row_tokens, shape, patches, model),
        seconds=_seconds(recipe, operations * (steps or 1), config, measure, notes),
        notes=notes,
    )


def _forward(model: Any, fusion: Any, shape: SampleShape) -> int:
    """Operations of one sample's forward pass through the decoder and the head."""
    from crossfuse.analysis.cost import prompt_cost

    images = max(1, round(shape.image_tokens))
    cost = prompt_cost(model, fusion, text_tokens=max(1, round(shape.text_tokens)), image_tokens=images)
    config = model.config.get_text_config()
    # `prompt_cost` runs the head once, a training step for every supervised token.
    further_heads = 2 * config.hidden_size * config.vocab_size * max(0, round(shape.supervised) - 1)
    return cost.prefill + cost.training_only + further_heads


def _vision(model: Any, shape: SampleShape) -> tuple[int, float]:
    """(parameters of the vision encoder, patches of one sample)."""
    from crossfuse.training.groups import part_of

    count = sum(p.numel() for name, p in model.named_parameters() if part_of(name) == "vision")
    merge = getattr(getattr(model.config, "vision_config", None), "spatial_merge_size", 1) or 1
    return count, shape.image_tokens * merge**2


def _step_operations(
    recipe: Recipe, parts: dict[str, PartSummary], forward: int, vision_parameters: int, patches: float
) -> float:
    """Operations of one sample in training: forward, gradients of activations, gradients of what trains in full."""
    llm = parts["llm"]
    full = (llm.trained - llm.lora) / llm.parameters
    decoder = forward * (2 + full + recipe.gradient_checkpointing)
    vision = 2 * vision_parameters * patches
    trained = parts["vision"].trained / vision_parameters if "vision" in parts and vision_parameters else 0.0
    return decoder + vision * (1 + 2 * trained)


def _memory(
    recipe: Recipe,
    parts: dict[str, PartSummary],
    config: Any,
    tokens: float,
    shape: SampleShape,
    patches: float,
    model: Any,
) -> dict[str, int]:
    """Bytes on one device. Activations of a block and token: 8 d + 4 f values (d width, f width of the MLP)."""
    width = 4 if recipe.precision == "fp32" else 2
    total = sum(part.parameters + part.lora for part in parts.values())
    trained = sum(part.trained for part in parts.values())
    block = (8 * config.hidden_size + 4 * config.intermediate_size) * width
    layers = config.num_hidden_layers
    held = tokens * layers * block
    if recipe.gradient_checkpointing:
        held = tokens * (layers * config.hidden_size * width + block)
    if recipe.trainable.vision_blocks:
        vision = model.config.vision_config
        inner = getattr(vision, "intermediate_size", 4 * vision.hidden_size)
        pixels = recipe.batch_size * shape.samples_per_row * patches
        held += pixels * recipe.trainable.vision_blocks * (8 * vision.hidden_size + 4 * inner) * width
    supervised = recipe.batch_size * shape.samples_per_row * shape.supervised
    return {
        "weights": round((total - trained) * width + trained * 4),
        "gradients": trained * 4,
        "optimiser": trained * _OPTIMIZER_BYTES[recipe.optimizer],
        "activations": round(held),
        "logits": round(supervised * config.vocab_size * 4 * 2),
    }


def _epoch_steps(recipe: Recipe, shape: SampleShape) -> int | None:
    if shape.records is None or recipe.epochs is None:
        return None
    kept = shape.records * (1 - (recipe.validation_share or 0))
    batches = math.floor(kept / shape.samples_per_row / recipe.batch_size / recipe.devices)
    return math.ceil(recipe.epochs * max(1, math.ceil(batches / recipe.accumulation)))


def _seconds(recipe: Recipe, operations: float, config: Any, measure: bool, notes: list[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    if measure:
        machine, rate = matrix_speed(config.hidden_size, config.intermediate_size, recipe.precision)
        found[machine] = operations / (EFFICIENCY * rate)
        speed = f"{rate / 1e9:,.3g} GFLOP/s"
        notes.append(f"matrix products of this width run at {speed} here, {EFFICIENCY:.0%} of it assumed")
    if recipe.precision != "fp32":
        found[f"{recipe.devices} × H100"] = operations / (EFFICIENCY * H100_BF16 * recipe.devices)
        notes.append(f"an H100 is counted with {H100_BF16 / 1e12:.0f} TFLOP/s, {EFFICIENCY:.0%} of it assumed")
    return found


def matrix_speed(width: int, inner: int, precision: str) -> tuple[str, float]:
    """(name of the machine, operations a second of matrix products of that width), the best of several."""
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32) if cuda else torch.float32
    rows = 8192 if cuda else 64
    left = torch.zeros(rows, width, device=device, dtype=dtype)
    right = torch.zeros(width, inner, device=device, dtype=dtype)
    best, started = float("inf"), time.perf_counter()
    while time.perf_counter() - started < 0.5:
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        left @ right
        if cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    name = torch.cuda.get_device_name() if cuda else f"this machine ({torch.get_num_threads()} CPU threads)"
    return name, 2 * rows * width * inner / best


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} GB"


def _duration(seconds: float) -> str:
    for limit, unit, size in ((120, "s", 1), (7200, "minutes", 60), (172800, "hours", 3600)):
        if seconds < limit:
            return f"{seconds / size:.2g} {unit}" if seconds / size < 10 else f"{seconds / size:.0f} {unit}"
    days = seconds / 86400
    return f"{days:,.0f} days" if days < 730 else f"{days / 365.25:,.0f} years"
