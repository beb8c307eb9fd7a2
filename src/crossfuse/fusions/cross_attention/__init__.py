"""CASA: text attends to images by cross-attention in local windows; image tokens never enter the sequence."""

from crossfuse.fusions.cross_attention.fusion import CrossAttention

__all__ = ["CrossAttention"]
