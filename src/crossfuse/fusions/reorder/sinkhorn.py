"""From a score matrix to an order: soft by Gumbel-Sinkhorn (arXiv 1802.08665), hard by the assignment problem.

Shape legend: S samples, K tokens of the longest one. Row i of a score matrix is the place i, column j the token j.
"""

from __future__ import annotations

import torch
from torch import Tensor

_NEVER = -1e9


def gumbel_sinkhorn(
    scores: Tensor, mask: Tensor, temperature: float | Tensor, iterations: int, noise: float = 1.0
) -> Tensor:
    """Soft permutations: rows and columns sum to 1 (columns exactly up to rounding, rows as iterations grow).

    scores (S, K, K), mask (S, K) bool: the real tokens -> (S, K, K) float32, the identity at padding. ``noise`` scales
    the Gumbel noise, which is drawn from torch's global generator. Each iteration keeps two K × K matrices a sample for
    the backward pass.
    """
    logits = scores.float()
    if noise:
        uniform = torch.rand_like(logits).clamp(1e-9, 1 - 1e-7)
        logits = logits - noise * torch.log(-torch.log(uniform))
    logits = masked_to_identity(logits / temperature, mask)
    for _ in range(iterations):
        logits = logits - logits.logsumexp(2, keepdim=True)
        logits = logits - logits.logsumexp(1, keepdim=True)
    return logits.exp()


def masked_to_identity(logits: Tensor, mask: Tensor) -> Tensor:
    """(S, K, K) logits in which padding can only stay where it is, and no token can go there."""
    real = mask[:, :, None] & mask[:, None]
    padding = torch.diag_embed(~mask)
    return logits.masked_fill(~real, _NEVER).masked_fill(padding, 0)


def best_order(scores: Tensor, mask: Tensor) -> Tensor:
    """(S, K) long: the token at each place in the permutation of the largest total score (Hungarian algorithm).

    Padding stays where it is. ValueError where a score is not finite.
    """
    from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]

    order = torch.arange(scores.shape[1]).repeat(len(scores), 1)
    matrices = scores.detach().float().cpu().numpy()
    for sample, count in enumerate(mask.sum(1).tolist()):
        matrix = matrices[sample, :count, :count]
        if not bool(torch.isfinite(torch.from_numpy(matrix)).all()):
            raise ValueError(
                f"the reordering scores of sample {sample} hold NaN or infinite values: training has diverged; lower "
                "the learning rate"
            )
        order[sample, :count] = torch.from_numpy(linear_sum_assignment(matrix, maximize=True)[1])
    return order.to(scores.device)
