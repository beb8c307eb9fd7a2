"""Freezing and adapting: from a fused model and a recipe to the model that is trained."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from crossfuse.training.groups import part_of, replaced_parameters, train_in_full, vision_blocks
from crossfuse.training.recipe import Recipe

# Full names: "q_proj" alone would reach the vision tower and the cross-attention layers too.
LORA_TARGETS = r".*language_model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"
_DECODER = r"(^|\.)language_model\.layers\.\d+\."


def prepare_trainable(model: Any, recipe: Recipe) -> Any:
    """Freeze what the recipe does not train. The model must be fused already; returns the model to train.

    LoRA returns a PEFT model around it, with adapters in the named parts only; what is trained in full beside them is
    in PEFT's ``modules_to_save``, so that the saved adapter holds it. A model that PEFT has wrapped already goes on
    with its adapter. Trained parameters are float32 where the recipe asks for half precision (autocast casts them).

    Raises:
        ValueError: nothing would train, or the combination is not supported.
    """
    if hasattr(model, "peft_config"):
        return _train_again(model)
    chosen = recipe.trainable
    adapts = "lora" in (chosen.llm, chosen.projector)
    if adapts and chosen.llm == "full":
        raise ValueError(
            "trainable.llm=full with trainable.projector=lora would keep the LLM twice; use projector=full or frozen"
        )
    full = train_in_full(model, recipe)
    if not full and not adapts:
        from crossfuse import fusion_of

        raise ValueError(f"{fusion_of(model)} has no weights of its own to train; use trainable.llm=lora")
    if adapts:
        model = _adapted(model, recipe, full)
    else:
        names = set(full)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in names)
    return _cast(model, recipe)


def lora_pattern(model: nn.Module, recipe: Recipe) -> str:
    """A regular expression over full module names that matches exactly what LoRA adapts.

    Linear layers of the decoder's blocks and, where the recipe says so, of the projector. Never the vision encoder, the
    fusion's own layers only where `lora.target_modules` names them and they are not trained in full, and never
    self-attention that a fusion has replaced.

    Raises:
        ValueError: `lora.target_modules` matches nothing there.
    """
    given, chosen = recipe.lora.target_modules, recipe.trainable
    unused = replaced_parameters(model)
    found = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not _is_linear(module) or weight is None or id(weight) in unused:
            continue
        part = part_of(name)
        if part == "projector":
            wanted = chosen.projector == "lora"
        elif part == "llm":
            inside = re.search(_DECODER, name) is not None
            wanted = chosen.llm == "lora" and inside and _matches(given, name)
        else:
            wanted = (
                part == "fusion" and not chosen.fusion and given not in (None, "all-linear") and _matches(given, name)
            )
        if wanted:
            found.append(name)
    if not found:
        raise ValueError(
            f"lora.target_modules={given!r} matches no linear layer of the decoder; it is matched against full names "
            "such as model.language_model.layers.0.self_attn.q_proj"
        )
    return _regex(found)


def _matches(given: str | None, name: str) -> bool:
    if given == "all-linear":
        return True
    return re.fullmatch(LORA_TARGETS if given is None else given, name) is not None


def _is_linear(module: nn.Module) -> bool:
    # 4-bit and 8-bit layers of bitsandbytes are subclasses of nn.Linear.
    return isinstance(module, nn.Linear)


def _regex(names: list[str]) -> str:
    """Names that differ in a block's number only share one alternative."""
    blocks: dict[tuple[str, str], list[str]] = {}
    for name in names:
        match = re.match(r"(.*?layers\.)(\d+)(\..*)", name)
        head, number, tail = match.groups() if match else (name, "", "")
        blocks.setdefault((head, tail), []).append(number)
    tails: dict[tuple[str, str], list[str]] = {}
    for (head, tail), numbers in blocks.items():
        inner = f"({'|'.join(numbers)})" if numbers != [""] else ""
        tails.setdefault((head, inner), []).append(re.escape(tail))
    parts = [f"{re.escape(head)}{inner}({'|'.join(found)})" for (head, inner), found in tails.items()]
    return rf"(.*\.)?({'|'.join(parts)})"


def _adapted(model: Any, recipe: Recipe, full: list[str]) -> Any:
    from peft import LoraConfig, get_peft_model

    modules = []
    if any(part_of(name) == "fusion" for name in full):
        modules.append("cross")
    if recipe.trainable.projector == "full":
        modules.append(_projector_name(model))
    modules += vision_blocks(model, recipe.trainable.vision_blocks)
    config = LoraConfig(
        r=recipe.lora.rank,
        lora_alpha=recipe.lora.alpha,
        lora_dropout=recipe.lora.dropout,
        target_modules=lora_pattern(model, recipe),
        modules_to_save=modules or None,
    )
    return get_peft_model(model, config)


def _projector_name(model: nn.Module) -> str:
    for name, _ in model.named_modules():
        if name and part_of(name) == "projector":
            return name
    raise ValueError("the model has no projector; use trainable.projector=frozen")


def _train_again(model: Any) -> Any:
    """Go on with the adapter that the model has (a loaded one is frozen)."""
    active = model.active_adapter
    for name, parameter in model.named_parameters():
        saved = f".modules_to_save.{active}." in name
        parameter.requires_grad_(saved or ("lora_" in name and f".{active}." in f"{name}."))
    return model


def _cast(model: Any, recipe: Recipe) -> Any:
    """Half precision: frozen weights in it, trained ones in float32. Otherwise everything stays as it was loaded."""
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(recipe.precision)
    if half is None:
        return model
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
        elif parameter.is_floating_point():
            parameter.data = parameter.data.to(half)
    return model
