"""A validation set out of the training data: the same records whenever seed and share are the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from crossfuse.training.batches import Joined


class Chosen(Sequence[Any]):
    """The records of a data set with the given numbers, in their order."""

    def __init__(self, dataset: Any, indices: np.ndarray) -> None:
        self.dataset, self.indices = dataset, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.dataset[int(self.indices[index])]


def hold_out(data: Joined, share: float, seed: int) -> tuple[Joined, Joined]:
    """(training data, validation data): this share of each set of `data`, drawn by `seed`, is never trained on.

    Raises:
        ValueError: the share leaves no record to one of the two.
    """
    kept: list[Any] = []
    held: list[Any] = []
    for number, dataset in enumerate(data.datasets):
        order = np.random.default_rng([seed, number]).permutation(len(dataset))
        count = round(share * len(dataset))
        held.append(Chosen(dataset, np.sort(order[:count])))
        kept.append(Chosen(dataset, np.sort(order[count:])))
    train, validation = Joined(kept, data.weights), Joined(held, [None] * len(held))
    if not len(train) or not len(validation):
        raise ValueError(
            f"validation_share={share:g} of {len(data)} records leaves {len(train)} to train on and {len(validation)} "
            "to validate with; change it, or give `validation`"
        )
    return train, validation
