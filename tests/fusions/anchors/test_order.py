"""Invariant 11: both directions equal a literal, slow list insertion of Algorithm 1, ties included."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossfuse.fusions.anchors import image_into_text, text_into_image

# Entries of 0 and 1 (or all negated): products of equal size in whatever order they are summed, so that cosines that
# are
# equal in exact arithmetic are equal in float32 too, and ties are real ones.
vector = st.tuples(st.lists(st.integers(0, 1), min_size=4, max_size=4), st.sampled_from([1, -1])).map(
    lambda drawn: [drawn[1] * value for value in drawn[0]]
)
THRESHOLDS = st.sampled_from([0.05, 0.3, 0.45, 0.55, 0.65, 0.75, 0.85, 0.99, 1.0, 1.5])


def squared_cosine(a: list[int], b: list[int]) -> Fraction:
    """The square of the cosine with its sign: exact, and in the same order as the cosine."""
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    lengths = sum(x * x for x in a) * sum(x * x for x in b)
    return Fraction(dot * abs(dot), lengths) if lengths else Fraction(0)


def literal(hosts: list, seekers: list, threshold: float, copy_order: str) -> list[tuple[str, int]]:
    """Algorithm 1 word by word: host tokens in a list; seeker n is inserted directly after the host it resembles."""
    sequence: list[tuple[str, int]] = [("host", m) for m in range(len(hosts))]
    numbered = list(enumerate(seekers))
    # In prompt order the *first* seeker must stand closest to the host: the same insertion, read backwards.
    for n, token in numbered if copy_order == "algorithm" else reversed(numbered):
        best, partner = None, None
        for m, host in enumerate(hosts):
            value = squared_cosine(token, host)
            if best is None or value > best:
                best, partner = value, m
        if best is not None and threshold < 1 and best > 0 and best >= Fraction(threshold) ** 2:
            sequence.insert(sequence.index(("host", partner)) + 1, ("copy", n))
    return sequence


def as_tensor(rows: list[list[int]], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(rows, dtype=dtype).view(len(rows), 4)


DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])
ORDERS = st.sampled_from(["algorithm", "prompt"])


@settings(deadline=None)
@given(st.lists(vector, max_size=7), st.lists(vector, max_size=7), THRESHOLDS, ORDERS, DTYPES)
def test_text_into_image_is_the_algorithm(images, texts, threshold, copy_order, dtype):
    expected = [
        m if kind == "host" else len(images) + m for kind, m in literal(images, texts, threshold, copy_order)
    ] + [len(images) + n for n in range(len(texts))]
    found = text_into_image(as_tensor(images, dtype), as_tensor(texts, dtype), threshold, copy_order)
    assert found.dtype == torch.long
    assert found.tolist() == expected


@settings(deadline=None)
@given(
    st.lists(vector, max_size=7),
    st.lists(vector, min_size=1, max_size=7),
    THRESHOLDS,
    ORDERS,
    DTYPES,
    st.integers(0, 3),
)
def test_image_into_text_is_the_algorithm(images, texts, threshold, copy_order, dtype, pauses):
    expected = list(range(len(images))) + [
        len(images) + m if kind == "host" else m for kind, m in literal(texts, images, threshold, copy_order)
    ]
    found = image_into_text(as_tensor(images, dtype), as_tensor(texts, dtype), threshold, copy_order, pauses)
    assert found.tolist() == expected + [-1] * pauses


def test_several_copies_on_one_token_stand_in_reverse_order():
    """The picture of the algorithm: both words resemble the second patch, and the later one lands closer to it."""
    images, texts = torch.eye(4)[:3], torch.eye(4)[[1, 3, 1]]
    assert text_into_image(images, texts, 0.5).tolist() == [0, 1, 5, 3, 2, 3, 4, 5]
    assert text_into_image(images, texts, 0.5, "prompt").tolist() == [0, 1, 3, 5, 2, 3, 4, 5]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_cosine_that_is_not_finite_never_wins(bad):
    images, texts = torch.eye(4)[:3], torch.eye(4)[[1, 2]]
    images[0] = bad
    texts[1] = bad
    assert text_into_image(images, texts, 0.5).tolist() == [0, 1, 3, 2, 3, 4]
    assert image_into_text(images, texts, 0.5).tolist() == [0, 1, 2, 3, 1, 4]


def test_threshold_one_inserts_nothing_even_where_a_cosine_rounds_above_it():
    token = torch.tensor([[0.3, 0.7, 0.1, 0.2]])
    tokens = token.expand(5, 4) * torch.tensor([[1.0], [3.0], [7.0], [0.1], [1e3]])
    assert text_into_image(tokens, tokens, 1.0).tolist() == list(range(10))
    assert image_into_text(tokens, tokens, 1.0).tolist() == list(range(10))


def test_cosines_are_computed_in_float32_whatever_the_dtype():
    """In bfloat16 the two patches would tie (both 0.9961) and the first would win."""
    images = torch.tensor([[1.0, 0.06], [1.0, 0.05]], dtype=torch.bfloat16)
    texts = torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16)
    assert text_into_image(images, texts, 0.5).tolist() == [0, 1, 2, 2]
