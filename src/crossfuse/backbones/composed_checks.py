"""Checks of a composition: every one raises ValueError with the reason and the remedy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def needs_module(argument: str, name: str | None) -> ValueError:
    """The error of a model whose plain module was not given."""
    return ValueError(
        f"the {argument} of this model is a plain module ({name}) that no config describes; pass one: "
        f"from_pretrained(directory, {argument}={name}(...)), and the stored weights are loaded into it"
    )


@torch.no_grad()
def check_projector(model: Any) -> None:
    """ValueError where the projector does not lead from the encoder's width to the LLM's."""
    text_config: Any = model.config.text_config
    projector, wanted = model.model.multi_modal_projector, text_config.hidden_size
    weight = next(projector.parameters(), torch.zeros(()))
    try:
        made = projector(weight.new_zeros(2, model.config.encoder_width)).shape[-1]
    except RuntimeError as error:
        raise ValueError(f"the projector refuses tokens of width {model.config.encoder_width}: {error}") from None
    if made != wanted:
        raise ValueError(f"the projector makes tokens of width {made}; the LLM's width is {wanted}")


@torch.no_grad()
def text_logits(model: Any, body: nn.Module) -> Tensor:
    """Logits of four tokens, in eval mode."""
    training = model.training
    model.eval()
    rows = body.get_input_embeddings().weight  # type: ignore[operator]
    ids = torch.arange(1, 5, device=rows.device)[None] % len(rows)
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    model.train(training)
    return logits


def check_text(model: Any, name: str, expected: Tensor) -> None:
    """ValueError where the LLM does something to its logits (soft caps, scales) that the composed model would not."""
    if not torch.equal(text_logits(model, model.model.language_model), expected):
        raise ValueError(
            f"{name} changes its logits after the head (a soft cap or a scale), which a composed model would lose; "
            "take another LLM (Llama, Mistral, Qwen2, Qwen3, Helium, SmolLM, ...)"
        )
