"""Rendered clips: the events in the list are the ones that can be seen, at their times."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossfuse.data.clips import EVENT_KINDS, MIN_PAUSE, MOVE_SECONDS, make_clip
from crossfuse.data.scenes import render, split_of


@given(seed=st.integers(0, 10**9), split=st.sampled_from(["train", "validation", "test"]))
@settings(max_examples=30, deadline=None)
def test_events_turn_the_first_scene_into_the_last(seed, split):
    clip = make_clip(seed, split, duration=8.0, events=4)
    assert clip == make_clip(seed, split, duration=8.0, events=4)
    assert split_of(clip.first) == split
    objects = set(clip.first.objects)
    for event in clip.events:
        assert set(clip.scene(event.time - 0.01).objects) == objects
        objects = objects - {event.before} | ({event.after} if event.after else set())
        assert set(clip.scene(event.end).objects) == objects
        assert len({item.name for item in objects}) == len(objects)
    assert set(clip.scene(clip.duration).objects) == objects


@given(seed=st.integers(0, 10**9))
@settings(max_examples=20, deadline=None)
def test_events_keep_their_distance(seed):
    clip = make_clip(seed, duration=10.0, events=5)
    times = [0.0, *itertools.chain.from_iterable((e.time, e.end) for e in clip.events)]
    assert all(event.time >= MIN_PAUSE - 0.01 for event in clip.events)
    assert all(b.time - a.end >= MIN_PAUSE - 0.011 for a, b in itertools.pairwise(clip.events))
    assert times == sorted(times)
    assert times[-1] <= clip.duration


def test_every_kind_of_event_is_described():
    words = {"appear": "appears", "vanish": "vanishes", "move": " moves ", "colour": " turns "}
    seen = set()
    for seed in range(40):
        for event in make_clip(seed).events:
            seen.add(event.kind)
            assert words[event.kind] in event.text
            assert (event.before or event.after).name in event.text
            assert event.kind != "colour" or event.text.endswith(event.after.colour)
    assert seen == set(EVENT_KINDS)


def test_a_move_goes_the_way_that_it_says():
    moves = [(clip, e) for clip in map(make_clip, range(60)) for e in clip.events if e.kind == "move"]
    assert len(moves) > 10
    signs = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
    for clip, event in moves:
        dx, dy = signs[event.text.split()[-1]]
        (x0, y0), (x1, y1) = event.before.centre, event.after.centre
        assert ((x1 - x0 > 0) - (x1 - x0 < 0), (y1 - y0 > 0) - (y1 - y0 < 0)) == (dx, dy)
        middle = set(clip.scene(event.time + MOVE_SECONDS / 2).objects) - set(clip.first.objects)
        assert any(item.name == event.before.name for item in middle)


def test_frames_are_the_scenes_at_their_times():
    clip = make_clip(4, "test", duration=3.0, fps=5.0, events=2)
    frames = list(clip.frames())
    assert len(frames) == len(clip) == 15
    assert [time for time, _ in frames] == [i / 5 for i in range(15)]
    for time, image in frames[::4]:
        assert image.tobytes() == render(clip.scene(time)).tobytes()
    changes = [time for (time, a), (_, b) in itertools.pairwise(frames) if a.tobytes() != b.tobytes()]
    assert changes, "a clip with events changes"
    for time in changes:
        assert any(event.time - 0.2 <= time <= event.end for event in clip.events)


def test_a_short_clip_has_a_frame_and_fewer_events():
    clip = make_clip(0, duration=0.1, fps=1.0, events=9)
    assert len(list(clip.frames())) == 1
    assert clip.events == ()


@pytest.mark.parametrize("wrong", [{"duration": 0.0}, {"fps": -1.0}, {"events": -1}, {"duration": float("nan")}])
def test_impossible_clips_are_refused(wrong):
    with pytest.raises(ValueError, match="duration and fps must be above 0 and events at least 0; got"):
        make_clip(0, **wrong)
