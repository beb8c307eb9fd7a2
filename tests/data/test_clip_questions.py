"""Questions about rendered clips: one right answer over all frames, deterministic, and refused where none can be."""

from __future__ import annotations

import pytest

from crossfuse.data.clip_questions import ClipQuestions
from crossfuse.training.recipe_files import load_recipe
from crossfuse.training.start import open_source

EASY = {"duration": 3.0, "most_events": 1, "events": ["appear", "vanish"], "objects": 2}


def objects_by_frame(clip):
    return [{(item.colour, item.kind) for item in clip.scene(i / clip.fps).objects} for i in range(len(clip))]


def test_every_answer_follows_from_the_frames_alone():
    data = ClipQuestions("test", 80, **EASY)
    last_alone = 0
    for i in range(80):
        clip, question, answer = data.clip(i)
        frames = objects_by_frame(clip)
        seen = set().union(*frames)
        words = question.removesuffix("?").split()
        kind = data.kinds[i % 4]
        if kind == "colour":
            assert [colour for colour, shape in seen if shape == words[-1]] == [answer]
            last_alone += any(shape == words[-1] for _, shape in frames[-1])
        elif kind == "shape":
            assert [shape for colour, shape in seen if colour == words[-2]] == [answer]
            last_alone += any(colour == words[-2] for colour, _ in frames[-1])
        else:
            first, last = (frames[0], frames[-1]) if kind == "vanish" else (frames[-1], frames[0])
            assert [" ".join(pair) for pair in first - last] == [answer]
    assert 20 < last_alone < 40  # the last frame alone does not tell


def test_records_hold_the_frames_and_are_the_same_whatever_the_size():
    small, large = ClipQuestions("train", 3, ["colour"], **EASY), ClipQuestions("train", 9, ["colour"], **EASY)
    for i in range(3):
        assert len(small[i].images) == 4
        assert small[i].messages == large[i].messages
        assert [a.tobytes() for a in small[i].images] == [b.tobytes() for b in large[i].images]
    other = ClipQuestions("test", 3, ["colour"], **EASY)
    assert other[0].images[0].tobytes() != small[0].images[0].tobytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "at least 1; got 0"),
        ({"kinds": ["count"]}, "among colour, shape, appear, vanish; got count"),
        ({"kinds": ["vanish"], "events": ["appear"]}, "what vanishes needs clips"),
    ],
)
def test_what_cannot_be_asked_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ClipQuestions(**options)


def test_a_recipe_names_clips_and_what_fits_them():
    recipe = load_recipe("embedded-casa-qwen2.5-vl-3b-video")
    assert open_source(recipe.data[0]).kinds == ("colour", "shape")
    for change, message in [
        ("data.0.path=scenes", "data.clips is for rendered clips"),
        ("data.0.layout=stream", "data.kinds are kinds of question"),
    ]:
        with pytest.raises(ValueError, match=message):
            open_source(load_recipe("embedded-casa-qwen2.5-vl-3b-video", [change]).data[0])
    with pytest.raises(ValueError, match="'durations' \\(did you mean 'duration'\\?\\)"):
        load_recipe("embedded-casa-qwen2.5-vl-3b-video", ["data.0.clips={durations: 3}"])
