"""Memory, positions and speed over a stream that is many times longer than the model's context."""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from pathlib import Path

import psutil
import pytest

import crossfuse as xf
from crossfuse.streaming.sampling import Decoding
from crossfuse.streaming.session import StreamSession
from matrix import name_of

FRAMES = 1500


@pytest.mark.slow
@pytest.mark.parametrize("fusion", [xf.CrossAttention(joint_text=True)], ids=name_of)
def test_long_stream_stays_where_it_is(fusion, fused, processor, picture):
    model = fused(fusion, max_position_embeddings=128)
    session = StreamSession(model, processor, max_text_tokens=96, decoding=Decoding(max_new_tokens=2))
    text_only = StreamSession(model, processor, max_text_tokens=96, decoding=Decoding(max_new_tokens=2))
    session.add_text([2, 5, 6])
    text_only.add_text([2, 5, 6])
    pictures = [picture(number) for number in range(16)]
    process, relative, memory, resident = psutil.Process(), [], [], 0
    for number in range(FRAMES):
        start = time.process_time()
        session.add_frame(pictures[number % 16])
        list(session.generate())
        middle = time.process_time()
        text_only.add_text([3])
        list(text_only.generate())
        relative.append((middle - start) / max(time.process_time() - middle, 1e-6))
        assert session.next_position <= 96
        assert session.text_tokens <= 96
        memory.append(sum(session.memory().values()))
        if number == 500:
            gc.collect()
            resident = process.memory_info().rss
    gc.collect()
    assert process.memory_info().rss <= 1.02 * resident
    assert max(memory[500:]) == max(memory[:500])
    assert statistics.median(relative[-500:]) <= 1.1 * statistics.median(relative[500:1000])
    # What is said last depends on what is seen last.
    logits = []
    for last in (pictures[0], pictures[1]):
        copy = _copied(session, model, processor)
        copy.add_frame(last)
        logits.append(copy.forward())
    assert (logits[0] - logits[1]).abs().max() > 0.05


def _copied(session, model, processor):
    with tempfile.TemporaryDirectory() as folder:
        session.save(Path(folder) / "s.safetensors")
        return StreamSession.load(Path(folder) / "s.safetensors", model, processor)
