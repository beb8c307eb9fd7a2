"""The small transformer that scores every token of a prompt for every place in it.

Shape legend: S samples, K tokens of the longest one, d width of the language model, W width of this network.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

if TYPE_CHECKING:
    from crossfuse.fusions.reorder.fusion import GumbelReorder


class ReorderScorer(nn.Module):
    """Embeddings of image and prompt -> scores (place, token). No biases: a constant a row would change no order."""

    steps: Tensor

    def __init__(self, fusion: GumbelReorder, width: int):
        super().__init__()
        self.temperatures = (fusion.temperature, fusion.final_temperature, fusion.anneal_steps)
        self.input = nn.Linear(width, fusion.width, bias=False)
        self.kind = nn.Embedding(2, fusion.width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                fusion.width, fusion.heads, 4 * fusion.width, dropout=0.0, activation="gelu", batch_first=True,
                norm_first=True, bias=False,
            )
            for _ in range(fusion.depth)
        )  # fmt: skip
        self.norm = nn.LayerNorm(fusion.width, bias=False)
        self.place = nn.Linear(fusion.width, fusion.width, bias=False)
        self.token = nn.Linear(fusion.width, fusion.width, bias=False)
        self.identity = nn.Parameter(torch.full((1,), float(fusion.identity_start)))
        # Training forwards so far. Not among the weights; a run's checkpoints hold it: see `set_annealing_step`.
        self.register_buffer("steps", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, tokens: Tensor, is_image: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """tokens (S, K, d), is_image and mask (S, K) bool -> scores (S, K, K) float32 and the temperature, ().

        A training forward counts as one step of the annealing.
        """
        dtype = self.input.weight.dtype
        x = self.input(layer_norm(tokens.to(dtype), tokens.shape[-1:]))
        x = x + self.kind(is_image.long()) + _sinusoids(x.shape[1], x.shape[2], x)
        for block in self.blocks:
            x = block(x, src_key_padding_mask=~mask)
        x = self.norm(x)
        places, candidates = self.place(x).float(), self.token(x).float()
        scores = places @ candidates.transpose(1, 2) / math.sqrt(x.shape[2])
        scores = scores + self.identity.float() * torch.eye(x.shape[1], device=x.device)
        temperature = self._temperature()
        if self.training and torch.is_grad_enabled():
            self.steps += 1
        return scores, temperature

    def _temperature(self) -> Tensor:
        """From the first temperature to the last, by the same factor each step."""
        first, last, steps = self.temperatures
        done = (self.steps.double() / max(steps, 1)).clamp(max=1) if steps else torch.ones_like(self.steps).double()
        return (first * (last / first) ** done).float()


def annealing_step(model: nn.Module) -> int | None:
    """Training forwards that the temperature of a `GumbelReorder` has counted; None without a reordering network."""
    # Of the copies that PEFT makes of a module, only the one that trains counts.
    counts = [int(module.steps) for module in model.modules() if isinstance(module, ReorderScorer)]
    return max(counts, default=None)


def set_annealing_step(model: nn.Module, step: int) -> None:
    """Set how many training forwards the temperature of a `GumbelReorder` counts, as after resuming a run.

    ValueError where the model has no reordering network.
    """
    scorers = [module for module in model.modules() if isinstance(module, ReorderScorer)]
    if not scorers:
        raise ValueError("the model has no reordering network; fuse it with GumbelReorder() first")
    for scorer in scorers:
        scorer.steps.fill_(step)


def _sinusoids(count: int, width: int, like: Tensor) -> Tensor:
    """(count, width) of "Attention Is All You Need", section 3.5: the place that a token has now."""
    rate = torch.exp(torch.arange(0, width, 2, device=like.device) * (-math.log(10_000.0) / width))
    angle = torch.arange(count, device=like.device)[:, None] * rate
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1).to(like.dtype)
