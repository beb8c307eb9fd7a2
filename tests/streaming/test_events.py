"""Scores of announced events, and the recipe that trains for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import crossfuse as xf
from crossfuse.data.stream_collate import StreamCollator, StreamLayout
from crossfuse.data.streams import ClipStreams
from crossfuse.evaluation.events import (
    EventScore,
    announce,
    match_events,
    other_frames,
    score_events,
    shuffled_frames,
)
from crossfuse.streaming.event_recipe import load_stream_recipe
from crossfuse.streaming.event_training import CONDITIONS, EncodedFrames, train_and_score

RECIPE = Path(__file__).parents[2] / "recipes" / "embedded-stream.yaml"
A, B = "a red circle appears", "the blue star vanishes"


@pytest.mark.parametrize(
    ("expected", "said", "reading", "matched"),
    [
        ([(2, A)], [(2, A)], "words", [0]),
        ([(2, A)], [(3, A + ".")], "words", [1]),
        ([(2, A)], [(4, A)], "words", []),  # too late
        ([(2, A)], [(1, A)], "words", []),  # nobody can know
        ([(2, A)], [(2, B)], "words", []),
        ([(2, A)], [(2, "a blue star appears")], "kind", [0]),
        ([(2, A)], [(2, B)], "any", [0]),
        ([(2, A)], [(2, A), (3, A)], "words", [0]),  # said twice: once too often
        ([(2, A), (3, A)], [(3, A), (4, A)], "words", [1, 1]),
        ([(2, A), (5, B)], [(2, A), (6, B)], "words", [0, 1]),
        ([], [], "words", []),
    ],
)
def test_matching(expected, said, reading, matched):
    score = match_events(expected, said, tolerance=1, reading=reading)
    assert score == EventScore(len(expected), len(said), tuple(matched))


def test_rates():
    score = EventScore(4, 5, (0, 1)) + EventScore(1, 0, ())
    assert score.precision == pytest.approx(2 / 5)
    assert score.recall == pytest.approx(2 / 5)
    assert score.f1 == pytest.approx(0.4)
    assert score.mean_delay == 0.5
    nothing = EventScore(0, 0, ())
    assert (nothing.precision, nothing.recall, nothing.f1, nothing.mean_delay) == (None,) * 4
    for wrong, message in [({"tolerance": -1}, "tolerance must"), ({"reading": "all"}, "reading must")]:
        with pytest.raises(ValueError, match=message):
            match_events([], [], **wrong)
    with pytest.raises(ValueError, match="said is not in the order"):
        match_events([], [(2, A), (1, A)])


class Oracle:
    """A session that knows the words of each picture, and says them some frames late."""

    def __init__(self, streams, delay=0):
        self.words = {id(f.image): f.words for s in streams for f in s.frames if f.words}
        self.delay = delay

    def reset(self):
        self.queue, self.known = [None] * self.delay, set()

    def add_text(self, text):
        pass

    def add_frame(self, image):
        fresh = id(image) not in self.known
        self.known.add(id(image))
        self.queue.append(self.words.get(id(image)) if fresh else None)

    def generate(self):
        words = self.queue.pop(0)
        return [words] if words else []


def test_scores_of_a_perfect_a_late_and_a_blind_session():
    streams = ClipStreams("test", 15, kinds=["appear", "vanish"], objects=3)[:]
    for delay in (0, 1):
        scores = score_events(Oracle(streams, delay), streams, tolerance=1)
        # Said about the first frame one frame late counts as said; the last frame's words never come.
        if not delay:
            assert scores["words"].precision == scores["words"].recall == 1
            assert scores["words"].events == sum(len([p for p, _ in s.spoken if p]) for s in streams) > 8
        assert set(scores["words"].delays) == {delay}
    blind = score_events(Oracle(streams), other_frames(streams), tolerance=1)
    assert blind["words"].recall < 0.2
    shuffled = list(shuffled_frames(streams))
    assert [s.spoken for s in shuffled] == [s.spoken for s in streams]
    assert score_events(Oracle(streams), shuffled, tolerance=1)["words"].recall < 0.9
    with pytest.raises(ValueError, match="2 streams or more"):
        list(other_frames(streams[:1]))


def test_announcements_come_from_the_session_alone():
    """The session is given opening and frames; the right words are never shown to it."""
    model, processor = xf.load_embedded()
    xf.fuse(model, xf.CrossAttention())
    session = StreamLayout(silence=".").session(model, processor, max_new_tokens=2)
    (stream,) = ClipStreams("test", 1)
    given = []
    session.add_text = given.append
    said = announce(session, stream)
    assert given == [stream.opening]
    assert session.frames == len(stream.frames)
    assert [place for place, _ in said] == sorted({place for place, _ in said})


def test_encoded_frames_are_the_pixels_of_the_frozen_tower():
    model, processor = xf.load_embedded()
    xf.fuse(model, xf.CrossAttention())
    collator = StreamCollator(processor, StreamLayout(silence="."))
    streams = ClipStreams("train", 2)[:]
    encoded = EncodedFrames(collator, model, limit=8)
    with torch.no_grad():
        expected = model(**collator(streams), use_cache=False).loss
        for _ in range(2):
            tensors = encoded(streams)
            assert "pixel_values" not in tensors
            torch.testing.assert_close(model(**tensors, use_cache=False).loss, expected, atol=1e-5, rtol=1e-5)
    assert list(encoded.known) == [streams[0].id]  # the limit holds one clip of eight frames


def test_recipe_names_what_it_does_not_know(tmp_path):
    recipe = load_stream_recipe(RECIPE, ["training.steps=7", "clips.test=3"])
    assert (recipe.training.steps, recipe.clips.test) == (7, 3)
    assert {fields["name"] for fields in recipe.fusions.values()} == {"cross-attention", "insertion"}
    for change, message in [
        ("clips.tset=3", "embedded-stream.yaml: clips: .*'tset'.*did you mean 'test'"),
        ("layout.silence", "key=value"),
        ("fusions.insertion.name=insertoin", "insertoin"),
        ("clips.kinds=[explode]", "clips.kinds"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_stream_recipe(RECIPE, [change])
    with pytest.raises(ValueError, match="no fusion 'casa'; its fusions: cross-attention, insertion"):
        train_and_score(recipe, tmp_path, ["casa"])


def test_recipe_trains_saves_and_scores_both_fusions(tmp_path):
    """Two steps: the loss falls, the saved model is the trained one, every condition is scored."""
    recipe = load_stream_recipe(
        RECIPE, ["training.steps=2", "training.batch_size=2", "training.log_every=1", "clips.test=2", "clips.train=4"]
    )
    runs = train_and_score(recipe, tmp_path)
    written = json.loads((tmp_path / "events.json").read_text())
    assert [run["fusion"] for run in written["runs"]] == list(recipe.fusions)
    for run in runs:
        assert set(run.scores) == set(CONDITIONS)
        model = xf.from_pretrained(tmp_path / run.fusion)
        assert xf.fusion_of(model).name == run.fusion
        before, _ = xf.load_embedded()
        moved = [
            name
            for name, tensor in before.state_dict().items()
            if not torch.equal(tensor, model.state_dict()[name].to(tensor.dtype))
        ]
        assert moved
        assert all("language_model" in name or "lm_head" in name for name in moved)
