"""Packing: many samples in one row, under a budget of text tokens and one of image tokens (CASA, training setup).

A packed row is attended block-diagonally (``segment_ids``), positions restart at each sample, and the label at each
sample's first token is masked, because nothing of the sample predicts it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

IGNORE_INDEX = -100


@dataclasses.dataclass(frozen=True)
class PackingReport:
    """How full the rows are: each share is tokens held / tokens that would fit."""

    rows: int
    samples: int
    text_share: float
    image_share: float
    too_long: tuple[int, ...]  # samples that exceed a budget alone

    @property
    def binding_share(self) -> float:
        """The share of the budget that runs out first."""
        return max(self.text_share, self.image_share)

    def __str__(self) -> str:
        return (
            f"{self.samples} samples in {self.rows} rows: text {self.text_share:.1%}, images {self.image_share:.1%} of "
            f"the budget, {len(self.too_long)} samples too long"
        )


def pack_samples(
    text_lengths: Sequence[int] | np.ndarray,
    image_lengths: Sequence[int] | np.ndarray,
    max_text_tokens: int = 2048,
    max_image_tokens: int = 20480,
    on_overflow: str = "raise",
) -> tuple[list[list[int]], PackingReport]:
    """Bins under both budgets, in as few rows as two greedy rules find; a bin lists sample indices.

    First-fit-decreasing takes the largest sample first (by the budget that it uses most of). Where both budgets bind
    it leaves about a tenth of them empty, so bins are also filled one after the other, each time with the sample that
    comes nearest to what is left of both budgets (Panigrahy et al. 2011, norm-based greedy); the result with fewer
    rows counts. A sample that exceeds a budget alone raises ValueError, or is left out and listed
    (``on_overflow="skip"``). For insertion give tokens of text and images together as text, with half the budget
    (image tokens then stand in the sequence).
    """
    if len(text_lengths) != len(image_lengths):
        raise ValueError(f"text_lengths and image_lengths differ in length: {len(text_lengths)}, {len(image_lengths)}")
    if on_overflow not in ("raise", "skip"):
        raise ValueError(f"on_overflow must be 'raise' or 'skip'; got {on_overflow!r}")
    limits = np.array([max_text_tokens, max_image_tokens], dtype=np.int64)
    if (limits < 1).any():
        raise ValueError(
            f"both budgets must be at least 1; got {max_text_tokens} text, {max_image_tokens} image tokens"
        )
    sizes = np.stack([np.asarray(text_lengths, dtype=np.int64), np.asarray(image_lengths, dtype=np.int64)], 1)
    over: np.ndarray = np.asarray((sizes > limits).any(1))
    if over.any() and on_overflow == "raise":
        first = int(over.argmax())
        raise ValueError(
            f"sample {first} has {sizes[first, 0]} text and {sizes[first, 1]} image tokens, more than the budgets of "
            f"{max_text_tokens} and {max_image_tokens}; raise them or use on_overflow='skip'"
        )
    fitting = np.flatnonzero(~over)
    packed = min(_first_fit_decreasing(sizes[fitting], limits), _fill_one_by_one(sizes[fitting], limits), key=len)
    bins = [[int(fitting[member]) for member in members] for members in packed]
    held = sizes[~over].sum(0) / (limits * max(len(bins), 1)) if len(sizes) else np.zeros(2)
    report = PackingReport(
        rows=len(bins),
        samples=int((~over).sum()),
        text_share=float(held[0]),
        image_share=float(held[1]),
        too_long=tuple(int(i) for i in over.nonzero()[0]),
    )
    return bins, report


def _first_fit_decreasing(sizes: np.ndarray, limits: np.ndarray) -> list[list[int]]:
    order = np.argsort(-(sizes / limits).max(1), kind="stable")
    free = np.zeros((max(len(sizes), 1), 2), dtype=np.int64)
    bins: list[list[int]] = []
    for index in order:
        fits = (free[: len(bins)] >= sizes[index]).all(1)
        place = int(fits.argmax()) if fits.any() else len(bins)
        if place == len(bins):
            bins.append([])
            free[place] = limits
        free[place] -= sizes[index]
        bins[place].append(int(index))
    return bins


def _fill_one_by_one(sizes: np.ndarray, limits: np.ndarray) -> list[list[int]]:
    """Each bin takes, as long as one fits, the sample nearest to the free space (as shares of the budgets).

    The distance weighs a budget by the total demand for it, so that the one that binds is filled best.
    """
    shares = sizes / limits
    weights = shares.sum(0) / max(float(shares.sum()), 1e-9)
    # |free - share|² = |free|² - 2 share·free + |share|² in the weighted norm; the first term is the same for all.
    text, image = sizes[:, 0].copy(), sizes[:, 1].copy()
    twice, square = 2 * shares * weights, (shares**2 * weights).sum(1)
    left = np.arange(len(sizes))
    bins: list[list[int]] = []
    while len(left):
        free = limits.copy()
        taken = np.zeros(len(left), dtype=bool)
        here = (text[left], image[left], twice[left], square[left])
        while True:
            fits = (here[0] <= free[0]) & (here[1] <= free[1]) & ~taken
            if not fits.any():
                break
            distance = here[3] - here[2] @ (free / limits)
            distance[~fits] = np.inf
            place = int(distance.argmin())
            taken[place] = True
            free -= sizes[left[place]]
        bins.append(left[taken].tolist())
        left = left[~taken]
    return bins


class PackingSampler(Sampler[list[int]]):
    """Batch sampler: each batch holds the samples of one packed row. Shuffled by ``seed`` and epoch.

    Packing is done over windows of ``buffer`` shuffled samples, so that rows differ from epoch to epoch.
    """

    def __init__(
        self,
        text_lengths: Sequence[int],
        image_lengths: Sequence[int],
        max_text_tokens: int = 2048,
        max_image_tokens: int = 20480,
        seed: int = 0,
        buffer: int = 1024,
        on_overflow: str = "raise",
    ) -> None:
        self.text_lengths, self.image_lengths = np.asarray(text_lengths), np.asarray(image_lengths)
        self.limits = (max_text_tokens, max_image_tokens)
        self.seed, self.buffer, self.on_overflow = seed, buffer, on_overflow
        self.epoch = 0
        self._rows = self._pack()

    def set_epoch(self, epoch: int) -> None:
        """Called by trainers before each epoch."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._rows = self._pack()

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._rows)

    @property
    def report(self) -> PackingReport:
        """Over all rows of this epoch."""
        text = sum(int(self.text_lengths[row].sum()) for row in self._rows)
        image = sum(int(self.image_lengths[row].sum()) for row in self._rows)
        rows = max(len(self._rows), 1)
        return PackingReport(
            len(self._rows),
            sum(map(len, self._rows)),
            text / (rows * self.limits[0]),
            image / (rows * self.limits[1]),
            tuple(self._too_long),
        )

    def _pack(self) -> list[list[int]]:
        draw = np.random.default_rng([self.seed, self.epoch])
        order = draw.permutation(len(self.text_lengths))
        rows: list[list[int]] = []
        self._too_long: list[int] = []
        for first in range(0, len(order), self.buffer):
            part = order[first : first + self.buffer]
            bins, report = pack_samples(
                self.text_lengths[part], self.image_lengths[part], *self.limits, on_overflow=self.on_overflow
            )
            rows += [[int(part[i]) for i in members] for members in bins]
            self._too_long += [int(part[i]) for i in report.too_long]
        return [rows[i] for i in draw.permutation(len(rows))]


def pack_batch(batch: dict[str, Any]) -> dict[str, Any]:
    """One packed row (1, T) from a padded batch (B, L) of samples, in their order.

    Token-aligned tensors (input_ids, labels, mm_token_type_ids, ...) lose their padding and stand one sample after the
    other; ``segment_ids`` numbers the samples; ``position_ids`` restart (1-D rotary models; m-RoPE models compute their
    own from the grids). Images and grids are already in reading order. ``attention_mask`` goes: nothing is padding.
    """
    ids: Tensor = batch["input_ids"]
    mask = batch.get("attention_mask")
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    aligned = {
        k: v for k, v in batch.items() if isinstance(v, Tensor) and v.shape == ids.shape and k != "attention_mask"
    }
    packed = {k: v for k, v in batch.items() if k not in aligned and k != "attention_mask"}
    for name, tensor in aligned.items():
        if name == "labels":
            first = (real.cumsum(1) == 1) & real
            tensor = tensor.masked_fill(first, IGNORE_INDEX)
        packed[name] = tensor[real][None]
    rows = torch.arange(len(ids), device=ids.device)[:, None].expand_as(ids)
    packed["segment_ids"] = rows[real][None]
    if "image_grid_thw" not in batch and "video_grid_thw" not in batch:
        packed["position_ids"] = (real.cumsum(1) - 1)[real][None]
    return packed
