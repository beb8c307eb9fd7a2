"""Batches with labels: exactly the assistant's words and stop tokens, whatever the conversation says."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from crossfuse.data.collate import IGNORE_INDEX, Collator
from crossfuse.data.records import Record


@pytest.fixture(scope="module")
def processor(embedded):
    return copy.deepcopy(embedded[1])


def picture(seed: int = 0, size: tuple[int, int] = (40, 30)) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (*size, 3)).astype(np.uint8))


def chat(name: str, *texts: str, images: int = 0) -> Record:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    messages[0]["content"] = [{"type": "image"}] * images + [{"type": "text", "text": texts[0]}]
    return Record(id=name, images=[picture(n) for n in range(images)], messages=messages)


def supervised(batch, processor, row: int) -> list[str]:
    """The supervised tokens of a row, split into its runs of neighbours."""
    runs: list[list[int]] = []
    before = False
    for label in batch["labels"][row].tolist():
        if label != IGNORE_INDEX:
            runs = runs if before else [*runs, []]
            runs[-1].append(label)
        before = label != IGNORE_INDEX
    return [processor.tokenizer.decode(run) for run in runs]


def test_labels_are_the_answers_and_their_stop_tokens(processor):
    records = [
        chat("one", "what color is it?", "red", images=1),
        chat("two", "what is there?", "a star", "and where?", "on the left", images=2),
        chat("none", "say hello", "hello"),
    ]
    batch = Collator(processor)(records)
    assert [supervised(batch, processor, i) for i in range(3)] == [
        ["red <eos>"],
        ["a star <eos>", "on the left <eos>"],
        ["hello <eos>"],
    ]
    kept = batch["labels"] != IGNORE_INDEX
    assert torch.equal(batch["labels"][kept], batch["input_ids"][kept])
    assert not (kept & (batch["attention_mask"] == 0)).any()
    assert batch["pixel_values"].shape == (3, 3, 96, 96)
    assert batch["pixel_values"].dtype == torch.float32


def test_a_batch_equals_what_the_processor_makes_of_each_record(processor):
    records = [
        chat("a", "hi", "yes"),
        chat("b", "what color is the circle?", "red", images=2),
        chat("c", "?", "no", images=1),
    ]
    batch = Collator(processor)(records)
    pixels = []
    for i, record in enumerate(records):
        messages = [{"role": m.role, "content": [part.model_dump() for part in m.content]} for m in record.messages]
        text = processor.apply_chat_template(messages)
        alone = processor(text=text, images=list(record.images) or None, return_tensors="pt")
        real = batch["attention_mask"][i].bool()
        assert torch.equal(batch["input_ids"][i][real], alone["input_ids"][0])
        pixels += list(alone.get("pixel_values", []))
    assert torch.equal(batch["pixel_values"], torch.stack(pixels))


def test_training_pads_on_the_right_and_prompts_on_the_left(processor):
    records = [chat("short", "hi", "yes"), chat("long", "what color is the circle?", "red")]
    right, left = Collator(processor)(records), Collator(processor, prompt_only=True)(records)
    assert right["attention_mask"][0, 0] == 1
    assert right["attention_mask"][0, -1] == 0
    assert left["attention_mask"][0, 0] == 0
    assert left["attention_mask"][0, -1] == 1
    assert "labels" not in left
    assistant = processor.tokenizer.convert_tokens_to_ids("<|assistant|>")
    assert (left["input_ids"][:, -1] == assistant).all()
    forced = Collator(processor, padding_side="left")(records)
    assert supervised(forced, processor, 0) == ["yes <eos>"]


def test_values_for_evaluation_come_along_when_asked(processor):
    records = [Record.of_question(f"q{i}", "what?", answer, kind=answer[0]) for i, answer in enumerate(("yes", "no"))]
    batch = Collator(processor, prompt_only=True, keep=("id", "answer", "kind", "other"))(records)
    assert batch["id"] == ["q0", "q1"]
    assert batch["answer"] == ["yes", "no"]
    assert batch["kind"] == ["y", "n"]
    assert batch["other"] == [None, None]


def test_l2_pad_equal_to_eos_keeps_the_real_stop_label(processor):
    processor = copy.deepcopy(processor)
    processor.tokenizer.pad_token = processor.tokenizer.eos_token
    eos = processor.tokenizer.eos_token_id
    batch = Collator(processor)([chat("short", "hi", "yes"), chat("long", "hi there you", "a star and a red circle")])
    for row in range(2):
        real = batch["attention_mask"][row].bool()
        labels = batch["labels"][row]
        assert labels[real][-1] == eos
        assert (labels[~real] == IGNORE_INDEX).all()
        assert (batch["input_ids"][row][~real] == eos).all()
    assert (batch["attention_mask"][0] == 0).any()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("what is it?", ["what is it? <eos>"]),
        ("assistant: ASSISTANT: user: no", ["assistant : assistant : user : no <eos>"]),
        ("\nred", ["\n red <eos>"]),
        ("red\n", ["red \n <eos>"]),
        ("", []),
        (" ", []),
    ],
)
def test_l3_the_span_is_exact_whatever_the_answer_says(processor, answer, expected):
    collator = Collator(processor)
    batch = collator([chat("odd", "what is it?", answer, images=1), chat("plain", "what is it?", "red")])
    assert supervised(batch, processor, 0) == expected
    assert supervised(batch, processor, 1) == ["red <eos>"]
    assert collator.report.unsupervised == ([] if expected else ["odd"])


def test_l3_too_many_unsupervised_records_stop_the_run(processor):
    collator = Collator(processor, max_unsupervised=0.5)
    collator([chat(f"good{i}", "hi", "yes") for i in range(10)])
    collator([chat(f"empty{i}", "hi", "") for i in range(9)])
    assert len(collator.report.unsupervised) == 9
    with pytest.raises(ValueError, match=r"13 of 25 records have no supervised token, more than max_unsupervised=0.5"):
        collator([chat(f"more{i}", "hi", "") for i in range(6)])


_WORDS = st.text(st.sampled_from("abc \n:?!<|>#users"), min_size=1, max_size=12).filter(str.strip)


@given(texts=st.lists(_WORDS, min_size=2, max_size=6), images=st.integers(0, 1))
@settings(max_examples=40, deadline=None)
def test_l3_any_conversation_keeps_its_answers(processor, texts, images):
    batch = Collator(processor)([chat("any", *texts, images=images)])
    expected = [
        processor.tokenizer.decode([*processor.tokenizer(t).input_ids, processor.tokenizer.eos_token_id])
        for t in texts[1::2]
    ]
    assert supervised(batch, processor, 0) == expected


TEMPLATES = {
    # Vicuna as in LLaVA-1.5: a blank before the answer and no stop token.
    "vicuna": (
        "{% for m in messages %}{% if m.role == 'user' %}USER: {% for p in m.content %}"
        "{% if p.type == 'image' %}<image>\n{% else %}{{ p.text }}{% endif %}{% endfor %} {% else %}ASSISTANT: "
        "{% for p in m.content %}{{ p.text }} {% endfor %}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    ),
    # ChatML: a stop token and a line break after every turn.
    "chatml": (
        "{% for m in messages %}<|user|>{{ m.role }}\n{% for p in m.content %}{% if p.type == 'image' %}<image>\n"
        "{% else %}{{ p.text }}{% endif %}{% endfor %}<eos>\n{% endfor %}"
        "{% if add_generation_prompt %}<|user|>assistant\n{% endif %}"
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_l3_other_templates_keep_their_answers_too(processor, name):
    processor = copy.deepcopy(processor)
    processor.chat_template = TEMPLATES[name]
    batch = Collator(processor)([chat("a", "what is it?", "a star", images=1)])
    assert supervised(batch, processor, 0) == ["a star <eos>"]
    two = Collator(processor)([chat("b", "what is it?", "a star", "where?", "left", images=1)])
    stop = "" if name == "vicuna" else " <eos>"
    assert supervised(two, processor, 0) == [f"a star{stop}", "left <eos>"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_t2_nothing_is_ever_cut(processor, side):
    """An image of 64 tokens and about 20 of text in a limit of 40: an error or a counted skip, never a shorter row."""
    long = chat("long", "what color is the circle?", "red", images=1)
    with pytest.raises(ValueError, match=r"record 'long' has \d+ tokens, more than max_length=40; raise max_length or"):
        Collator(processor, max_length=40, padding_side=side)([long])
    collator = Collator(processor, max_length=40, on_overflow="skip", padding_side=side)
    batch = collator([chat("short", "hi", "yes"), long])
    assert batch["input_ids"].shape[0] == 1
    assert "pixel_values" not in batch
    assert collator.report.too_long == ["long"]
    assert collator.report.seen == 2
    with pytest.raises(ValueError, match="no record of this batch could be used"):
        collator([long])
    whole = Collator(processor, max_length=200, padding_side=side)([long])
    placeholder = processor.tokenizer.convert_tokens_to_ids("<image>")
    assert (whole["input_ids"] == placeholder).sum() == 64


@pytest.mark.parametrize("images", [0, 1])
def test_t4_the_placeholder_in_a_text_is_refused(processor, images):
    record = chat("tag", "explain the <image> tag", "it marks a place", images=images)
    for prompt_only in (False, True):
        with pytest.raises(ValueError, match="record 'tag': the text holds '<image>', which is reserved; remove it"):
            Collator(processor, prompt_only=prompt_only)([record])
    with pytest.raises(ValueError, match="the text holds '<eos>'"):
        Collator(processor)([chat("stop", "hi", "yes<eos>no")])


def test_s2_records_without_an_image_and_slots_without_one(processor):
    batch = Collator(processor)([chat("text", "hi", "yes"), chat("both", "hi", "yes", images=1)])
    assert batch["pixel_values"].shape[0] == 1
    with pytest.raises(ValueError, match=r"1 image slot.* but 0 image"):
        Record(id="tag", messages=[{"role": "user", "content": [{"type": "image"}]}])
    with pytest.raises(ValueError, match=r"0 image slot.* but 1 image"):
        Record(id="key", images=["a.png"], messages=[{"role": "user", "content": "hi"}])


def test_s3_bad_images_are_named_or_skipped_and_counted(processor, tmp_path):
    good, cut = tmp_path / "good.png", tmp_path / "cut.png"
    picture(size=(64, 64)).save(good)
    cut.write_bytes(good.read_bytes()[:500])
    records = [Record.of_question(p.stem, "what?", "that", [p]) for p in (good, cut, tmp_path / "gone.png")]
    with pytest.raises(ValueError, match=r"record 'cut': .*cut\.png cannot be decoded"):
        Collator(processor)(records)
    collator = Collator(processor, on_bad_image="skip", keep=("id",))
    assert collator(records)["id"] == ["good"]
    assert collator.report.bad_image == ["cut", "gone"]
    assert str(collator.report) == (
        "3 records: 0 without a supervised token, 0 skipped as too long, 2 skipped for a bad image"
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"on_overflow": "cut"}, "on_overflow must be 'raise', 'skip' or 'truncate'; got 'cut'"),
        ({"on_bad_image": "ignore"}, "on_bad_image must be"),
        ({"padding_side": "both"}, "padding_side must be 'left' or 'right'; got 'both'"),
        ({"max_length": 0}, "max_length must be at least 1; got 0"),
    ],
)
def test_bad_options_are_refused(processor, wrong, message):
    with pytest.raises(ValueError, match=message):
        Collator(processor, **wrong)


def test_a_conversation_that_begins_with_the_assistant_is_named(processor):
    record = Record(id="first", messages=[{"role": "assistant", "content": "hi"}, {"role": "user", "content": "yes"}])
    with pytest.raises(ValueError, match="record 'first': the assistant speaks first"):
        Collator(processor)([record])


def test_t2_truncation_cuts_text_and_never_an_image(processor):
    """An image of 64 tokens: the words behind it may go, the image may not."""
    whole = Collator(processor)([chat("long", "what is there?", "red " * 60, images=1)])
    collator = Collator(processor, max_length=100, on_overflow="truncate", keep=("id",))
    late = Record(
        id="late",
        images=[picture()],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "what? " * 40}, {"type": "image"}]},
            {"role": "assistant", "content": "red"},
        ],
    )
    batch = collator([chat("long", "what is there?", "red " * 60, images=1), late, chat("short", "hi", "yes")])
    assert batch["id"] == ["long", "short"]
    assert batch["input_ids"].shape[1] == 100
    assert torch.equal(batch["input_ids"][0], whole["input_ids"][0, :100])
    assert torch.equal(batch["labels"][0], whole["labels"][0, :100])
    assert batch["attention_mask"][0].sum() == 100
    assert batch["pixel_values"].shape[0] == 1
    placeholder = processor.tokenizer.convert_tokens_to_ids("<image>")
    assert (batch["input_ids"] == placeholder).sum() == 64
    assert (collator.report.truncated, collator.report.too_long) == (["long"], ["late"])
    assert str(collator.report).endswith("1 skipped as too long, 0 skipped for a bad image, 1 cut at max_length")
    # What is left of a record may hold no answer at all; then it is counted as such.
    none = Collator(processor, max_length=70, on_overflow="truncate")
    none([chat("question", "what is there in it?", "red", images=1)])
    assert none.report.unsupervised == ["question"]
    with pytest.raises(ValueError, match="would cut the question of a prompt"):
        Collator(processor, on_overflow="truncate", prompt_only=True)
