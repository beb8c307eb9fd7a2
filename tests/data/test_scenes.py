"""Rendered scenes: deterministic, inside the picture, splits that share nothing, boxes that are true."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossfuse.data.scenes import (
    COLOURS,
    KINDS,
    MAX_OVERLAP,
    Scene,
    SceneObject,
    make_scene,
    overlap,
    render,
    scene_key,
    split_of,
)

SPLITS = ("train", "validation", "test")
seeds = st.integers(0, 10**12)


@given(seed=seeds, split=st.sampled_from(SPLITS))
@settings(max_examples=40, deadline=None)
def test_a_scene_is_what_it_promises(seed, split):
    scene = make_scene(seed, split)
    assert scene == make_scene(seed, split)
    assert 64 <= scene.size <= 128
    assert 1 <= len(scene.objects) <= 6
    assert split_of(scene) == split
    for i, item in enumerate(scene.objects):
        x0, y0, x1, y1 = item.box
        assert 0 <= x0 < x1 <= scene.size
        assert 0 <= y0 < y1 <= scene.size
        assert item.size == max(x1 - x0, y1 - y0)
        assert item.kind in KINDS
        assert item.colour in COLOURS
        assert all(overlap(item.box, other.box) <= MAX_OVERLAP for other in scene.objects[:i])


def test_the_splits_never_share_a_scene():
    keys = {split: {scene_key(make_scene(seed, split)) for seed in range(600)} for split in SPLITS}
    assert not keys["train"] & keys["validation"]
    assert not keys["train"] & keys["test"]
    assert not keys["validation"] & keys["test"]


def test_the_split_hangs_on_content_alone():
    scene = make_scene(3, "test")
    other = Scene(scene.size, (255, 255, 255), tuple(reversed(scene.objects)))
    assert scene_key(other) == scene_key(scene)
    assert split_of(other) == "test"


def test_an_unknown_split_is_refused_by_name():
    with pytest.raises(ValueError, match="split must be one of train, validation, test; got 'dev'"):
        make_scene(0, "dev")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("colour", ["red", "black"])
def test_the_box_holds_the_shape_and_is_tight(kind, colour):
    box = (20, 30, 52, 62)
    scene = Scene(96, (240, 250, 245), (SceneObject(kind, colour, 32, box),))
    pixels = np.asarray(render(scene)).astype(int)
    shown = np.abs(pixels - np.array(scene.background)).sum(2) > 6
    ys, xs = np.nonzero(shown)
    assert (xs.min(), ys.min(), xs.max() + 1, ys.max() + 1) == pytest.approx(box, abs=1)
    # The middle of every kind is filled with the pure colour.
    assert tuple(pixels[46, 36]) == COLOURS[colour]


def test_edges_are_anti_aliased():
    scene = Scene(64, (255, 255, 255), (SceneObject("circle", "black", 32, (16, 16, 48, 48)),))
    grey = np.unique(np.asarray(render(scene))[..., 0])
    assert {0, 255} < set(grey.tolist())
    assert len(grey) > 8


@given(seed=seeds)
@settings(max_examples=10, deadline=None)
def test_pictures_are_equal_to_the_last_pixel(seed):
    scene = make_scene(seed, "validation")
    first, second = render(scene), render(scene)
    assert first.size == (scene.size, scene.size)
    assert first.mode == "RGB"
    assert first.tobytes() == second.tobytes()
