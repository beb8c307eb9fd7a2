"""Insertion, the baseline: image tokens stand in the text stream where their placeholder is (LLaVA)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from crossfuse.fusion import Fusion

if TYPE_CHECKING:
    from crossfuse.sequence import Layout, MultimodalSequence
    from crossfuse.streaming.cache import FusionCache


@dataclasses.dataclass(frozen=True)
class Insertion(Fusion):
    """Causal self-attention over text and image tokens alike. Without ``compress`` it equals the unfused model."""

    name: ClassVar[str] = "insertion"

    @property
    def is_identity(self) -> bool:
        return self.compress is None or self.compress.is_identity

    def arrange(self, sequence: MultimodalSequence, cache: FusionCache | None) -> Layout | None:
        return None if self.is_identity else sequence.plain_layout()
