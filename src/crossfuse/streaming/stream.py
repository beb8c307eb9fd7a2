"""State of one stream: its cache, what the cache holds in which order, and what waits to be forwarded.

A stream is a list of *segments*, text and frames, in the order in which they came. Shape legend: N image tokens of a
frame, d model width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from crossfuse.streaming.cache import FusionCache


@dataclasses.dataclass(eq=False)
class EncodedFrame:
    """One image after tower and projector."""

    features: Tensor  # (N, d)
    grid: tuple[int, int] | None  # (rows, columns)
    arguments: dict[str, Tensor] = dataclasses.field(default_factory=dict)  # what positions need, as image_grid_thw


Segment = list[int] | EncodedFrame
Piece = list[Segment]


@dataclasses.dataclass
class Run:
    """Neighbours in the self-attention cache that are evicted alike: text one by one, an image as a whole."""

    tokens: int
    positions: int  # how far the next position moved
    is_image: bool


class Stream:
    """Everything that belongs to one stream and to no other."""

    def __init__(self, layers: int) -> None:
        self.cache = FusionCache(layers)
        self.runs: list[Run] = []
        self.pending: Piece = []
        self.logits: Tensor | None = None  # (V,) after the last forwarded token
        self.frames = 0  # frames given so far
        self.answered = False  # has anything been generated? What stands before it is the prompt

    @property
    def cached_tokens(self) -> int:
        """Tokens in the self-attention cache, image tokens of insertion included."""
        return sum(run.tokens for run in self.runs)

    @property
    def cached_text_tokens(self) -> int:
        return sum(run.tokens for run in self.runs if not run.is_image)

    @property
    def pending_text_tokens(self) -> int:
        return sum(len(segment) for segment in self.pending if isinstance(segment, list))

    @property
    def pending_frames(self) -> int:
        return sum(isinstance(segment, EncodedFrame) for segment in self.pending)

    @property
    def is_new(self) -> bool:
        """Nothing was given yet."""
        return not self.runs and not self.pending and not self.frames

    @property
    def next_position(self) -> int:
        position = self.cache.next_position
        return 0 if position is None else int(position[0])

    @property
    def ends_with_image(self) -> bool:
        return bool(self.pending) and isinstance(self.pending[-1], EncodedFrame)

    def add_text(self, ids: list[int]) -> None:
        if not ids:
            return
        if self.pending and isinstance(self.pending[-1], list):
            self.pending[-1].extend(ids)
        else:
            self.pending.append(list(ids))

    def add_frame(self, frame: EncodedFrame) -> None:
        self.pending.append(frame)
        self.frames += 1

    def appended(self, run: Run) -> None:
        """Note what a forward has put into the cache."""
        last = self.runs[-1] if self.runs else None
        if last is not None and not last.is_image and not run.is_image:
            last.tokens += run.tokens
            last.positions += run.positions
        elif run.tokens:
            self.runs.append(run)

    def memory(self) -> dict[str, int]:
        """Bytes by part: those of `FusionCache.memory`, and ``pending`` (encoded frames that wait)."""
        waiting = [s.features for s in self.pending if isinstance(s, EncodedFrame)]
        return {**self.cache.memory(), "pending": sum(t.numel() * t.element_size() for t in waiting)}


def pieces(segments: Piece, capacity: int, cost: Any) -> Iterator[Piece]:
    """Cut pending segments into calls of at most ``capacity`` cached tokens; ``cost(frame)`` is an image's share.

    A frame stays with at least one token of the text that follows, so that no call ends with an image where text is to
    come. ValueError where one image is larger than the capacity.
    """
    piece: Piece = []
    room = capacity
    for number, segment in enumerate(segments):
        if isinstance(segment, EncodedFrame):
            follows = number + 1 < len(segments) and isinstance(segments[number + 1], list)
            needed = cost(segment) + int(follows)
            if needed > capacity:
                raise ValueError(
                    f"one frame takes {needed} tokens of the cache, which holds {capacity} beside the sink tokens; "
                    "raise max_text_tokens or compress the image tokens (compress=MeanPool(4))"
                )
            if needed > room and not all(isinstance(s, EncodedFrame) for s in piece):
                yield piece
                piece, room = [], capacity
            piece.append(segment)
            room -= cost(segment)
            continue
        start = 0
        while start < len(segment):
            if room <= 0:
                yield piece
                piece, room = [], capacity
            taken = segment[start : start + room]
            piece.append(taken)
            start += len(taken)
            room -= len(taken)
    if piece:
        yield piece
