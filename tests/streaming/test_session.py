"""One stream: it equals a batch forward of the same sequence, and its memory is exactly what it must be."""

from __future__ import annotations

import pytest
import torch

import crossfuse as xf
import tiny
from crossfuse.streaming.sampling import Decoding
from crossfuse.streaming.session import StreamSession
from matrix import name_of

FUSIONS = [
    None,
    xf.Insertion(),
    xf.Insertion(compress=xf.MeanPool(4)),
    xf.CrossAttention(),
    xf.CrossAttention(joint_text=True),
    xf.CrossAttention(share_projections=True, joint_text=True, history=None),
    xf.CrossAttention(every=2, gate="tanh"),
    xf.CrossAttention(every=2, replace=True),
    xf.CrossAttention(every=2, replace=True, joint_text=True),
    xf.CrossAttention(history=2, joint_text=True, compress=xf.MeanPool(4)),
    xf.CrossAttention(gist_tokens=2, joint_text=True),
    xf.CrossAttention(update_images=True),
]
every_streaming_fusion = pytest.mark.parametrize(
    "fusion", FUSIONS, ids=lambda f: "unfused" if f is None else name_of(f)
)


@every_streaming_fusion
def test_stream_equals_one_forward(fusion, fused, recorder, picture):
    stream = recorder(fused(fusion))
    stream.text([2, 5, 6, 7])
    for number in range(4):
        stream.frame(picture(number))
        tiny.assert_close(stream.session.forward(), stream.batch_logits()[-1], atol=2e-5)
        stream.speak(number)  # 0 to 3 tokens between two frames
        if number == 2:
            stream.text([9, 10])
    stream.text([8])
    tiny.assert_close(stream.session.forward(), stream.batch_logits()[-1], atol=2e-5)


@every_streaming_fusion
def test_frames_without_text_between_them_share_a_window(fusion, fused, recorder, picture):
    stream = recorder(fused(fusion), delimiter="")
    stream.text([2, 5])
    for number in range(3):
        stream.frame(picture(number))
    stream.text([7])
    tiny.assert_close(stream.session.forward(), stream.batch_logits()[-1], atol=2e-5)


def test_stream_that_starts_with_a_frame(fused, recorder, picture):
    stream = recorder(fused(xf.CrossAttention(joint_text=True)))
    for number in range(3):
        stream.frame(picture(number))
        stream.speak(2)
    stream.text([5])
    tiny.assert_close(stream.session.forward(), stream.batch_logits()[-1], atol=2e-5)


@every_streaming_fusion
def test_two_interleaved_sessions_equal_two_apart(fusion, fused, processor, picture):
    model = fused(fusion)

    def sessions() -> list[StreamSession]:
        return [StreamSession(model, processor, decoding=Decoding(max_new_tokens=n)) for n in (2, 4)]

    def step(session: StreamSession, number: int) -> str:
        session.add_frame(picture(number))
        return "".join(session.generate())

    together, apart = sessions(), sessions()
    for number, session in enumerate((*together, *apart)):
        session.add_text("abc"[: 1 + number % 2])
    alternating = [[step(session, 10 * which + n) for which, session in enumerate(together)] for n in range(4)]
    one_by_one = [[step(session, 10 * which + n) for n in range(4)] for which, session in enumerate(apart)]
    assert [list(texts) for texts in zip(*alternating, strict=True)] == one_by_one
    for a, b in zip(together, apart, strict=True):
        assert torch.equal(a.forward(), b.forward())


@pytest.mark.parametrize("fusion", FUSIONS[3:7], ids=name_of)
def test_self_attention_cache_holds_text_only_to_the_byte(fusion, fused, recorder, picture):
    model = fused(fusion)
    config = model.config.text_config
    a_token = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 4
    stream = recorder(model)
    stream.text([2, 5, 6, 7])
    for number in range(6):
        stream.frame(picture(number))
        stream.speak(number % 4)
        text = sum(token != tiny.IMAGE for token in stream.ids) - stream.session.waiting_tokens
        assert stream.session.text_tokens == text
        assert stream.session.memory()["self_attention"] == text * a_token


def test_image_memory_of_cross_attention_is_that_of_one_frame(fused, recorder, picture):
    stream = recorder(fused(xf.CrossAttention()))
    sizes = []
    for number in range(5):
        stream.frame(picture(number))
        stream.speak(2)
        sizes.append(stream.session.memory()["images"])
    config = stream.model.config.text_config
    assert set(sizes) == {
        tiny.PATCHES * config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 4
    }


@every_streaming_fusion
def test_c4_tower_runs_once_a_frame(fusion, fused, recorder, picture):
    stream = recorder(fused(fusion))
    calls: list[int] = []
    stream.model.model.vision_tower.register_forward_hook(lambda *_: calls.append(1))
    for number in range(4):
        stream.frame(picture(number))
        stream.speak(3)
    assert len(calls) == 4


def test_a_frame_with_n_tokens_costs_n_forwards(fused, recorder, picture):
    stream = recorder(fused(xf.CrossAttention()))
    calls: list[int] = []
    stream.model.model.language_model.register_forward_hook(lambda *_: calls.append(1))
    for number in range(4):
        stream.frame(picture(number))
        stream.speak(3)
    assert len(calls) == 4 * 3


@pytest.mark.parametrize("fusion", [xf.Insertion(), xf.CrossAttention()], ids=name_of)
def test_c4_a_new_frame_changes_what_is_said(fusion, fused, recorder, picture):
    after = []
    for last in (5, 6):
        stream = recorder(fused(fusion))
        stream.text([2, 5])
        stream.frame(picture(1))
        stream.speak(2)
        stream.frame(picture(last))
        after.append(stream.session.forward())
    assert (after[0] - after[1]).abs().max() > 0.1


def test_stopping_early_keeps_what_was_said(fused, recorder, picture):
    stream = recorder(fused(xf.CrossAttention()))
    stream.frame(picture(0))
    pieces = stream.session.generate(5)
    next(pieces)
    pieces.close()
    assert stream.session.waiting_tokens == 1
    assert stream.session.text_tokens == 1


def test_reset_starts_anew(fused, processor, picture):
    session = StreamSession(fused(xf.CrossAttention()), processor, decoding=Decoding(max_new_tokens=4, temperature=1.0))

    def run() -> list[str]:
        session.add_text("ab")
        texts = []
        for number in range(3):
            session.add_frame(picture(number))
            texts.append("".join(session.generate()))
        return texts

    first = run()
    session.reset()
    assert session.memory()["self_attention"] == 0
    assert session.next_position == session.frames == 0
    assert run() == first


@every_streaming_fusion
def test_saved_session_goes_on_the_same(fusion, fused, processor, picture, tmp_path):
    model = fused(fusion)
    decoding = Decoding(max_new_tokens=3, temperature=0.8, repetition_penalty=1.3, no_repeat_ngram=3)
    session = StreamSession(model, processor, max_text_tokens=70, decoding=decoding)
    session.add_text("abc")
    for number in range(5):
        session.add_frame(picture(number))
        list(session.generate())
    session.add_frame(picture(9))  # one frame waits, encoded
    session.save(tmp_path / "session.safetensors")
    loaded = StreamSession.load(tmp_path / "session.safetensors", model, processor)
    assert loaded.memory() == session.memory()
    for number in range(20, 24):
        texts = []
        for one in (session, loaded):
            texts.append("".join(one.generate()))
            one.add_frame(picture(number))
        assert texts[0] == texts[1]
    assert torch.equal(session.forward(), loaded.forward())


def test_saved_session_names_what_does_not_fit(fused, processor, picture, tmp_path):
    session = StreamSession(fused(xf.CrossAttention()), processor)
    session.add_frame(picture(0))
    session.forward()
    path = tmp_path / "session.safetensors"
    session.save(path)
    with pytest.raises(ValueError, match=r"another fusion .differs in joint_text"):
        StreamSession.load(path, fused(xf.CrossAttention(joint_text=True)), processor)
    with pytest.raises(ValueError, match="key heads of 2 x 8, the model has 4 x 8"):
        StreamSession.load(path, fused(xf.CrossAttention(), num_key_value_heads=4), processor)
    path.write_bytes(b"not safetensors at all")
    with pytest.raises(ValueError, match="no saved session"):
        StreamSession.load(path, session.engine.model, processor)


def test_errors_say_what_to_do(fused, processor, picture):
    model = fused(xf.CrossAttention())
    with pytest.raises(ValueError, match="text-anchors decides over a whole prompt"):
        StreamSession(fused(xf.TextAnchors()), processor)
    with pytest.raises(ValueError, match=r"at most 512 .* got 600"):
        StreamSession(model, processor, max_text_tokens=600)
    with pytest.raises(ValueError, match=r"at least 6 .sink_tokens . 2.; got 5"):
        StreamSession(model, processor, max_text_tokens=5)
    with pytest.raises(ValueError, match=r"training mode; call model\.eval"):
        StreamSession(model.train(), processor)
    session = StreamSession(model.eval(), processor, delimiter="")
    with pytest.raises(ValueError, match="the stream is empty"):
        session.forward()
    with pytest.raises(ValueError, match="placeholder of an image"):
        session.add_text("a<image>b")
    session.add_frame(picture(0))
    with pytest.raises(ValueError, match="ends with an image"):
        list(session.generate())
    with pytest.raises(ValueError, match="PIL image"):
        session.add_frame([1, 2])
    small = StreamSession(fused(xf.Insertion()), processor, max_text_tokens=20)
    small.add_frame(picture(0))
    with pytest.raises(ValueError, match=r"one frame takes 17 tokens .* holds 16"):
        small.forward()


def test_unbounded_stream_stops_at_the_models_limit_with_the_remedy(fused, processor):
    session = StreamSession(fused(xf.CrossAttention(), max_position_embeddings=16), processor)
    session.add_text([5] * 16)
    session.forward()
    session.add_text([6])
    with pytest.raises(ValueError, match="position 17 and the model's limit is 16; give max_text_tokens"):
        session.forward()


def test_adapters_are_used(fused, processor, picture):
    """A model wrapped by PEFT after fusing streams with its adapters."""
    peft = pytest.importorskip("peft")
    model = fused(xf.CrossAttention())
    plain = StreamSession(model, processor)
    plain.add_frame(picture(0))
    before = plain.forward()
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=r".*language_model.*\.[qv]_proj"))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    session = StreamSession(wrapped.eval(), processor)
    session.add_frame(picture(0))
    with torch.no_grad():
        inputs = processor.image_processor([picture(0)], "pt")
        ids = torch.tensor([[tiny.IMAGE] * tiny.PATCHES + session.delimiter_ids])
        expected = wrapped(input_ids=ids, use_cache=False, **inputs).logits[0, -1]
    tiny.assert_close(session.forward(), expected, atol=2e-5)
    assert (session.forward() - before).abs().max() > 0.1
