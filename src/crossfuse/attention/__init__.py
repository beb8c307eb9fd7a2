"""Windowed attention over flat, unpadded tokens: one softmax over a window's image tokens and text keys."""

from .windowed import windowed_attention
from .windows import Windows

__all__ = ["Windows", "windowed_attention"]
