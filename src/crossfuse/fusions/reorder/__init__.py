"""Learned reordering of the prompt (AttAnchor, App. J.1), with the measures of what makes it hard to train."""

from crossfuse.fusions.reorder.fusion import GumbelReorder
from crossfuse.fusions.reorder.scorer import annealing_step, set_annealing_step

__all__ = ["GumbelReorder", "annealing_step", "set_annealing_step"]
