"""Floating-point operations as PyTorch's own counter sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


def count_operations(run: Callable[[], Any]) -> int:
    """Operations that `run()` makes, by `torch.utils.flop_counter`; without gradients.

    Matrix products and convolutions count, what is done element by element does not.
    """
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        run()
    return int(counter.get_total_flops())
