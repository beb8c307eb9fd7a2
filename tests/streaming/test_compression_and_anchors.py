"""Streams of compressed frames, and of frames that carry copies of the standing instruction."""

from __future__ import annotations

import pytest
import torch

import crossfuse as xf
import tiny
from crossfuse.streaming.pool import StreamPool
from crossfuse.streaming.sampling import Decoding
from crossfuse.streaming.session import StreamSession

ANCHORED = xf.CrossAttention(joint_text=True, anchors=xf.TextAnchors(threshold=0.1))
COMPRESSED = [
    xf.Insertion(compress=xf.QFormer(queries=5, layers=1)),
    xf.CrossAttention(joint_text=True, compress=xf.QFormer(queries=5, layers=1)),
]


@pytest.mark.parametrize("fusion", COMPRESSED, ids=["insertion", "cross-attention"])
def test_a_stream_of_queries_equals_one_forward(fusion, fused, recorder, picture):
    stream = recorder(fused(fusion))
    stream.text([5, 6, 7])
    for number in range(3):
        stream.frame(picture(number))
        stream.speak(2)
    tiny.assert_close(stream.session.forward(), stream.batch_logits()[-1])
    if not fusion.drops_images:
        assert stream.session.stream.cached_tokens == 3 * 5 + 3 + 3 + 6


def test_frames_that_are_too_small_for_the_queries_say_so(fused, processor, picture):
    session = StreamSession(fused(xf.Insertion(compress=xf.QFormer())), processor)
    session.add_frame(picture(0))
    with pytest.raises(ValueError, match="needs images of at least 32 tokens; got 16"):
        session.forward()


@torch.no_grad()
def test_every_frame_carries_the_standing_instruction(fused, recorder, picture):
    """The prompt is what comes before the first generated token, in a stream as in training."""
    model = fused(ANCHORED)
    stream = recorder(model)
    stream.text([5, 6, 7, 8])
    stream.frame(picture(0))
    first = len(stream.ids)
    stream.speak(2)
    for number in (1, 2):
        stream.frame(picture(number))
        stream.speak(2)
    prompt = torch.arange(len(stream.ids))[None] < first
    inputs = {"input_ids": torch.tensor([stream.ids]), **stream.processor.image_processor(stream.images, "pt")}
    whole = model(**inputs, prompt_mask=prompt, use_cache=False).logits[0, -1]
    tiny.assert_close(stream.session.forward(), whole)
    nothing = model(**inputs, prompt_mask=torch.zeros_like(prompt), use_cache=False).logits[0, -1]
    assert not torch.allclose(whole, nothing, atol=1e-3)
    memory = stream.session.memory()
    entry = 2 * 2 * 8 * 4 * tiny.LAYERS  # keys and values, 2 heads of width 8, float32
    assert memory["self_attention"] == entry * stream.session.text_tokens
    assert memory["images"] > entry * tiny.PATCHES


def test_a_saved_stream_remembers_the_instruction(fused, processor, picture, tmp_path):
    model = fused(ANCHORED)
    session = StreamSession(model, processor, decoding=Decoding(max_new_tokens=2))
    session.add_text([5, 6, 7, 8])
    session.add_frame(picture(0))
    list(session.generate())
    session.save(tmp_path / "session.safetensors")
    again = StreamSession.load(tmp_path / "session.safetensors", model, processor)
    for each in (session, again):
        each.add_frame(picture(1))
    assert torch.equal(session.forward(), again.forward())
    assert torch.equal(session.stream.cache.prompt_ids, again.stream.cache.prompt_ids)


def test_streams_of_a_pool_keep_their_own_instruction(fused, processor, picture):
    model, decoding = fused(ANCHORED), Decoding(max_new_tokens=2)
    prompts = [[5, 6, 7, 8], [9, 10]]
    alone = []
    for row, prompt in enumerate(prompts):
        session = StreamSession(model, processor, decoding=decoding)
        session.add_text(prompt)
        said = []
        for number in range(3):
            session.add_frame(picture(10 * row + number))
            said.append("".join(session.generate()))
        alone.append(said)
    pool = StreamPool(model, processor, decoding=decoding)
    for name, prompt in zip("ab", prompts, strict=True):
        pool.open(name).add_text(prompt)
    together = [pool.step({"a": picture(number), "b": picture(10 + number)})[0] for number in range(3)]
    assert [[said[name] for said in together] for name in "ab"] == alone


def test_a_prompt_without_an_end_is_not_remembered_without_one(fused, processor):
    session = StreamSession(fused(ANCHORED), processor, max_text_tokens=24)
    for _ in range(20):
        session.add_text([5, 6, 7, 8, 9, 10])
        session.forward()
    assert session.stream.cache.prompt_ids.shape[1] <= 30
