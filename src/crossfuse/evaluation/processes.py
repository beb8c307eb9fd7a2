"""The processes of one `accelerate launch` (or `torchrun`): which part is this one's, and waiting for the others."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any


class Processes:
    """One process, or one of several that were launched together. Nothing is started before there are several."""

    def __init__(self) -> None:
        self.count = int(os.environ.get("WORLD_SIZE", "1"))
        self.index = int(os.environ.get("RANK", "0"))
        if self.count > 1:
            import torch
            from accelerate import PartialState

            # The others wait for the slowest part, which may take hours longer on uneven samples.
            self._state = PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(days=2))

    @property
    def main(self) -> bool:
        """Whether this process writes what there is one of, and speaks."""
        return self.index == 0

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes in their order, in each of them; waits for the slowest."""
        if self.count == 1:
            return [value]
        from accelerate.utils import gather_object

        gathered: list[Any] = gather_object([value])
        return gathered

    def device(self) -> Any:
        """Where this process computes: its own GPU where there are any."""
        import torch

        if self.count > 1:
            return self._state.device
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def close(self) -> None:
        """Leave the group; a process that stays in it warns at its end."""
        if self.count > 1:
            self._state.destroy_process_group()
