"""Silence, stop tokens, and the controls against repetition."""

from __future__ import annotations

import itertools
import statistics
import time

import pytest
import torch

import crossfuse as xf
import tiny
from crossfuse.streaming.sampling import Decoding, Sampler
from crossfuse.streaming.session import StreamSession

SILENCE, STOP = 60, 61


def sampler(**fields):
    return Sampler(Decoding(**fields), never=(tiny.IMAGE,), stops=(STOP,))


def test_greedy_takes_the_best_that_is_allowed():
    logits = torch.zeros(64)
    logits[[tiny.IMAGE, 5]] = torch.tensor([9.0, 3.0])
    assert sampler()(logits) == 5


def test_penalty_decays_with_the_distance():
    choose = sampler(repetition_penalty=2.0, repetition_decay=0.5)
    logits = torch.full((64,), -10.0)
    logits[[5, 6]] = torch.tensor([4.0, 2.9])
    # 5 is chosen; one token later it counts 4 / 2 = 2 < 2.9; then 6 counts 1.45 and 5 counts 4 / 1.5 = 2.67.
    assert [choose(logits) for _ in range(3)] == [5, 6, 5]
    negative = torch.full((64,), -10.0)
    negative[[5, 6]] = torch.tensor([-1.0, -1.2])
    again = sampler(repetition_penalty=2.0, repetition_decay=0.5)
    assert [again(negative) for _ in range(2)] == [5, 6]


def test_ngram_is_blocked_inside_the_window_and_free_beyond_it():
    logits = torch.full((64,), -10.0)
    logits[[5, 6, 7]] = torch.tensor([3.0, 2.0, 1.0])

    def spoken(window: int) -> list[int]:
        choose = sampler(no_repeat_ngram=2, ngram_window=window)
        return [choose(logits) for _ in range(40)]

    long = spoken(100)
    pairs = list(itertools.pairwise(long))
    assert len(set(pairs)) == len(pairs)
    short = spoken(4)
    for end in range(4, 40):
        inside = short[end - 4 : end + 1]
        last = list(itertools.pairwise(inside))
        assert last[-1] not in last[:-1]
    assert len(set(itertools.pairwise(short))) < 39


def test_silence_and_stop_are_never_penalised():
    choose = sampler(repetition_penalty=5.0, no_repeat_ngram=1, silence_token=SILENCE)
    logits = torch.full((64,), -1.0)
    logits[SILENCE] = 2.0
    assert [choose(logits) for _ in range(5)] == [SILENCE] * 5
    logits[STOP] = 3.0
    assert [choose(logits) for _ in range(5)] == [STOP] * 5


def test_drawing_follows_the_seed_and_top_p():
    logits = torch.randn(64, generator=torch.Generator().manual_seed(0))
    draws = [[sampler(temperature=1.0, seed=seed)(logits) for _ in range(1)] for seed in (1, 1, 2, 3, 4, 5)]
    assert draws[0] == draws[1]
    assert len({d[0] for d in draws}) > 1
    narrow = sampler(temperature=1.0, top_p=1e-6)
    assert {narrow(logits) for _ in range(20)} == {int(logits[2:].argmax()) + 2}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_new_tokens", 0, "max_new_tokens must be at least 1; got 0"),
        ("repetition_penalty", 0.9, "at least 1 .1 is off.; got 0.9"),
        ("repetition_decay", 0.0, "above 0 and at most 1; got 0.0"),
        ("top_k", 0, "at least 1 .None is off.; got 0"),
        ("no_repeat_ngram", 128, "shorter than ngram_window=128; got 128"),
    ],
)
def test_bad_values(field, value, message):
    with pytest.raises(ValueError, match=message):
        Decoding(**{field: value})


def silent_model(fused):
    """The last norm's bias is out of reach in Llama, so the head says silence whatever comes in."""
    model = fused(xf.CrossAttention())
    head = torch.nn.Linear(tiny.WIDTH, tiny.VOCABULARY)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    head.bias.data[SILENCE] = 5.0
    model.lm_head = head
    return model


@pytest.mark.parametrize(("keep", "growth"), [(False, 1), (True, 2)])
def test_w2_a_silent_frame_costs_its_delimiter_and_at_most_the_silence(keep, growth, fused, processor, picture):
    """300 silent frames: no text, the cache grows by the delimiter alone, frames do not become slower."""
    decoding = Decoding(silence_token=SILENCE, keep_silence=keep)
    session = StreamSession(silent_model(fused), processor, decoding=decoding)
    frames = [picture(number) for number in range(10)]
    fresh = StreamSession(session.engine.model, processor, decoding=decoding)
    relative, tokens = [], []
    for number in range(300 if not keep else 20):
        start = time.process_time()
        session.add_frame(frames[number % 10])
        assert list(session.generate()) == []
        middle = time.process_time()
        fresh.reset()  # a stream that never grows, beside it: a busy machine meets both
        fresh.add_frame(frames[number % 10])
        assert list(fresh.generate()) == []
        relative.append((middle - start) / (time.process_time() - middle))
        tokens.append(session.text_tokens + session.waiting_tokens)
    assert {b - a for a, b in itertools.pairwise(tokens)} == {growth}
    if not keep:
        assert statistics.median(relative[-30:]) <= 1.2 * statistics.median(relative[:30])


def test_stop_token_ends_the_caption_and_stays(fused, processor, picture):
    model = silent_model(fused)
    session = StreamSession(model, processor, decoding=Decoding(stop_tokens=(SILENCE,)))
    session.add_frame(picture(0))
    assert list(session.generate()) == []
    assert session.waiting_tokens == 1


def test_most_tokens_a_frame(fused, recorder, picture):
    stream = recorder(fused(xf.CrossAttention()), decoding=Decoding(max_new_tokens=5))
    stream.frame(picture(0))
    before = len(stream.ids)
    stream.speak(None)
    assert len(stream.ids) - before == 5


def test_pieces_join_to_the_decoded_text(embedded):
    from crossfuse.streaming.session import PieceReader

    tokenizer = embedded[1].tokenizer
    text = "a red circle is left of two blue stars"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    read = PieceReader(tokenizer)
    pieces = [read(token) for token in ids]
    assert "".join(pieces) == tokenizer.decode(ids) == text
    assert len([piece for piece in pieces if piece]) > 5
