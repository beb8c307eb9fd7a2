"""What is inserted depends on the prompt of its own sample alone: not on answers, later turns or other samples."""

from __future__ import annotations

import pytest
import tiny_qwen
import torch
from tiny_qwen import Seen

import crossfuse as xf
import tiny

FUSIONS = [
    xf.TextAnchors(threshold=0.1),
    xf.TextAnchors(threshold=0.1, keep_image_tokens=0.5),
    xf.ImageAnchors(threshold=0.12),
    xf.ImageAnchors(threshold=0.12, pause_tokens=2, pause_token_id=7),
]
every = pytest.mark.parametrize("fusion", FUSIONS, ids=["text", "text-pruned", "image", "image-pauses"])
FAMILIES = {
    "llava": (tiny.llava, lambda: tiny.batch([3, tiny.I, 14], [2, tiny.I, 3, tiny.I, 16])),
    "qwen": (tiny_qwen.qwen, lambda: tiny_qwen.batch([3, (4, 6), 14], [2, (4, 4), 3, (6, 4), 16])),
}
families = pytest.mark.parametrize("family", FAMILIES)
ANSWER, TURN = (4, 6), (6, 9)  # columns from the end of the row: first answer, then the user's second turn


def columns_from(row: torch.Tensor, pair: tuple[int, int]) -> slice:
    end = row.shape[-1]
    return slice(end - 10 + pair[0], end - 10 + pair[1])


def conversation(inputs):
    """Two answers: the last tokens of each row are prompt ... | answer | user turn | answer."""
    labels = torch.full_like(inputs["input_ids"], -100)
    first = columns_from(labels, ANSWER)
    labels[:, first] = inputs["input_ids"][:, first]
    labels[:, -1] = inputs["input_ids"][:, -1]
    return {**inputs, "labels": labels}


def fused_prompt(model, inputs, upto: int):
    """(embeddings, positions) of what stands at and before the last prompt token, and the logits up to there."""
    with Seen(model) as seen, torch.no_grad():
        out = model(**inputs, output_hidden_states=True)
    call = seen.calls[0]
    rows = []
    for row, place in enumerate(out["readout"][:, upto].tolist()):
        real = call["attention_mask"][row].bool().nonzero()[0, 0]
        positions = (
            call["position_ids"].expand(3, len(inputs["input_ids"]), -1)
            if call["position_ids"].ndim == 2
            else call["position_ids"][-3:]
        )
        rows.append((call["inputs_embeds"][row, real : place + 1], positions[:, row, real : place + 1]))
    return rows, out.logits[:, : upto + 1]


@families
@every
@pytest.mark.parametrize("changed", ["answer", "later turn"])
def test_an_answer_or_a_later_turn_changes_nothing_before_it(family, fusion, changed):
    make, rows = FAMILIES[family]
    model, inputs = xf.fuse(make(), fusion), conversation(rows())
    length = inputs["input_ids"].shape[1]
    first = columns_from(inputs["input_ids"], ANSWER)
    other = {name: value.clone() for name, value in inputs.items()}
    part = columns_from(inputs["input_ids"], ANSWER if changed == "answer" else TURN)
    # Words of the prompt that have anchors there: as candidates they would be copied once more.
    other["input_ids"][:, part] = inputs["input_ids"][:, length - 14 : length - 14 + part.stop - part.start]
    if changed == "answer":
        other["labels"][:, part] = other["input_ids"][:, part]
    assert not torch.equal(other["input_ids"], inputs["input_ids"])
    before, logits = fused_prompt(model, inputs, first.start - 1)
    after, changed_logits = fused_prompt(model, other, first.start - 1)
    for (embeds, positions), (embeds2, positions2) in zip(before, after, strict=True):
        assert torch.equal(embeds, embeds2)
        assert torch.equal(positions, positions2)
    torch.testing.assert_close(logits, changed_logits)


@families
@every
def test_training_and_generation_insert_the_same(family, fusion):
    """The prompt of a labelled sample is fused as ``generate`` fuses it."""
    make, rows = FAMILIES[family]
    model, inputs = xf.fuse(make(), fusion), conversation(rows())
    first = columns_from(inputs["input_ids"], ANSWER).start
    inputs["labels"][:, -1] = -100
    trained, _ = fused_prompt(model, inputs, first - 1)
    cut = {
        name: value[:, :first] if value.shape == inputs["input_ids"].shape else value
        for name, value in inputs.items()
        if name != "labels"
    }
    with Seen(model) as seen:
        model.generate(**cut, max_new_tokens=1, do_sample=False)
    prefill = seen.calls[0]
    pauses = getattr(fusion, "pause_tokens", 0)
    for row, (embeds, _) in enumerate(trained):
        real = prefill["attention_mask"][row].bool()
        assert torch.equal(prefill["inputs_embeds"][row, real], embeds)
        assert len(embeds) >= pauses


@families
@every
def test_changing_one_sample_never_changes_what_another_gets(family, fusion):
    make, rows = FAMILIES[family]
    model, inputs = xf.fuse(make(), fusion), conversation(rows())
    other = {name: value.clone() for name, value in inputs.items()}
    other["input_ids"][0, -14:-6] = other["input_ids"][1, -14:-6]
    patches = 1 if family == "llava" else 24
    other["pixel_values"][:patches] = torch.randn_like(other["pixel_values"][:patches])
    upto = inputs["input_ids"].shape[1] - 2
    before, _ = fused_prompt(model, inputs, upto)
    after, _ = fused_prompt(model, other, upto)
    assert before[0][0].shape != after[0][0].shape or not torch.equal(before[0][0], after[0][0])
    torch.testing.assert_close(before[1][0], after[1][0])
    assert torch.equal(before[1][1], after[1][1])


def test_the_anchor_mask_keeps_words_out():
    model, inputs = xf.fuse(tiny.llava(), xf.TextAnchors(threshold=0.0)), tiny.batch([3, tiny.I, 14])
    mask = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
    mask[0, [0, 20, 23]] = True
    with Seen(model) as seen, torch.no_grad():
        model(**inputs, anchor_mask=mask)
    length = inputs["input_ids"].shape[1]
    assert seen.calls[0]["inputs_embeds"].shape[1] - length <= 3
    with Seen(model) as all_words, torch.no_grad():
        model(**inputs, prompt_mask=torch.ones_like(mask))
    assert all_words.calls[0]["inputs_embeds"].shape[1] > seen.calls[0]["inputs_embeds"].shape[1]
