"""The invariants on the trained model inside the package, with its own processor and real pictures."""

from __future__ import annotations

import pytest
import torch
from PIL import Image, ImageDraw

import crossfuse as xf
from matrix import CONFIGURATIONS, MATRIX, name_of
from tiny import assert_close, clone

CHOSEN = [CONFIGURATIONS[1], *MATRIX["text-anchors"][:2], *MATRIX["cross-attention"][:2], MATRIX["cross-attention"][5]]
chosen = pytest.mark.parametrize("fusion", CHOSEN, ids=name_of)
QUESTIONS = ["what colour is the circle?", "is there a red square?", "how many shapes are there?"]


def picture(colour, box, size=64):
    image = Image.new("RGB", (size, size), (235, 235, 230))
    ImageDraw.Draw(image).ellipse(box, fill=colour)
    return image


PICTURES = [picture((200, 40, 40), (8, 8, 40, 40)), picture((30, 60, 200), (20, 24, 60, 60))]


def asked(processor, *samples):
    """(pictures, question) per sample -> processor inputs, left-padded."""
    texts, images = [], []
    for pictures, question in samples:
        content = [{"type": "image"} for _ in pictures] + [{"type": "text", "text": question}]
        texts.append(processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True))
        images += pictures
    processor.tokenizer.padding_side = "left"
    inputs = processor(images=images or None, text=texts, return_tensors="pt", padding=True, add_special_tokens=False)
    return {n: v for n, v in inputs.items() if n in ("input_ids", "attention_mask", "pixel_values")}


def answers(model, inputs, **options):
    with torch.no_grad():
        return model.generate(**inputs, max_new_tokens=6, do_sample=False, **options)[:, inputs["input_ids"].shape[1] :]


def same(a, b, end):
    """Equal up to the first end of sequence of every row; what follows it is padding."""

    def spoken(row):
        ids = row.tolist()
        return ids[: ids.index(end)] if end in ids else ids

    return len(a) == len(b) and all(spoken(x) == spoken(y) for x, y in zip(a, b, strict=True))


SAMPLES = [(PICTURES[:1], QUESTIONS[0]), ([], QUESTIONS[2]), (PICTURES, QUESTIONS[1])]


@chosen
def test_fuse_and_unfuse_are_exact(fusion, embedded):
    model, processor = clone(embedded[0]), embedded[1]
    inputs = asked(processor, *SAMPLES)
    before, ids = model(**inputs).logits, answers(model, inputs)
    with xf.fused(model, fusion):
        assert xf.fusion_of(model) == fusion
    assert torch.equal(model(**inputs).logits, before)
    assert torch.equal(answers(model, inputs), ids)


@pytest.mark.parametrize("fusion", [f for f in CONFIGURATIONS if f.is_identity], ids=name_of)
def test_identities_equal_the_unfused_model(fusion, embedded):
    plain, processor = embedded
    model, inputs = xf.fuse(clone(plain), fusion), asked(processor, *SAMPLES)
    assert torch.equal(model(**inputs).logits, plain(**inputs).logits)
    assert torch.equal(answers(model, inputs), answers(plain, inputs))


@chosen
def test_b3_batched_single_cached_and_uncached_answers_are_equal(fusion, embedded):
    """Six questions in batches of 1 and 3, float32: the same answers."""
    model, processor = xf.fuse(clone(embedded[0]), fusion), embedded[1]
    end = processor.tokenizer.eos_token_id
    questions = [([PICTURES[n % 2]], QUESTIONS[n % 3]) for n in range(5)] + [SAMPLES[2]]
    for first in (0, 3):
        group = questions[first : first + 3]
        together = answers(model, asked(processor, *group))
        assert same(together, answers(model, asked(processor, *group), use_cache=False), end)
        for row, sample in zip(together, group, strict=True):
            assert same(row[None], answers(model, asked(processor, sample)), end)


@chosen
def test_beams_equal_unbatched(fusion, embedded):
    model, processor = xf.fuse(clone(embedded[0]), fusion), embedded[1]
    end, options = processor.tokenizer.eos_token_id, {"num_beams": 2, "num_return_sequences": 2}
    together = answers(model, asked(processor, SAMPLES[0], SAMPLES[2]), **options)
    alone = [answers(model, asked(processor, s), **options) for s in (SAMPLES[0], SAMPLES[2])]
    assert same(together[:2], alone[0], end)
    assert same(together[2:], alone[1], end)


@chosen
def test_save_and_load_give_the_same_bits(fusion, embedded, tmp_path):
    model, processor = xf.fuse(clone(embedded[0]), fusion), embedded[1]
    model.save_pretrained(tmp_path)
    loaded = xf.from_pretrained(tmp_path, dtype=torch.float32).eval()
    state = model.state_dict()
    assert all(torch.equal(t, state[n]) for n, t in loaded.state_dict().items())
    inputs = asked(processor, SAMPLES[2])
    extra = {"prompt_mask": torch.ones_like(inputs["input_ids"], dtype=torch.bool)} if fusion.needs_prompt else {}
    assert torch.equal(loaded(**inputs, **extra).logits, model(**inputs, **extra).logits)


@pytest.mark.parametrize("fusion", MATRIX["cross-attention"][:2], ids=name_of)
def test_an_imageless_question_is_answered_by_the_language_model_alone(fusion, embedded):
    model, processor = xf.fuse(clone(embedded[0]), fusion), embedded[1]
    inputs = asked(processor, *SAMPLES)
    row = inputs["attention_mask"][1].bool()
    ids = inputs["input_ids"][1, row][None]
    with torch.no_grad():
        alone = embedded[0](input_ids=ids).logits
    assert_close(model(**inputs).logits[1, row], alone[0], atol=1e-4, rtol=1e-4)


def test_the_start_and_the_model_have_one_shape(embedded):
    start, processor = xf.load_embedded("start")
    shapes = {n: t.shape for n, t in start.state_dict().items()}
    assert shapes == {n: t.shape for n, t in embedded[0].state_dict().items()}
    assert not start.training
    assert {p.dtype for p in start.parameters()} == {torch.float32}
    assert processor.tokenizer.get_vocab() == embedded[1].tokenizer.get_vocab()
