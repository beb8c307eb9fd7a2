"""Fusions that leave the order of the tokens alone and change their rotary positions."""

from crossfuse.fusions.positions.circle import CircleRoPE
from crossfuse.fusions.positions.modality import ModalityRoPE

__all__ = ["CircleRoPE", "ModalityRoPE"]
