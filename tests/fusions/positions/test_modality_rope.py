"""ModalityRoPE: the two indices against a literal count, its attention against a loop over pairs."""

from __future__ import annotations

import copy
import math

import pytest
import tiny_qwen
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import crossfuse as xf
from crossfuse.fusions.positions.indices import IMAGE, TEXT, VIDEO, ModalityIndices, modality_indices
from crossfuse.sequence import MultimodalSequence
from tiny import FAMILIES, I, batch, generate, llava, logits


def sequence_of(rows: list[list[tuple[int, int]]], segments=None) -> MultimodalSequence:
    """Rows of runs (modality, tokens), right-padded."""
    length = max(sum(count for _, count in row) for row in rows)
    kinds = torch.full((len(rows), length), -1)
    lengths, videos = [], []
    for row, runs in enumerate(rows):
        flat = [modality for modality, count in runs for _ in range(count)]
        kinds[row, : len(flat)] = torch.tensor(flat, dtype=torch.long)
        lengths += [count for modality, count in runs if modality != TEXT]
        videos += [modality == VIDEO for modality, count in runs if modality != TEXT]
    return MultimodalSequence(
        input_ids=torch.zeros_like(kinds), embeds=torch.zeros(*kinds.shape, 1), valid=kinds >= 0, is_image=kinds > 0,
        image_features=torch.zeros(sum(lengths), 1) if lengths else None, image_lengths=lengths, is_video=videos,
        image_grids=[None] * len(lengths), image_frames=None, position_ids=None,
        start=torch.zeros(len(rows), dtype=torch.long), segments=segments,
    )  # fmt: skip


def literal(kinds: list[int]) -> tuple[list[int], list[int]]:
    """Both indices of one sample, token by token."""
    counts, order, within, ordinal = {}, [], [], []
    for kind in kinds:
        if kind not in order:
            order.append(kind)
        within.append(counts.get(kind, 0))
        ordinal.append(order.index(kind))
        counts[kind] = counts.get(kind, 0) + 1
    return within, ordinal


runs = st.lists(st.tuples(st.sampled_from([TEXT, IMAGE, VIDEO]), st.integers(1, 4)), min_size=1, max_size=6)


@settings(max_examples=25, deadline=None)
@given(st.lists(runs, min_size=1, max_size=3))
def test_indices_equal_a_literal_count(rows):
    found = modality_indices(sequence_of(rows))
    for row, parts in enumerate(rows):
        kinds = [modality for modality, count in parts for _ in range(count)]
        within, ordinal = literal(kinds)
        assert found.modality[row, : len(kinds)].tolist() == kinds
        assert found.within[0, row, : len(kinds)].tolist() == within
        assert found.ordinal[row, : len(kinds)].tolist() == ordinal


@settings(max_examples=20, deadline=None)
@given(runs, runs)
def test_samples_of_a_packed_row_are_counted_apart(one, two):
    lengths = [sum(count for _, count in part) for part in (one, two)]
    segments = torch.tensor([[0] * lengths[0] + [1] * lengths[1]])
    found = modality_indices(sequence_of([one + two], segments))
    for part, columns in ((one, slice(0, lengths[0])), (two, slice(lengths[0], None))):
        alone = modality_indices(sequence_of([part]))
        assert torch.equal(found.within[:, :, columns], alone.within)
        assert torch.equal(found.ordinal[:, columns], alone.ordinal)


@settings(max_examples=20, deadline=None)
@given(runs, runs)
def test_indices_go_on_from_a_cache(one, two):
    first = modality_indices(sequence_of([one]))
    mask = torch.ones_like(first.modality).bool()
    second = modality_indices(sequence_of([two]), 1, ModalityIndices.unpacked(first.packed()), mask)
    whole = modality_indices(sequence_of([one + two]))
    cut = mask.shape[1]
    assert torch.equal(second.within, whole.within[:, :, cut:])
    assert torch.equal(second.ordinal, whole.ordinal[:, cut:])


def test_grids_of_m_rope_follow_one_another():
    """Text counts on all rows; images keep their grid, each behind the largest index of the one before."""
    inputs = tiny_qwen.batch([2, (4, 6), 3, (4, 4), 1])
    model = xf.fuse(tiny_qwen.qwen(), xf.ModalityRoPE())
    context = {}

    def note(module, args, kwargs):
        context["state"] = kwargs["vision"].state

    model.model.language_model.layers[0].self_attn.register_forward_pre_hook(note, with_kwargs=True)
    model(**inputs, use_cache=False)
    found = ModalityIndices.unpacked(context["state"])
    ids = inputs["input_ids"][0]
    image = ids == tiny_qwen.IMAGE
    text = torch.arange(int((~image).sum()))
    assert torch.equal(found.within[:, 0, ~image], text.expand(3, -1))
    expected = [(0, r, c) for r in range(2) for c in range(3)] + [(3, 3 + r, 3 + c) for r in range(2) for c in range(2)]
    assert found.within[:, 0, image].T.tolist() == [list(triple) for triple in expected]
    assert found.ordinal[0].tolist() == image.long().tolist()


# ---------------------------------------------------------------- attention
def rotated(vector: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """(D,) by (D / 2,) angles, first half against second half."""
    a, b = vector.chunk(2)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])


def angles(decoder, position: list[int]) -> torch.Tensor:
    """(D / 2,): one position row, or three that share the frequencies by sections."""
    inverse = decoder.rotary_emb.inv_freq
    if len(position) == 1:
        return inverse * position[0]
    sections = decoder.rotary_emb.mrope_section
    rows = torch.tensor([position[i % 3] for i, size in enumerate(sections) for _ in range(size)])
    return inverse * rows


def check_attention(model, inputs, indices) -> None:
    """Layer 0's attention, pair by pair: one rotation for the difference that the pair's modalities call for."""
    decoder = model.model.language_model
    attention, seen = decoder.layers[0].self_attn, {}
    attention.register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(x=args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    attention.register_forward_hook(lambda module, args, out: seen.update(out=out[0]))
    with torch.no_grad():
        model(**inputs, use_cache=False)
        x, width = seen["x"][0], attention.head_dim
        heads = {n: getattr(attention, f"{n}_proj")(x).unflatten(-1, (-1, width)) for n in "qkv"}
        for n in "qk":
            norm = getattr(attention, f"{n}_norm", None)
            heads[n] = heads[n] if norm is None else norm(heads[n])
    groups = heads["q"].shape[1] // heads["k"].shape[1]
    within, ordinal, modality = indices
    rows = len(within)
    out = torch.zeros(len(x), heads["q"].shape[1], width)
    for i in range(len(x)):
        scores = torch.zeros(heads["q"].shape[1], i + 1)
        for j in range(i + 1):
            if modality[i] == modality[j]:
                difference = [within[r][i] - within[r][j] for r in range(rows)]
            else:
                difference = [ordinal[i] - ordinal[j]] * rows
            turn = angles(decoder, difference)
            for head in range(len(scores)):
                scores[head, j] = rotated(heads["q"][i, head], turn) @ heads["k"][j, head // groups] / math.sqrt(width)
        weights = scores.softmax(-1)
        for head in range(len(scores)):
            out[i, head] = weights[head] @ heads["v"][: i + 1, head // groups]
    expected = attention.o_proj(out.flatten(1))
    torch.testing.assert_close(seen["out"][0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("text", "vision"), FAMILIES[:4], ids=str)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_equals_a_loop_over_pairs(text, vision, attention):
    if attention == "eager" and text != "llama":
        return
    inputs = batch([3, I, 2, I, 2])
    kinds = (inputs["input_ids"][0] == 1).long().tolist()
    within, ordinal = literal(kinds)
    model = llava(text, vision)
    model.set_attn_implementation(attention)
    xf.fuse(model, xf.ModalityRoPE())
    check_attention(model, inputs, ([within], ordinal, kinds))


def test_attention_under_m_rope_equals_a_loop_over_pairs():
    inputs = tiny_qwen.batch([2, (4, 6), 3, (2, 4, 4), 2])
    model = xf.fuse(tiny_qwen.qwen(), xf.ModalityRoPE())
    ids = inputs["input_ids"][0]
    kinds = ((ids == tiny_qwen.IMAGE) + 2 * (ids == tiny_qwen.VIDEO)).tolist()
    counted, ordinal = literal(kinds)
    within = [list(counted) for _ in range(3)]
    image = [(0, r, c) for r in range(2) for c in range(3)]
    video = [(2 * t, r, c) for t in range(2) for r in range(2) for c in range(2)]  # tokens_per_second is 2
    for column, kind in enumerate(kinds):
        if kind != TEXT:
            triple = (image if kind == IMAGE else video)[counted[column]]
            for row in range(3):
                within[row][column] = triple[row]
    check_attention(model, inputs, (within, ordinal, kinds))


@pytest.mark.parametrize("fusion", [None, xf.ModalityRoPE()], ids=["unfused", "fused"])
def test_what_a_question_sees_of_an_image_does_not_depend_on_the_text_between(fusion):
    """First block, equal question: how its attention is shared out among the image's tokens. Unfused it depends."""
    model = llava() if fusion is None else xf.fuse(llava(), fusion)
    model.set_attn_implementation("eager")
    weights, shares = {}, []
    model.model.language_model.layers[0].self_attn.register_forward_hook(
        lambda module, args, out: weights.update(w=out[1])
    )
    pixels = batch([I])["pixel_values"]
    for between in (1, 30):
        inputs = {**batch([I, between, 2]), "pixel_values": pixels}
        inputs["input_ids"][:, -1] = 9
        logits(model, inputs, use_cache=False)
        image = weights["w"][0, :, -1, :16]
        shares.append(image / image.sum(-1, keepdim=True))
    assert torch.allclose(*shares, atol=1e-5) is (fusion is not None)


def test_rows_of_text_alone_use_no_second_rotation_and_a_later_image_still_finds_it():
    """Text first, the image in a second call: the cached text keys carry both rotations."""
    model = xf.fuse(llava(), xf.ModalityRoPE(layers=None))
    inputs = batch([5, I, 4])
    whole = logits(model, inputs, use_cache=False)
    with torch.no_grad():
        first = model(input_ids=inputs["input_ids"][:, :5], use_cache=True)
        second = model(
            input_ids=inputs["input_ids"][:, 5:], pixel_values=inputs["pixel_values"], cache=first.cache, use_cache=True
        )
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), whole, atol=1e-5, rtol=1e-5)
    assert second.cache.layers[0].text_keys.shape[1] == whole.shape[1]


def test_a_cropped_cache_goes_on_as_if_the_tokens_had_never_been_there():
    model, inputs = xf.fuse(llava(), xf.ModalityRoPE()), batch([3, I, 6])
    ids = inputs["input_ids"]
    with torch.no_grad():
        cache = model(**{**inputs, "input_ids": ids[:, :-2], "attention_mask": None}, use_cache=True).cache
        model(input_ids=ids[:, :2], cache=cache, use_cache=True)
        cache.crop(-2)
        out = model(input_ids=ids[:, -2:], cache=cache, use_cache=True).logits
    torch.testing.assert_close(out, logits(model, inputs, use_cache=False)[:, -2:], atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------- refusals
def test_endless_streams_are_refused(embedded):
    """Their eviction moves positions by the stream's count, which this fusion does not use."""
    model, processor = embedded
    with xf.fused(copy.deepcopy(model), xf.ModalityRoPE()) as fused:  # noqa: SIM117
        with pytest.raises(ValueError, match=r"modality-rope .* cannot stream"):
            xf.StreamSession(fused, processor)


def test_evicted_streams_and_other_kernels_are_refused_with_the_remedy():
    from crossfuse.streaming.eviction import evict

    model, inputs = xf.fuse(llava(), xf.ModalityRoPE()), batch([9, I, 4])
    with torch.no_grad():
        cache = model(**inputs, use_cache=True).cache
        evict(cache, 4, 6, 2, model.model._backbone, model.model)
        with pytest.raises(ValueError, match="max_text_tokens=None and one session a stream"):
            model(input_ids=inputs["input_ids"][:, :1], cache=cache, use_cache=True)
    model.config.text_config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="'sdpa' or 'eager'; got 'flex_attention'"):
        model.model.language_model.layers[0].self_attn(
            torch.zeros(1, 1, 32), vision=_context(model), attention_mask=None, position_embeddings=None
        )


def _context(model):
    seen = {}
    attention = model.model.language_model.layers[0].self_attn
    hook = attention.register_forward_pre_hook(lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True)
    model.config.text_config._attn_implementation = "sdpa"
    logits(model, {"input_ids": torch.tensor([[3]])}, use_cache=True)
    hook.remove()
    model.config.text_config._attn_implementation = "flex_attention"
    return seen["vision"]


def test_layers_are_checked():
    for layers, message in (
        ((-1,), "at least 0"),
        ((0, 0), "each block once"),
        (3, r"numbers such as \(0,\)"),
        ((True,), "at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            xf.ModalityRoPE(layers=layers)
    with pytest.raises(ValueError, match="below 3, the number of blocks; got 7"):
        xf.fuse(llava(), xf.ModalityRoPE(layers=(7,)))
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ValueError, match="rope_type 'dynamic' changes its frequencies"):
        xf.fuse(llava(rope_parameters=rope), xf.ModalityRoPE())
    assert xf.make_fusion("modality-rope", layers=[0, 2]) == xf.ModalityRoPE(layers=(0, 2))
    assert xf.ModalityRoPE(layers=[1]).to_dict()["layers"] == (1,)


def test_prompt_lookup_proposes_and_takes_back():
    model, inputs = xf.fuse(llava(), xf.ModalityRoPE(layers=None)), batch([3, I, 6])
    inputs["input_ids"][:, -2:] = inputs["input_ids"][:, :2]
    options = {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1}
    assert torch.equal(generate(model, inputs, 8, **options), generate(model, inputs, 8))
