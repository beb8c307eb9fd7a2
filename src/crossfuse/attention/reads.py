"""Reads ranges of a flat token array for the buckets of a plan, with a backward that writes one gradient buffer.

Slicing an array W times costs autograd W gradient buffers of the whole array; reading all ranges in one function costs
one. Ranges may overlap: their gradients add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Read:
    """Rows of a flat array, as `count` sequences of `length` rows.

    Either consecutive rows from `start` on (a view, nothing is copied), or the rows listed in `index`
    (count * length,), where `slots` lists the places in `index` that hold a real row; the others are padding.
    """

    count: int
    length: int
    start: int = 0
    index: Tensor | None = None
    slots: Tensor | None = None

    @classmethod
    def padded(cls, ranges: Sequence[tuple[int, int]], device: torch.device) -> Read:
        """Gathers non-empty ranges (start, length), padded to the longest by repeating each range's last row.

        Padding never reads a foreign row: masked scores of a non-finite key would still be NaN.
        """
        length = max(size for _, size in ranges)
        starts = torch.tensor([start for start, _ in ranges])[:, None]
        sizes = torch.tensor([size for _, size in ranges])[:, None]
        place = torch.arange(length)
        index = starts + place.minimum(sizes - 1)
        slots = (place < sizes).flatten().nonzero().flatten()
        return cls(len(ranges), length, index=index.flatten().to(device), slots=slots.to(device))

    def of(self, flat: Tensor) -> Tensor:
        """(rows, H, D) -> (count, length, H, D)."""
        if self.index is not None:
            flat = flat.index_select(0, self.index)
        elif self.count * self.length != flat.shape[0]:
            flat = flat.narrow(0, self.start, self.count * self.length)
        return flat.unsqueeze(0) if self.count == 1 else flat.unflatten(0, (self.count, self.length))

    def add_gradient(self, total: Tensor, gradient: Tensor, fresh: bool) -> None:
        """Adds the gradient of `of` into `total`; with `fresh` no other range has touched these rows."""
        gradient = gradient.reshape(-1, *total.shape[1:])
        if self.index is None:
            rows = total.narrow(0, self.start, self.count * self.length)
            rows.copy_(gradient) if fresh else rows.add_(gradient)
            return
        assert self.slots is not None
        index, gradient = self.index[self.slots], gradient.index_select(0, self.slots)
        if fresh:
            total.index_copy_(0, index, gradient)
        else:
            total.index_add_(0, index, gradient)


@dataclass(frozen=True)
class Reads:
    """All reads of one array. `disjoint`: no row is read twice, padding aside."""

    reads: tuple[Read, ...]
    disjoint: bool

    @classmethod
    def over(cls, reads: Sequence[Read], ranges: Sequence[tuple[int, int]]) -> Reads:
        """`ranges` are the (start, length) of the real rows behind `reads`, in any order."""
        end, disjoint = 0, True
        for start, length in sorted(item for item in ranges if item[1]):
            disjoint &= start >= end
            end = max(end, start + length)
        return cls(tuple(reads), disjoint)

    def of(self, flat: Tensor) -> Sequence[Tensor]:
        """(rows, H, D) -> one (count, length, H, D) tensor a read."""
        if not self.reads:
            return ()
        if not (flat.requires_grad and torch.is_grad_enabled()):
            return [read.of(flat) for read in self.reads]
        if len(self.reads) == 1 and self.reads[0].index is None:
            return [self.reads[0].of(flat)]
        return _ReadAll.apply(flat, self)  # type: ignore[no-any-return]


def keep_in_graph(out: Tensor, unused: Sequence[Tensor]) -> Tensor:
    """Ties inputs that nobody attends to to the output: their gradients are exactly zero, not None.

    DDP waits for the gradient of every parameter, also in a step without images.
    """
    for tensor in unused:
        if tensor.requires_grad:
            out = out + tensor[:0].sum()
    return out


class _ReadAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flat: Tensor, reads: Reads) -> tuple[Tensor, ...]:
        ctx.reads, ctx.shape = reads, flat.shape
        ctx.set_materialize_grads(False)
        return tuple(read.of(flat) for read in reads.reads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        given = [(read, grad) for read, grad in zip(ctx.reads.reads, gradients, strict=True) if grad is not None]
        if not given:
            return None, None
        total = given[0][1].new_zeros(ctx.shape)
        for read, gradient in given:
            read.add_gradient(total, gradient, fresh=ctx.reads.disjoint)
        return total, None
