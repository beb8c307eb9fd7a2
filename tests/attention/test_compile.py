"""torch.compile around windowed attention: many layouts, few compiled graphs (known failure PK3)."""

import random

import torch
import torch._dynamo.testing

from crossfuse.attention import Windows, windowed_attention
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
    assert frames[-1] <= 6 and frames[-1] == frames[4], frames
    torch._dynamo.reset()
