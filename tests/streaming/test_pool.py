"""Many streams on one model: each says what it would say alone, and none can stop another."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import crossfuse as xf
import tiny
from crossfuse.streaming.pool import StreamPool
from crossfuse.streaming.sampling import Decoding
from crossfuse.streaming.session import StreamSession
from matrix import name_of

FUSIONS = [
    None,
    xf.Insertion(compress=xf.MeanPool(4)),
    xf.CrossAttention(),
    xf.CrossAttention(joint_text=True),
    xf.CrossAttention(history=2, joint_text=True, share_projections=True),
    xf.CrossAttention(every=2, replace=True, joint_text=True),
    xf.CrossAttention(gist_tokens=1, joint_text=True),
]
# Streams that get a frame in each step: they come and go unevenly.
PLAN = [("a", "b", "c"), ("b",), ("a", "c"), ("a", "b", "c"), ("c",), ("a", "b"), ("a", "b", "c"), ("a", "b", "c")]


@pytest.mark.parametrize("bound", [None, 60], ids=["endless", "bounded"])
@pytest.mark.parametrize("fusion", FUSIONS, ids=lambda f: "unfused" if f is None else name_of(f))
def test_pool_equals_sessions_apart(bound, fusion, fused, processor, picture):
    model = fused(fusion)
    lengths = {"a": 2, "b": 5, "c": 3}

    def options(name):
        return {
            "max_text_tokens": bound,
            "block_tokens": 7,
            "decoding": Decoding(max_new_tokens=lengths[name], temperature=0.7, seed=len(name), stop_tokens=(5, 9, 13)),
        }

    pool = StreamPool(model, processor)
    alone = {}
    for name in lengths:
        alone[name] = StreamSession(model, processor, **options(name))
        for session in (pool.open(name, **options(name)), alone[name]):
            session.add_text([2] + [7] * lengths[name])
    said = []
    for number, names in enumerate(PLAN):
        texts, errors = pool.step({name: picture(10 * number + ord(name)) for name in names})
        assert not errors
        for name in names:
            alone[name].add_frame(picture(10 * number + ord(name)))
            said.append((texts[name], "".join(alone[name].generate())))
    assert [together for together, _ in said] == [apart for _, apart in said]
    assert len({together for together, _ in said}) > 5
    for name, session in pool.sessions.items():
        assert session.memory() == alone[name].memory()
        assert session.stream.runs == alone[name].stream.runs
        assert session.next_position == alone[name].next_position
        tiny.assert_close(session.forward(), alone[name].forward(), atol=1e-4)


def test_step_runs_tower_and_decoder_once_for_all(fused, processor, picture):
    model = fused(xf.CrossAttention())
    pool = StreamPool(model, processor, decoding=Decoding(max_new_tokens=4))
    for name in "abcd":
        pool.open(name).add_text([2, 5])
    calls = []
    model.model.vision_tower.register_forward_hook(lambda *_: calls.append("tower"))
    model.model.language_model.register_forward_hook(lambda *_: calls.append("decoder"))
    pool.step({name: picture(ord(name)) for name in "abcd"})
    assert calls == ["tower"] + ["decoder"] * 4


def test_frame_that_cannot_be_used_stops_its_stream_alone(fused, processor, picture):
    pool = StreamPool(fused(xf.CrossAttention()), processor, decoding=Decoding(max_new_tokens=2))
    for name in "abc":
        pool.open(name)
    texts, errors = pool.step({"a": picture(0), "b": "not a picture", "c": picture(1)})
    assert set(texts) == {"a", "c"}
    assert "PIL image" in str(errors["b"])
    assert pool.sessions["b"].stream.is_new
    with pytest.raises(ValueError, match="no stream 'd' is open; open: a, b, c"):
        pool.step({"d": picture(0)})
    with pytest.raises(ValueError, match="'a' is open already"):
        pool.open("a")


def test_stream_at_the_models_limit_stops_alone(fused, processor, picture):
    pool = StreamPool(
        fused(xf.CrossAttention(), max_position_embeddings=20), processor, decoding=Decoding(max_new_tokens=2)
    )
    pool.open("long").add_text([5] * 20)
    pool.open("short").add_text([5])
    texts, errors = pool.step({"long": picture(0), "short": picture(1)})
    assert set(texts) == {"short"}
    assert "the model's limit is 20" in str(errors["long"])


def test_run_reads_uneven_sources_and_outlives_a_broken_one(fused, processor, picture):
    model = fused(xf.CrossAttention())
    decoding = Decoding(max_new_tokens=2)

    def steady(count):
        for number in range(count):
            yield number / 2, picture(number)

    def broken():
        yield 0.0, picture(50)
        raise OSError("the camera is gone")

    release = threading.Event()

    def waiting():
        yield 0.0, picture(60)
        release.wait(30)
        yield 1.0, picture(61)

    pool = StreamPool(model, processor, decoding=decoding)
    seen: dict[str, list] = {"steady": [], "broken": [], "waiting": []}
    for event in pool.run({"steady": steady(6), "broken": broken(), "waiting": waiting()}):
        seen[event.stream].append(event)
        if len(seen["steady"]) == 7 and not release.is_set():  # while the third source still waits
            assert len(seen["waiting"]) <= 1
            release.set()
    assert [e.time for e in seen["steady"][:-1]] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert [e.time for e in seen["waiting"][:-1]] == [0.0, 1.0]
    assert str(seen["broken"][-1].error) == "the camera is gone"
    assert all(events[-1].ended for events in seen.values())
    assert not pool.sessions
    alone = StreamSession(model, processor, decoding=decoding)
    expected = []
    for number in range(6):
        alone.add_frame(picture(number))
        expected.append("".join(alone.generate()))
    assert [e.text for e in seen["steady"][:-1]] == expected


def test_leaving_early_stops_the_threads(fused, processor, picture):
    closed = threading.Event()

    def endless():
        try:
            while True:
                yield 0.0, picture(0)
        finally:
            closed.set()

    pool = StreamPool(fused(xf.CrossAttention()), processor, decoding=Decoding(max_new_tokens=1))
    events = pool.run({"one": endless()})
    next(events)
    events.close()
    assert closed.wait(5)
    assert not pool.sessions
    end = time.monotonic() + 5
    while any(t.name == "crossfuse source one" for t in threading.enumerate()) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(t.name == "crossfuse source one" for t in threading.enumerate())


def test_stacked_streams_come_apart_as_they_were(fused, processor, picture):
    from crossfuse.streaming.stacking import stack, unstack

    model = fused(xf.CrossAttention(joint_text=True))
    sessions = [StreamSession(model, processor) for _ in range(3)]
    for number, session in enumerate(sessions):
        session.add_text([5] * (1 + 3 * number))
        if number:
            session.add_frame(picture(number))
        session.forward()
    joined = stack([s.stream.cache for s in sessions])
    assert joined.mask.shape == (3, 8)
    for row, session in enumerate(sessions):
        fresh = session.engine.new_stream().cache
        unstack(joined, row, fresh)
        own = session.stream.cache
        assert torch.equal(fresh.mask, own.mask)
        assert torch.equal(fresh.next_position, own.next_position)
        assert fresh.memory() == own.memory()
        for a, b in zip(fresh.layers, own.layers, strict=True):
            assert torch.equal(a.keys, b.keys)
            assert torch.equal(a.values, b.values)
            for name in ("image_keys", "image_values", "text_keys", "text_values"):
                if row:
                    assert torch.equal(getattr(a, name), getattr(b, name))
