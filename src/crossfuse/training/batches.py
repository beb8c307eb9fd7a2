"""Which samples form which batch: an order that depends on seed and epoch alone, shared out among processes.

Batch k of an epoch is the same however many processes there are: process r of W takes batches r, r + W, r + 2W, ..., so
one optimiser step of W processes sees the samples of one step of a single process with W times the accumulation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad
from torch.utils.data import DataLoader, Dataset, Sampler

from crossfuse.data.packing import IGNORE_INDEX, PackingSampler, pack_batch
from crossfuse.training.recipe import Packing, Recipe

Key = int | tuple[int, ...]


class Joined(Dataset[Any]):
    """Several data sets one after the other, with the chance that a sample comes from each.

    weights: None stands for the set's number of records; all None: every record once an epoch.
    """

    def __init__(self, datasets: Sequence[Any], weights: Sequence[float | None]) -> None:
        self.datasets, self.weights = list(datasets), list(weights)
        self.ends = np.cumsum([len(d) for d in datasets])

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def __getitem__(self, index: int) -> Any:
        which = int(np.searchsorted(self.ends, index, side="right"))
        return self.datasets[which][index - int(self.ends[which - 1] if which else 0)]

    def order(self, draw: np.random.Generator) -> np.ndarray:
        """(len,) indices of one epoch."""
        if all(weight is None for weight in self.weights):
            return draw.permutation(len(self))
        sizes = [len(d) for d in self.datasets]
        shares = np.array([s if w is None else w for s, w in zip(sizes, self.weights, strict=True)], dtype=float)
        source = draw.choice(len(sizes), size=len(self), p=shares / shares.sum())
        order = np.empty(len(self), dtype=np.int64)
        for which, size in enumerate(sizes):
            places = np.flatnonzero(source == which)
            rounds = -(-len(places) // size) if size else 0
            if rounds:
                run = np.concatenate([draw.permutation(size) for _ in range(rounds)])
                order[places] = run[: len(places)] + (self.ends[which] - size)
        return order


class _Items(Dataset[Any]):
    """A data set that also gives the samples of a packed row, asked by a tuple of indices."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: Key) -> Any:
        return [self.dataset[i] for i in key] if isinstance(key, tuple) else self.dataset[key]


class TrainingBatches(Sampler[list[Any]]):
    """Batch sampler of one process; the samples of an incomplete last optimiser step are left out.

    dataset: anything with a length. accumulation: batches of each process to one step. rows: epoch -> packed rows
    (tuples of indices), or None without packing. Every epoch has the number of batches of the first one, whatever
    packing makes of it, because a resumed run counts them.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        rows: Callable[[int], list[Key]] | None = None,
        accumulation: int = 1,
    ) -> None:
        self.dataset, self.batch_size, self.seed, self.rank, self.world = dataset, batch_size, seed, rank, world
        self.rows, self.epoch = rows, 0
        units = len(dataset) if rows is None else len(rows(0))
        self._batches = units // (batch_size * accumulation * world) * accumulation
        if not self._batches:
            what = "samples" if rows is None else "packed rows"
            raise ValueError(
                f"the training data hold {units} {what}, fewer than one step needs ({batch_size} x accumulation "
                f"{accumulation} x {world} processes); lower batch_size or accumulation, or give more data"
            )

    def __len__(self) -> int:
        return self._batches

    def set_epoch(self, epoch: int) -> None:
        """Called by the trainer before each epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[Any]]:
        units = self._units()
        for number in range(self._batches):
            first = (number * self.world + self.rank) * self.batch_size
            yield [units[(first + i) % len(units)] for i in range(self.batch_size)]

    def _units(self) -> list[Key]:
        if self.rows is not None:
            return self.rows(self.epoch)
        draw = np.random.default_rng([self.seed, self.epoch])
        if isinstance(self.dataset, Joined):
            return [int(i) for i in self.dataset.order(draw)]
        return [int(i) for i in draw.permutation(len(self.dataset))]


class EpochLoader(DataLoader[Any]):
    """A data loader whose batch sampler is told the epoch."""

    def set_epoch(self, epoch: int) -> None:
        sampler: Any = self.batch_sampler
        while not hasattr(sampler, "set_epoch") and hasattr(sampler, "batch_sampler"):
            sampler = sampler.batch_sampler
        sampler.set_epoch(epoch)


def training_loader(
    dataset: Any,
    collator: Callable[[list[Any]], dict[str, Any]],
    recipe: Recipe,
    rank: int = 0,
    world: int = 1,
    lengths: tuple[Sequence[int], Sequence[int]] | None = None,
) -> EpochLoader:
    """The batches of one process. lengths: (text, image) tokens of every sample, needed for packing."""
    rows = None
    collate: Callable[[list[Any]], dict[str, Any]] = collator
    if recipe.packing is not None:
        if lengths is None:
            raise ValueError("packing needs the lengths of all samples; see crossfuse.training.lengths")
        rows = packed_rows(recipe.packing, lengths, recipe.seed)
        collate = PackedCollator(collator)
    batches = TrainingBatches(dataset, recipe.batch_size, recipe.seed, rank, world, rows, recipe.accumulation)
    return EpochLoader(
        _Items(dataset),
        batch_sampler=batches,
        collate_fn=collate,
        num_workers=recipe.workers,
        persistent_workers=recipe.workers > 0,
        pin_memory=torch.cuda.is_available() and getattr(collator, "pins", True),
        # Its own generator: the loader then draws nothing from the global state that dropout reads.
        generator=torch.Generator().manual_seed(recipe.seed),
    )


def packed_rows(
    packing: Packing, lengths: tuple[Sequence[int], Sequence[int]], seed: int
) -> Callable[[int], list[Key]]:
    """epoch -> packed rows of sample indices. Text and image tokens have budgets of their own, whatever the fusion."""
    text, image = (np.asarray(part, dtype=np.int64) for part in lengths)
    sampler = PackingSampler(
        text.tolist(),
        image.tolist(),
        packing.max_text_tokens,
        packing.max_image_tokens,
        seed=seed,
        on_overflow=packing.on_overflow,
    )

    def rows(epoch: int) -> list[Key]:
        sampler.set_epoch(epoch)
        return [tuple(row) for row in sampler]

    return rows


class PackedCollator:
    """Lists of samples -> packed rows (R, T), the shorter ones padded at their end.

    Padding has the segment -1, no label, and attends to nothing.
    """

    def __init__(self, collator: Callable[[list[Any]], dict[str, Any]]) -> None:
        self.collator = collator

    def __call__(self, rows: list[list[Any]]) -> dict[str, Any]:
        return join_batches([pack_batch(self.collator(row)) for row in rows])


def join_batches(batches: Sequence[dict[str, Any]], fills: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Batches one under the other: rows padded at their end (``fills``: with what, 0 by default), all else in order.

    A batch without images may lack the types of its tokens: all of them are 0.
    """
    if len(batches) == 1:
        return batches[0]
    filled = {"labels": IGNORE_INDEX, "segment_ids": -1, **(fills or {})}
    longest = max(batch["input_ids"].shape[1] for batch in batches)
    joined: dict[str, Any] = {}
    for name in dict.fromkeys(name for batch in batches for name in batch):
        having = [batch for batch in batches if name in batch]
        values = [batch[name] for batch in having]
        if isinstance(values[0], list):
            joined[name] = [item for value in values for item in value]
        elif all(batch[name].shape == batch["input_ids"].shape for batch in having):
            fill = filled.get(name, 0)
            aligned = [batch.get(name, torch.zeros_like(batch["input_ids"])) for batch in batches]
            joined[name] = torch.cat([pad(v, (0, longest - v.shape[1]), value=fill) for v in aligned])
        else:
            joined[name] = torch.cat(values)
    return joined


def evaluation_batches(dataset: Any, batch_size: int, rank: int = 0, world: int = 1) -> list[list[int]]:
    """Indices of this process's validation batches: every sample once over all processes, none twice."""
    batches = [list(range(i, min(i + batch_size, len(dataset)))) for i in range(0, len(dataset), batch_size)]
    return batches[rank::world]
