"""The caption loop: one caption a frame, made before the next frame is asked for."""

from __future__ import annotations

import pytest

import crossfuse as xf
from crossfuse.streaming.captioner import FramePrompt, captions_of, stream_prompt, turn_prompt
from crossfuse.streaming.sampling import Decoding
from crossfuse.streaming.session import StreamSession
from crossfuse.streaming.video import read_video


@pytest.fixture
def session(fused, processor):
    return StreamSession(fused(xf.CrossAttention()), processor, max_text_tokens=64, decoding=Decoding(max_new_tokens=3))


def test_v3_captions_appear_before_the_source_ends(session, picture):
    """A source of 200 frames without a length: each caption comes before the next frame is taken."""
    taken = []

    def source():
        for number in range(200):
            taken.append(number)
            yield number / 25, picture(number % 7)

    said = captions_of(session, read_video(source(), fps=25), stream_prompt("see"), 1 / 25)
    for number, one in enumerate(said):
        assert len(taken) == number + 1
        assert one.caption.start == pytest.approx(number / 25)
        assert one.caption.end == pytest.approx((number + 1) / 25)
        assert one.latency > 0
        if number == 30:
            break


def test_captions_do_not_overlap_at_uneven_times(session, picture):
    frames = [(time, picture(0)) for time in (0.0, 0.7, 1.0, 1.9, 4.2)]
    said = [c.caption for c in captions_of(session, read_video(frames, fps=2), FramePrompt(), 0.5)]
    assert [c.start for c in said] == [0.0, 0.7, 1.0, 1.9, 4.2]
    assert [c.end for c in said] == [0.5, 1.0, 1.5, 2.0, 4.5]


def test_what_is_remembered(fused, processor, picture):
    model = fused(xf.CrossAttention())
    decoding = Decoding(max_new_tokens=4)
    frames = [(float(number), picture(number)) for number in range(4)]

    def texts(prompt):
        session = StreamSession(model, processor, decoding=decoding)
        return [c.caption.text for c in captions_of(session, read_video(frames), prompt)], session

    def by_hand(forget):
        session, said = StreamSession(model, processor, decoding=decoding), []
        session.add_text("a")
        for number, (_, image) in enumerate(frames):
            if forget and number:
                session.reset()
                session.add_text("a")
            session.add_text("b")
            session.add_frame(image)
            session.add_text("c")
            said.append("".join(session.generate()).strip())
        return said

    together, session = texts(FramePrompt("a", "b", "c"))
    apart, alone = texts(FramePrompt("a", "b", "c", alone=True))
    assert together == by_hand(forget=False)
    assert apart == by_hand(forget=True)
    assert together[0] == apart[0]
    assert alone.text_tokens < session.text_tokens


def test_turns_of_the_chat_template(embedded):
    processor = embedded[1]
    words = turn_prompt(processor, "what is there?")
    written = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is there?"}]}],
        add_generation_prompt=True,
    )
    assert words.opening + words.before + processor.image_token + words.after == written
    assert words.opening == processor.tokenizer.bos_token
    for prompt, message in ((" ", "the prompt is empty"), ("what is <image>?", "stands for an image")):
        with pytest.raises(ValueError, match=message):
            turn_prompt(processor, prompt)


def test_embedded_model_in_turns_equals_generate(embedded):
    """The first frame of a stream says what `generate` says about the picture."""
    import copy

    from crossfuse.data.scenes import make_scene, render

    model, processor = copy.deepcopy(embedded[0]), embedded[1]
    image = render(make_scene(1, "test"))
    words = turn_prompt(processor, "describe the image.")
    for fusion in (None, xf.Insertion(compress=xf.MeanPool(4)), xf.CrossAttention(joint_text=True)):
        if fusion is not None:
            xf.fuse(model, fusion)
        session = StreamSession(model, processor, delimiter="", decoding=Decoding(max_new_tokens=24))
        (said,) = captions_of(session, read_video([image]), words)
        text = words.opening + words.before + processor.image_token + words.after
        inputs = processor(images=[image], text=text, return_tensors="pt", add_special_tokens=False)
        tokens = model.generate(**inputs, do_sample=False, max_new_tokens=24)[0, inputs["input_ids"].shape[1] :]
        assert said.caption.text == processor.decode(tokens, skip_special_tokens=True).strip()
        if fusion is not None:
            xf.unfuse(model)
