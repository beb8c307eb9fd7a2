"""Windows: which image tokens, and which text tokens, every text query may see (CASA, section 3).

Two windows of 2 and 3 text tokens with images of 3 and 4 tokens, `joint_text` on; rows are queries, columns are keys::

                image     text
    window 0    ███····   █····
    window 0    ███····   ██···
    window 1    ···████   ··█··
    window 1    ···████   ··██·
    window 1    ···████   ··███

`print(windows)` draws any layout this way. Shape legend: W windows, T queries, N image tokens, K text keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

MAX_DRAWN_ROWS = 48
MAX_DRAWN_COLUMNS = 96


class WindowRange(NamedTuple):
    """One window as Python ints: its queries, image tokens and text keys are `start : start + length` of each array."""

    query_start: int
    query_length: int
    image_start: int
    image_length: int
    text_start: int
    text_length: int


@dataclass(frozen=True, eq=False)
class Windows:
    """Blocks of consecutive text queries and the key ranges that each block sees.

    All fields are int64 tensors of shape (W,), on any device. Ranges may overlap, coincide or be empty.

    Attributes:
        query_lengths: number of queries of each window. Queries are laid out window after window, so these partition
            the query array and sum to T.
        image_starts, image_lengths: the range of flat image tokens that the window sees; length 0 means no image.
        text_starts, text_lengths: the range of flat text keys of the window (both None without joint text). The
            queries are the last `query_lengths` of those keys: query i sees text keys 0 to
            text_lengths - query_lengths + i of the range (causal, aligned at the bottom right).

    The same object is meant to be passed to every layer of a forward: backends keep their plans in it.

    Raises:
        ValueError: on wrong shapes or dtypes, negative values, or fewer text keys than queries.
    """

    query_lengths: Tensor
    image_starts: Tensor
    image_lengths: Tensor
    text_starts: Tensor | None = None
    text_lengths: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.text_starts is None) != (self.text_lengths is None):
            missing = "text_starts" if self.text_starts is None else "text_lengths"
            raise ValueError(f"text_starts and text_lengths are given together or not at all; {missing} is None")
        for name, tensor in self._fields():
            if tensor.dtype != torch.int64:
                raise ValueError(f"{name} must have dtype torch.int64 (use .long()); got {tensor.dtype}")
            if tensor.shape != (len(self),):
                expected = f"({self.query_lengths.numel()},), one entry a window"
                raise ValueError(f"{name} must have shape {expected}; got {tuple(tensor.shape)}")
        self._check_values()

    @classmethod
    def from_lengths(
        cls,
        text_lengths: Sequence[int] | Tensor,
        image_lengths: Sequence[int] | Tensor,
        joint_text: bool = False,
        history: int | None = 1,
        samples: Sequence[int] | Tensor | None = None,
    ) -> Windows:
        """Lays windows out one after the other, each with its own text and its own image tokens.

        Args:
            text_lengths: (W,) text tokens of each window; they are the queries and, with `joint_text`, the text keys.
            image_lengths: (W,) image tokens that stand in front of each window's text.
            joint_text: text keys are added to the image keys (CA_t+v, eq. 4).
            history: how many windows' images are visible, the own window's included; None shows all earlier ones.
            samples: (W,) sample of each window, equal numbers side by side; images of other samples are never visible.
                None puts all windows in one sample.
        """
        text, images = _integers(text_lengths), _integers(image_lengths)
        if len(text) != len(images):
            raise ValueError(
                f"text_lengths and image_lengths need one entry a window; got {len(text)} and {len(images)} entries"
            )
        if history is not None and history < 1:
            raise ValueError(f"history must be at least 1 (or None for every earlier image); got {history}")
        owners = [0] * len(text) if samples is None else _integers(samples)
        if len(owners) != len(text):
            raise ValueError(f"samples needs one entry a window ({len(text)}); got {len(owners)}")
        image_ends = list(accumulate(images, initial=0))
        starts, lengths, first = [], [], 0
        for window in range(len(text)):
            if window and owners[window] != owners[window - 1]:
                first = window
            oldest = first if history is None else max(first, window - history + 1)
            starts.append(image_ends[oldest])
            lengths.append(image_ends[window + 1] - image_ends[oldest])
        query_lengths = torch.tensor(text, dtype=torch.int64)
        text_starts = torch.tensor(list(accumulate(text, initial=0))[:-1], dtype=torch.int64) if joint_text else None
        return cls(
            query_lengths=query_lengths,
            image_starts=torch.tensor(starts, dtype=torch.int64),
            image_lengths=torch.tensor(lengths, dtype=torch.int64),
            text_starts=text_starts,
            text_lengths=query_lengths if joint_text else None,
        )

    def __len__(self) -> int:
        return self.query_lengths.numel()

    @property
    def joint_text(self) -> bool:
        """Whether queries see text keys beside image keys."""
        return self.text_lengths is not None

    @cached_property
    def ranges(self) -> tuple[WindowRange, ...]:
        """The windows as Python ints; one device synchronisation for the whole forward."""
        queries, *others = torch.stack([tensor for _, tensor in self._fields()]).tolist()
        if not self.joint_text:
            others += [[0] * len(self), [0] * len(self)]
        starts = accumulate(queries, initial=0)
        return tuple(WindowRange(*values) for values in zip(starts, queries, *others, strict=False))

    @cached_property
    def query_count(self) -> int:
        """T: the number of queries that the windows partition."""
        return sum(window.query_length for window in self.ranges)

    @cached_property
    def image_count(self) -> int:
        """The smallest N that holds every image range."""
        return max((w.image_start + w.image_length for w in self.ranges if w.image_length), default=0)

    @cached_property
    def text_count(self) -> int:
        """The smallest K that holds every text range."""
        return max((w.text_start + w.text_length for w in self.ranges if w.text_length), default=0)

    @cached_property
    def plans(self) -> dict[Any, Any]:
        """What backends worked out for this layout, by backend and shape of the call; filled on first use."""
        return {}

    def dense_mask(self, queries: int, images: int, texts: int = 0) -> tuple[Tensor, Tensor | None]:
        """Returns the boolean masks (T, N) over image keys and (T, K) over text keys (None without joint text).

        Materialises every pair: for tests, for drawing and for small inputs.
        """
        device = self.query_lengths.device
        if queries != self.query_count:
            raise ValueError(f"windows partition {self.query_count} queries; the mask was asked for {queries}")
        window = torch.repeat_interleave(torch.arange(len(self), device=device), self.query_lengths)
        start = self.image_starts[window, None]
        key = torch.arange(images, device=device)
        image_mask = (key >= start) & (key < start + self.image_lengths[window, None])
        if self.text_starts is None or self.text_lengths is None:
            return image_mask, None
        first_query = self.query_lengths.cumsum(0) - self.query_lengths
        place = torch.arange(queries, device=device) - first_query[window]
        start = self.text_starts[window, None]
        last = start + (self.text_lengths[window] - self.query_lengths[window] + place)[:, None]
        key = torch.arange(texts, device=device)
        return image_mask, (key >= start) & (key <= last)

    def __str__(self) -> str:
        """Draws the mask: a row a query, a column a key; in large layouts a cell stands for a block."""
        image_mask, text_mask = self.dense_mask(self.query_count, self.image_count, self.text_count)
        columns = image_mask.shape[1] + (0 if text_mask is None else text_mask.shape[1])
        down = max(1, -(-self.query_count // MAX_DRAWN_ROWS))
        across = max(1, -(-columns // MAX_DRAWN_COLUMNS))
        drawn = [_draw(mask.cpu(), down, across) for mask in (image_mask, text_mask) if mask is not None]
        owners = [index for index, window in enumerate(self.ranges) for _ in range(window.query_length)][::down]
        margin = len(f"window {max(owners, default=0)}")
        titles = ("image", "text")[: len(drawn)]
        widths = [max(len(title), len(rows[0]) if rows else 0) for title, rows in zip(titles, drawn, strict=True)]
        lines = [" " * margin + "".join(f"   {title:<{width}}" for title, width in zip(titles, widths, strict=True))]
        for row, owner in enumerate(owners):
            cells = "".join(f"   {rows[row]:<{width}}" for rows, width in zip(drawn, widths, strict=True))
            lines.append(f"{f'window {owner}':<{margin}}{cells}")
        lines.append(f"{len(self)} windows, {self.query_count} queries (rows) x {columns} keys (columns)")
        legend = "█ visible  · hidden"
        if down > 1 or across > 1:
            legend += f"  ▒ partly; a cell stands for {down} x {across} pairs"
        return "\n".join(line.rstrip() for line in [*lines, legend])

    def _fields(self) -> list[tuple[str, Tensor]]:
        fields = [
            ("query_lengths", self.query_lengths),
            ("image_starts", self.image_starts),
            ("image_lengths", self.image_lengths),
        ]
        if self.text_starts is not None and self.text_lengths is not None:
            fields += [("text_starts", self.text_starts), ("text_lengths", self.text_lengths)]
        return fields

    def _check_values(self) -> None:
        for index, window in enumerate(self.ranges):
            if min(window) < 0:
                name, value = min(window._asdict().items(), key=lambda item: item[1])
                raise ValueError(f"{name}s must be at least 0; got {value} in window {index}")
            if self.joint_text and window.text_length < window.query_length:
                raise ValueError(
                    f"text_lengths must be at least query_lengths (a query is its own text key); got "
                    f"{window.text_length} keys for {window.query_length} queries in window {index}"
                )


def _integers(values: Sequence[int] | Tensor) -> list[int]:
    return values.tolist() if isinstance(values, Tensor) else [int(value) for value in values]


def _draw(mask: Tensor, down: int, across: int) -> list[str]:
    rows = []
    for band in mask.split(down):
        shares = [block.float().mean().item() for block in band.split(across, dim=1)] if mask.shape[1] else []
        rows.append("".join("█" if share == 1 else "·" if share == 0 else "▒" for share in shares))
    return rows
