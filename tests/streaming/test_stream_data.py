"""Interleaved training streams: the same tokens, and the same predictions, as in the session that will say them."""

from __future__ import annotations

import dataclasses
import itertools
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import crossfuse as xf
import tiny
from crossfuse.data.clips import EVENT_KINDS
from crossfuse.data.stream_collate import StreamCollator, StreamLayout
from crossfuse.data.streams import (
    ClipStreams,
    RecordStreams,
    StreamFrame,
    StreamRecord,
    TimedWords,
    live_stream,
    video_question,
    words_by_frame,
)
from crossfuse.data.videos import VideoSampling
from crossfuse.streaming.session import PieceReader
from matrix import name_of

LAYOUT = StreamLayout(silence=".", end="?")
IGNORE = -100


def collator(processor, **changes):
    return StreamCollator(processor, dataclasses.replace(LAYOUT, **changes), image_tokens=tiny.PATCHES)


@pytest.fixture
def record(picture):
    words = ["ab", "", "", "cd", ""]
    frames = tuple(StreamFrame(float(n), picture(n), text) for n, text in enumerate(words))
    return StreamRecord("r", frames, opening="say\n")


@pytest.mark.parametrize(
    "fusion",
    [xf.Insertion(), xf.CrossAttention(), xf.CrossAttention(joint_text=True), xf.CrossAttention(gist_tokens=1)],
    ids=name_of,
)
@pytest.mark.parametrize("keep", [False, True])
def test_every_label_is_predicted_as_in_a_session(fusion, keep, fused, processor, record):
    """One training forward against the session that is fed the right words one by one."""
    model = fused(fusion)
    batch = collator(processor, keep_silence=keep)([record])
    labels = batch.pop("labels")
    with torch.no_grad():
        logits = model(**batch, use_cache=False).logits[0, :-1]
    supervised = labels[0, 1:] != IGNORE
    session = dataclasses.replace(LAYOUT, keep_silence=keep).session(model, processor)
    expected, said = [], []
    session.add_text(record.opening)
    for frame in record.frames:
        session.add_frame(frame.image)
        ids = processor.tokenizer(frame.words, add_special_tokens=False).input_ids
        ids = [*ids, LAYOUT.end_id(processor.tokenizer)] if ids else [LAYOUT.silence_id(processor.tokenizer)]
        reader = PieceReader(processor.tokenizer)
        for number, token in enumerate(ids):
            expected.append(session.forward())
            going_on, _ = session.accept(token, reader)
            assert going_on == (number < len(ids) - 1)
            said.append(token)
    assert labels[0, 1:][supervised].tolist() == said
    tiny.assert_close(logits[supervised], torch.stack(expected))


def test_silence_leaves_no_trace_unless_it_is_kept(processor, record):
    silence = LAYOUT.silence_id(processor.tokenizer)
    for keep in (False, True):
        batch = collator(processor, keep_silence=keep)([record])
        ids, labels = batch["input_ids"][0], batch["labels"][0]
        assert int((labels == silence).sum()) == 3
        assert int((ids == silence).sum()) == (3 if keep else 1)  # the last one disturbs nothing
        assert int((ids == tiny.IMAGE).sum()) == 5 * tiny.PATCHES


def test_rows_of_different_length_are_padded_without_labels(processor, record, picture):
    short = StreamRecord("s", (StreamFrame(0.0, picture(7), ""),), opening="a")
    batch = collator(processor)([record, short])
    alone = collator(processor)([short])
    length = alone["input_ids"].shape[1]
    assert batch["input_ids"][1, :length].equal(alone["input_ids"][0])
    assert batch["labels"][1, :length].equal(alone["labels"][0])
    assert batch["attention_mask"][1].sum() == length
    assert (batch["labels"][1, length:] == IGNORE).all()
    assert batch["pixel_values"].shape[0] == 6


def test_video_question_supervises_the_answer_alone(processor, picture):
    record = video_question("q", [(float(n), picture(n)) for n in range(3)], "what\n", "ab")
    batch = collator(processor)([record])
    tokenizer = processor.tokenizer
    spoken = batch["labels"][0][batch["labels"][0] != IGNORE].tolist()
    assert spoken == [*tokenizer("ab", add_special_tokens=False).input_ids, LAYOUT.end_id(tokenizer)]
    assert int((batch["input_ids"] == tiny.IMAGE).sum()) == 3 * tiny.PATCHES


def test_mistakes_are_named(processor, picture, record):
    frame = StreamFrame(0.0, picture(0), "ab")
    for make, message in [
        (lambda: StreamRecord("x", ()), "'x' has no frame"),
        (lambda: StreamRecord("x", (frame, dataclasses.replace(frame, time=-1.0))), "not in the order of their times"),
        (lambda: StreamRecord("x", (frame,), question="what"), "without an answer"),
        (lambda: collator(processor, silence="ab"), "silence must be one token of this model; 'ab' is 2"),
        (lambda: collator(processor)([StreamRecord("x", (dataclasses.replace(frame, words="a.b"),))]), "holds '.'"),
        (lambda: collator(processor)([StreamRecord("x", (frame,), opening="<image>")]), "holds '<image>'"),
        (lambda: dataclasses.replace(collator(processor), max_length=9)([record]), "more than max_length=9"),
        (lambda: words_by_frame([], [1.0, 1.0]), "must rise"),
        (lambda: ClipStreams(kinds=["explode"]), "kinds must be among"),
        (lambda: ClipStreams(size=0), "at least 1; got 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()


times = st.lists(st.floats(0, 20, allow_nan=False), min_size=1, max_size=8, unique=True).map(sorted)
spoken = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.one_of(st.none(), st.floats(-2, 30))), max_size=12)


@given(times, spoken)
@settings(max_examples=60, deadline=None)
def test_s4_words_keep_their_order_and_their_frame(frames, given_words):
    """Equal, missing, early and jumping times: nothing is lost or swapped, and nothing is said before it is spoken."""
    frames = [time for n, time in enumerate(frames) if n == 0 or time - frames[n - 1] > 1e-3] or frames[:1]
    texts = words_by_frame([TimedWords(*one) for one in given_words], frames, end=100.0)
    assert " ".join(texts).split() == [text for text, _ in given_words]
    assert len(texts) == len(frames)
    placed = [n for n, text in enumerate(texts) for _ in text.split()]
    latest = frames[0]
    for place, (_, start) in zip(placed, given_words, strict=True):
        latest = latest if start is None else max(latest, start)
        assert frames[place] <= latest + 1e-5
        assert place == len(frames) - 1 or latest < frames[place + 1] + 1e-5


def test_s4_words_after_the_end_are_left_out_with_a_warning():
    words = [TimedWords("a", 0.1), TimedWords("b"), TimedWords("c", 0.1), TimedWords("d", 1.9), TimedWords("e", 9.0)]
    with pytest.warns(UserWarning, match=r"1 word\(s\) of the stream come after its end at 2.00 s"):
        assert words_by_frame(words, [0.0, 0.5, 1.0, 1.5]) == ["a b c", "", "", "d"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert words_by_frame(words, [0.0, 0.5], end=9.0) == ["a b c", "d e"]


def test_s4_whole_video_and_cut_clip_give_the_same_stream(tmp_path):
    """A folder of frames at 2 a second stands for the whole video; its second half for the cut clip."""
    records = pytest.importorskip("crossfuse.data.records")
    for n in range(12):
        for name, first in (("whole", 0), ("cut", 6)):
            (tmp_path / name).mkdir(exist_ok=True)
            if n >= first:
                Image.new("RGB", (8, 8), (20 * n, 0, 0)).save(tmp_path / name / f"{n}.png")
    words = [[0.0, 0.2, "one"], [0.6, 0.9, "two"], [0.6, 0.9, "three"], [2.4, 2.5, "four"]]

    def record(name, start, end):
        video = {"path": str(tmp_path / name), "start": start, "end": end}
        user = {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "comment."}]}
        said = {"role": "assistant", "content": " ".join(word for *_, word in words)}
        return records.Record(id=name, videos=[video], messages=[user, said], meta={"words": words})

    whole, cut = RecordStreams([record("whole", 3.0, 6.0), record("cut", None, None)], VideoSampling(fps=2))
    pairs = [[(f.time, f.words, f.image.getpixel((0, 0))) for f in stream.frames] for stream in (whole, cut)]
    assert pairs[0] == pairs[1]
    assert [text for _, text, _ in pairs[0]] == ["one", "two three", "", "", "four", ""]
    assert whole.opening == "comment.\n"


def test_clips_are_announced_at_the_first_frame_that_shows_the_event():
    still = [kind for kind in EVENT_KINDS if kind != "move"]
    streams = ClipStreams("test", 12, kinds=still, objects=3)
    heard = 0
    for index, stream in enumerate(streams):
        clip = streams.clip(index)
        assert stream.frames[0].words
        assert [words for place, words in stream.spoken if place] == [event.text for event in clip.events]
        for before, after in itertools.pairwise(stream.frames):
            assert (before.image.tobytes() != after.image.tobytes()) == bool(after.words)
        heard += len(clip.events)
        assert all(len(clip.scene(frame.time).objects) <= 3 for frame in stream.frames)
    assert heard > 6
    assert [f.words for f in streams[3].frames] == [
        f.words for f in ClipStreams("test", 4, kinds=still, objects=3)[3].frames
    ]


def test_move_is_announced_when_it_is_over():
    streams = ClipStreams("test", 20, kinds=["move"])
    for index, stream in enumerate(streams):
        clip = streams.clip(index)
        for event in clip.events:
            (frame,) = [f for f in stream.frames[1:] if f.words == event.text and f.time >= event.time]
            assert clip.scene(frame.time) == clip.scene(event.end)


def test_live_stream_takes_images_and_words():
    image = Image.new("RGB", (8, 8))
    stream = live_stream("x", [(0.0, image), (0.5, image)], [TimedWords("hello", 0.7)], opening="go\n")
    assert [frame.words for frame in stream.frames] == ["", "hello"]
