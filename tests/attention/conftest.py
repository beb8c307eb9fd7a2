"""Random window layouts (hypothesis) and tensors for them; every backend is tested on the same ones."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import strategies as st

from crossfuse.attention import Windows


class Layout(NamedTuple):
    """A window layout with array sizes that hold it, and head counts."""

    windows: Windows
    images: int
    texts: int
    heads: int
    key_heads: int


LENGTHS = st.sampled_from([0, 1, 1, 2, 3, 5, 17])
IMAGE_LENGTHS = st.sampled_from([0, 0, 1, 4, 4, 9, 60, 150])


@st.composite
def partitions(draw: st.DrawFn) -> tuple[Windows, int, int]:
    """Windows of a batch or a packed row: texts and images one after the other, with a history."""
    count = draw(st.integers(0, 7))
    uniform = draw(st.booleans())
    texts = [draw(LENGTHS)] * count if uniform else [draw(LENGTHS) for _ in range(count)]
    images = [draw(IMAGE_LENGTHS)] * count if uniform else [draw(IMAGE_LENGTHS) for _ in range(count)]
    samples = sorted(draw(st.integers(0, 2)) for _ in range(count))
    windows = Windows.from_lengths(
        texts,
        images,
        draw(st.booleans()),
        draw(st.sampled_from([1, 2, 3, None])),
        draw(st.sampled_from([None, samples])),
    )
    slack = draw(st.sampled_from([0, 0, 3]))
    return windows, sum(images) + slack, sum(texts) + slack if windows.joint_text else 0


@st.composite
def continuations(draw: st.DrawFn) -> tuple[Windows, int, int]:
    """Windows of a cached continuation: any ranges, overlapping or not, with more text keys than queries."""
    count = draw(st.integers(0, 6))
    images, texts = draw(st.sampled_from([0, 1, 12, 160])), 64
    starts = [draw(st.integers(0, images)) for _ in range(count)]
    lengths = [draw(st.integers(0, images - start)) for start in starts]
    queries = [draw(LENGTHS) for _ in range(count)]
    if not draw(st.booleans()):
        return Windows(torch.tensor(queries, dtype=torch.int64), *_longs(starts, lengths)), images, 0
    text_lengths = [size + draw(st.sampled_from([0, 0, 1, 8])) for size in queries]
    text_starts = [draw(st.integers(0, texts - size)) for size in text_lengths]
    return Windows(*_longs(queries, starts, lengths, text_starts, text_lengths)), images, texts


def _longs(*columns: list[int]) -> list[torch.Tensor]:
    return [torch.tensor(column, dtype=torch.int64) for column in columns]


@st.composite
def _layouts(draw: st.DrawFn) -> Layout:
    windows, images, texts = draw(st.one_of(partitions(), continuations()))
    key_heads = draw(st.sampled_from([1, 2]))
    return Layout(windows, images, texts, key_heads * draw(st.sampled_from([1, 3])), key_heads)


@pytest.fixture(scope="session")
def layouts() -> st.SearchStrategy[Layout]:
    """Strategy of random layouts: batches, packed rows with history, and cached continuations."""
    return _layouts()


@pytest.fixture(scope="session")
def tensors():
    """Function of a layout: [q, k_image, v_image (, k_text, v_text)] as leaves, reproducible."""

    def make(layout: Layout, width: int = 8, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        shapes = [(layout.windows.query_count, layout.heads)] + [(layout.images, layout.key_heads)] * 2
        shapes += [(layout.texts, layout.key_heads)] * (2 if layout.windows.joint_text else 0)
        return [torch.randn(*shape, width, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]

    return make


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
