"""torch.compile around windowed attention: many layouts, few compiled graphs (known failure PK3)."""

import random

import pytest
import torch
import torch._dynamo.testing

from crossfuse.attention import Windows, windowed_attention
from crossfuse.attention.flex import padded_length
from crossfuse.attention.reference import reference_attention


def layer(q, k, v, windows):
    return windowed_attention(q * 2, k * 2, v + 1, windows) + 1


def test_pk3_twelve_layouts_compile_a_bounded_number_of_graphs():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(layer, backend=counter)
    draw = random.Random(0)
    frames = []
    for _ in range(12):
        count = draw.randint(2, 6)
        windows = Windows.from_lengths(
            [draw.randint(1, 9) for _ in range(count)], [draw.randint(1, 9) for _ in range(count)]
        )
        q, k, v = (torch.randn(rows, 2, 8) for rows in (windows.query_count, windows.image_count, windows.image_count))
        expected = reference_attention(q * 2, k * 2, v + 1, windows) + 1
        torch.testing.assert_close(compiled(q, k, v, windows), expected, atol=1e-5, rtol=1e-5)
        frames.append(counter.frame_count)
    assert frames[-1] <= 6, frames
    assert frames[-1] == frames[4], frames
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_pk3_flex_traces_fifty_packed_lengths_a_bounded_number_of_times():
    torch._dynamo.reset()
    draw = random.Random(0)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for _ in range(50):
        texts = [draw.randint(1, 60) for _ in range(4)]
        windows = Windows.from_lengths(texts, [draw.randint(1, 200) for _ in texts])
        q, k, v = (torch.randn(rows, 2, 16) for rows in (windows.query_count, windows.image_count, windows.image_count))
        actual = windowed_attention(q, k, v, windows, backend="flex")
        torch.testing.assert_close(actual, reference_attention(q, k, v, windows), atol=1e-5, rtol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before <= 6
    torch._dynamo.reset()


def test_flex_pads_to_few_lengths():
    lengths = {padded_length(length) for length in range(20_481)}
    assert lengths == {128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768}
    assert all(length <= padded_length(length) < max(2 * length, 129) for length in range(20_481))
