"""Which part of a model a parameter belongs to, what of each part trains, and at which rate."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from crossfuse.training.recipe import Recipe

PARTS = ("llm", "projector", "fusion", "vision")
PROJECTOR = r"(^|\.)(multi_modal_projector|visual\.merger)\."
_VISION = r"(^|\.)(vision_tower|visual|audio_tower)\."
_WRAPPERS = ("base_model.model.", ".modules_to_save.default", ".base_layer", "_checkpoint_wrapped_module.")


def part_of(name: str) -> str:
    """ "fusion", "projector", "vision" or "llm" by a parameter's or module's full name (PEFT's prefixes allowed)."""
    name = f"{name}."
    if ".cross." in name:
        return "fusion"
    if re.search(PROJECTOR, name):
        return "projector"
    return "vision" if re.search(_VISION, name) else "llm"


def plain_name(name: str) -> str:
    """The name that a parameter has without PEFT around it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def plain_model(model: Any) -> Any:
    """The transformers model inside PEFT's wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def vision_blocks(model: nn.Module, count: int) -> list[str]:
    """Full names of the last `count` blocks of the vision encoder, first to last.

    LLaVA reads an inner hidden state: blocks behind it see no gradient and do not count.

    Raises:
        ValueError: the encoder has no list of blocks, or fewer than `count`.
    """
    if not count:
        return []
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and part_of(name) == "vision" and len(module) > 1
    ]
    if not lists:
        raise ValueError(f"trainable.vision_blocks={count}: the vision encoder has no list of blocks; use 0")
    name, blocks = max(lists, key=lambda item: len(item[1]))
    used = len(blocks)
    config = getattr(plain_model(model), "config", None)
    layer = getattr(config, "vision_feature_layer", None)
    deepest = max(layer) if isinstance(layer, list | tuple) else layer
    if deepest is not None:
        used = deepest if deepest >= 0 else used + 1 + deepest
    if count > used:
        raise ValueError(f"trainable.vision_blocks must be at most {used}, the blocks in use; got {count}")
    return [f"{name}.{index}" for index in range(used - count, used)]


def replaced_parameters(model: nn.Module) -> set[int]:
    """``id`` of parameters that the fusion has put out of use (replaced self-attention): they can never train."""
    found = set()
    for module in model.modules():
        found |= {id(parameter) for parameter in module.__dict__.get("_cross_frozen", ())}
    return found


def train_in_full(model: nn.Module, recipe: Recipe) -> list[str]:
    """Names of the parameters that the recipe trains in full."""
    chosen, unused = recipe.trainable, replaced_parameters(model)
    blocks = tuple(f"{block}." for block in vision_blocks(model, chosen.vision_blocks))
    names = []
    for name, parameter in model.named_parameters():
        part = part_of(name)
        wanted = {
            "llm": chosen.llm == "full",
            "projector": chosen.projector == "full",
            "fusion": chosen.fusion,
            "vision": name.startswith(blocks) if blocks else False,
        }[part]
        if wanted and id(parameter) not in unused:
            names.append(name)
    return names


def trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, parameter) of everything that trains."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name, parameter


def optimizer_groups(model: nn.Module, recipe: Recipe, decayed: set[str]) -> list[dict[str, Any]]:
    """Optimiser groups: one a part and kind of decay, each with the part's learning rate.

    decayed: names that weight decay reaches (biases and norms are left out by transformers' rule).
    """
    groups: dict[tuple[str, bool], list[nn.Parameter]] = {}
    for name, parameter in trainable(model):
        groups.setdefault((part_of(name), name in decayed), []).append(parameter)
    return [
        {
            "params": parameters,
            "lr": getattr(recipe.learning_rates, part) or recipe.learning_rate,
            "weight_decay": recipe.weight_decay if decays else 0.0,
            "part": part,
        }
        for (part, decays), parameters in sorted(groups.items(), key=lambda item: (PARTS.index(item[0][0]), item[0][1]))
    ]


@dataclasses.dataclass(frozen=True)
class PartSummary:
    """What trains in one part of a model. `modules`: how many modules LoRA adapts."""

    part: str
    parameters: int
    trained: int
    lora: int
    modules: int
    learning_rate: float | None


def summarise(model: nn.Module, recipe: Recipe | None = None) -> list[PartSummary]:
    """One line a part; parameters of LoRA count as trained, not among the part's own."""
    lines = []
    named = list(model.named_parameters())
    for part in PARTS:
        own = [(n, p) for n, p in named if part_of(n) == part]
        if not own:
            continue
        lora = [(n, p) for n, p in own if "lora_" in n]
        # PEFT keeps the original beside a module that is trained in full.
        base = [p for n, p in own if "lora_" not in n and ".original_module." not in n]
        trained = sum(p.numel() for _, p in own if p.requires_grad)
        rate = None
        if trained and recipe is not None:
            rate = getattr(recipe.learning_rates, part) or recipe.learning_rate
        adapted = {n.split(".lora_")[0] for n, _ in lora}
        lines.append(
            PartSummary(
                part,
                sum(p.numel() for p in base),
                trained,
                sum(p.numel() for _, p in lora if p.requires_grad),
                len(adapted),
                rate,
            )
        )
    return lines


def trainable_table(model: nn.Module, recipe: Recipe | None = None) -> str:
    """The table that is printed before the first step: parameters, what trains of them, LoRA, learning rate."""
    rows = [("part", "parameters", "trained", "of them LoRA", "adapted modules", "learning rate")]
    lines = summarise(model, recipe)
    for line in lines:
        rate = "-" if line.learning_rate is None else f"{line.learning_rate:g}"
        rows.append((line.part, f"{line.parameters:,}", f"{line.trained:,}", f"{line.lora:,}", f"{line.modules}", rate))
    total, trained = sum(line.parameters for line in lines), sum(line.trained for line in lines)
    share = f"{trained / total:.2%} of the model" if total else ""
    lora, modules = sum(line.lora for line in lines), sum(line.modules for line in lines)
    rows.append(("all", f"{total:,}", f"{trained:,}", f"{lora:,}", f"{modules}", share))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
