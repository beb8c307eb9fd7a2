"""Windows of cross-attention: who sees which image (invariants 6, 7, 8; X2, X4, X5, C4) and what is refused."""

from __future__ import annotations

import pytest
import torch

import crossfuse as xf
from matrix import bare_cross_attention, cross_attention, gists
from oracles import image_tokens
from tiny import IMAGE, LAYERS, PATCHES, I, assert_close, batch, fused, generate, labelled, llava, logits, rows_of

LAST_BLOCK = [xf.CrossAttention(every=LAYERS), xf.CrossAttention(every=LAYERS, joint_text=True)]
ids_of = {"ids": ["ca", "ca_t+v"]}


def text_rows(inputs, out):
    """Logits of the text tokens of row 0, in stream order."""
    return out[0][inputs["input_ids"][0] != IMAGE]


def with_other_image(inputs, *numbers):
    pixels = inputs["pixel_values"].clone()
    for number in numbers:
        pixels[number] = -pixels[number] + 0.5
    return {**inputs, "pixel_values": pixels}


def differs(a, b):
    """Which rows are not bit-equal."""
    return [not torch.equal(x, y) for x, y in zip(a, b, strict=True)]


# ---------------------------------------------------------------- 7, X4
@pytest.mark.parametrize("fusion", LAST_BLOCK, **ids_of)
def test_x4_with_one_layer_exactly_the_window_of_the_changed_image_changes(fusion):
    """<img1> a a <img2> b b: changing img1 changes a only, changing img2 changes b only."""
    model, inputs = fused(fusion), batch([1, I, 2, I, 2])
    before = text_rows(inputs, logits(model, inputs))
    after = text_rows(inputs, logits(model, with_other_image(inputs, 0)))
    assert differs(before, after) == [False, True, True, False, False]
    after = text_rows(inputs, logits(model, with_other_image(inputs, 1)))
    assert differs(before, after) == [False, False, False, True, True]


@pytest.mark.parametrize("fusion", LAST_BLOCK, **ids_of)
@pytest.mark.parametrize("image", [0, 1])
def test_x4_adjacent_images_form_one_window(fusion, image):
    model, inputs = fused(fusion), batch([1, I, I, 2, I, 1])
    before = text_rows(inputs, logits(model, inputs))
    after = text_rows(inputs, logits(model, with_other_image(inputs, image)))
    assert differs(before, after) == [False, True, True, False]


@pytest.mark.parametrize(
    ("history", "changed"),
    [(1, [0, 1, 0, 0, 0]), (2, [0, 1, 1, 0, 0]), (3, [0, 1, 1, 1, 0]), (None, [0, 1, 1, 1, 1])],
)
@pytest.mark.parametrize("joint_text", [False, True])
def test_history_says_how_many_windows_see_an_image(history, changed, joint_text):
    fusion = xf.CrossAttention(every=LAYERS, history=history, joint_text=joint_text)
    model, inputs = fused(fusion), batch([1, I, 1, I, 1, I, 1, I, 1])
    before = text_rows(inputs, logits(model, inputs))
    after = text_rows(inputs, logits(model, with_other_image(inputs, 0)))
    assert differs(before, after) == [bool(c) for c in changed]


@cross_attention
def test_nothing_before_the_changed_window_changes(fusion):
    model, inputs = fused(fusion), batch([2, I, 2, I, 2])
    before = text_rows(inputs, logits(model, inputs))
    after = text_rows(inputs, logits(model, with_other_image(inputs, 1)))
    assert differs(before, after) == [False] * 4 + [True] * 2


# ---------------------------------------------------------------- X5
@cross_attention
def test_x5_offsets_are_global_in_the_stacked_tensor_and_local_to_the_user(fusion):
    """Rows with 2, 0 and 1 images: the last row sees image 2 of the stack; swapped rows take theirs along."""
    model = fused(fusion)
    inputs = batch([1, I, 2, I, 2], [5], [2, I, 2])
    before = logits(model, inputs)
    other = logits(model, with_other_image(inputs, 2))
    assert torch.equal(before[:2], other[:2])
    assert not torch.allclose(before[2], other[2], atol=1e-3)
    other = logits(model, with_other_image(inputs, 0, 1))
    assert torch.equal(before[1:], other[1:])
    assert not torch.allclose(before[0], other[0], atol=1e-3)


# ---------------------------------------------------------------- X2
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@cross_attention
def test_x2_a_window_without_keys_gives_no_nan_and_adds_nothing(fusion, attention):
    """Window 0 holds 5 tokens and no image: finite everywhere; no new weight gets gradient from it."""
    model = llava()
    model.set_attn_implementation(attention)
    xf.fuse(model, fusion)
    inputs = batch([5, I, 4])
    states = model.train()(**inputs, use_cache=False, output_hidden_states=True)
    assert all(torch.isfinite(h).all() for h in states.hidden_states)
    states.logits[0, :5].sum().backward()  # window 0 alone
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    if not (fusion.replace and fusion.joint_text):  # there window 0 attends to its own text
        assert not any(p.grad.any() for p in xf.fusion_parameters(model).values() if p.grad is not None)
    model.zero_grad()
    model(**inputs, use_cache=False).logits.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


# ---------------------------------------------------------------- 6
def test_joint_text_in_one_window_is_insertion_attention_with_images_that_are_not_updated():
    """CA_t+v, image first, shared projections, no self-attention branch == the stock attention over image and text."""
    fusion = xf.CrossAttention(share_projections=True, joint_text=True, every=2, replace=True)
    model, inputs = fused(fusion, text="qwen2"), batch([I, 6])
    layer, seen = model.model.language_model.layers[1], {}

    def keep(module, args, kwargs, out):
        seen.update(normed=kwargs.get("hidden_states", args[0] if args else None), out=out[0])

    layer.self_attn.register_forward_hook(keep, with_kwargs=True)
    logits(model, inputs)
    plain = llava("qwen2")
    attention = plain.model.language_model.layers[1].self_attn
    with torch.no_grad():
        image = plain.model.language_model.layers[1].input_layernorm(image_tokens(plain, inputs["pixel_values"])[0])
        both = torch.cat([image, seen["normed"][0]])[None]
        rope = plain.model.language_model.rotary_emb(both, torch.arange(both.shape[1])[None])
        causal = torch.ones(both.shape[1], both.shape[1], dtype=torch.bool).tril()[None, None]
        expected, _ = attention(both, position_embeddings=rope, attention_mask=causal)
    assert_close(seen["out"][0], expected[0, PATCHES:])


# ---------------------------------------------------------------- 1: the closed gate
@pytest.mark.parametrize("joint_text", [False, True])
def test_a_closed_gate_equals_the_text_only_model(joint_text):
    plain, inputs = llava(), batch([2, I, 4], [3], [1, I, I, 2])
    model = xf.fuse(llava(), xf.CrossAttention(gate="tanh", joint_text=joint_text))
    out = logits(model, inputs)
    for row, single in enumerate(rows_of(inputs)):
        ids = single["input_ids"]
        text = ids[ids != IMAGE][None]
        alone = plain.lm_head(plain.model.language_model(text).last_hidden_state)
        real = (inputs["attention_mask"][row].bool()) & (inputs["input_ids"][row] != IMAGE)
        assert_close(out[row][real], alone[0])


# ---------------------------------------------------------------- 8, C4
@cross_attention
def test_after_many_frames_the_self_attention_cache_holds_text_only(fusion):
    model = fused(fusion)
    cache, mask, text = xf.new_cache(model), torch.zeros(1, 0, dtype=torch.long), 0
    sizes = []
    for frame in range(6):
        part = batch([I, 2], seed=frame)
        mask = torch.cat([mask, part["attention_mask"]], 1)
        logits(model, {**part, "attention_mask": mask}, cache=cache)
        text += 2 + gists(fusion)
        sizes.append(cache.memory()["images"])
    kept = [layer.keys.shape[2] for layer in cache.layers if layer.keys is not None]
    assert set(kept) == {text}
    replaced = len(fusion.layer_indices(LAYERS)) if fusion.replace else 0
    assert len(kept) == LAYERS - replaced
    assert cache.get_seq_length() == mask.shape[1]
    if fusion.history == 1:
        assert len(set(sizes)) == 1
    if fusion.history is None:
        assert sizes == [sizes[0] * n for n in range(1, 7)]


@cross_attention
def test_c4_a_second_turn_with_a_new_image_on_the_cache(fusion):
    """Encoded once and used; equal to a from-scratch prefill of the whole chat. `generate` and plain forwards."""
    model = fused(fusion)
    first, second = batch([2, I, 3], seed=4), batch([1, I, 3], seed=5)
    calls = []
    model.model.vision_tower.register_forward_hook(lambda module, args, out: calls.append(args[0].shape[0]))
    turn = model.generate(**first, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    assert calls == [1]
    chat = torch.cat([turn.sequences, second["input_ids"]], 1)
    options = {"attention_mask": torch.ones_like(chat), "max_new_tokens": 4, "do_sample": False}
    continued = model.generate(chat, pixel_values=second["pixel_values"], cache=turn.cache, **options)
    assert calls == [1, 1]
    scratch = {"pixel_values": torch.cat([first["pixel_values"], second["pixel_values"]]), **options}
    assert torch.equal(continued, model.generate(chat, **scratch))
    other = model.generate(**first, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    scores = {"return_dict_in_generate": True, "output_logits": True, **options}
    changed = model.generate(chat, pixel_values=second["pixel_values"] * -1 + 0.5, cache=other.cache, **scores)
    same = model.generate(chat, **{**scratch, **scores})
    assert not torch.allclose(changed.logits[0], same.logits[0], atol=1e-3)


@pytest.mark.parametrize("compress", [None, xf.MeanPool(4)])
def test_c4_insertion_takes_a_new_image_on_the_cache(compress):
    model = xf.fuse(llava(), xf.Insertion(compress=compress))
    first, second = batch([2, I, 3], seed=4), batch([1, I, 3], seed=5)
    calls = []
    model.model.vision_tower.register_forward_hook(lambda module, args, out: calls.append(args[0].shape[0]))
    with torch.no_grad():
        cache = model(**first, use_cache=True).cache
    mask = torch.ones(1, first["input_ids"].shape[1] + second["input_ids"].shape[1], dtype=torch.long)
    continued = logits(model, {**second, "attention_mask": mask}, cache=cache)
    assert calls == [1, 1]
    whole = {
        "input_ids": torch.cat([first["input_ids"], second["input_ids"]], 1),
        "attention_mask": mask,
        "pixel_values": torch.cat([first["pixel_values"], second["pixel_values"]]),
    }
    assert_close(continued, logits(model, whole)[:, first["input_ids"].shape[1] :])


# ---------------------------------------------------------------- readout and refusals
@bare_cross_attention
def test_logits_are_zero_where_nothing_precedes(fusion):
    model, inputs = fused(fusion), batch([I, 3])
    out = logits(model, inputs)
    assert not out[0, :PATCHES].any()
    assert out[0, PATCHES:].abs().sum(-1).min() > 0
    cached = model(**inputs, use_cache=True).logits
    assert_close(cached, out)


@bare_cross_attention
def test_labels_directly_after_an_image_are_refused(fusion):
    model, inputs = fused(fusion).train(), batch([6], [1, I, 3])
    asked = labelled(inputs, 3)
    with pytest.raises(ValueError, match=r"row 1, token 17.*delimiter \(a newline\).*gist_tokens=1"):
        model(**asked)
    model(**labelled(inputs, 2))


@bare_cross_attention
def test_a_prompt_that_ends_with_an_image_is_refused(fusion):
    model = fused(fusion)
    with pytest.raises(ValueError, match=r"row 1: the prompt ends with an image.*delimiter"):
        generate(model, batch([5], [2, I]), 2)
    with pytest.raises(ValueError, match="row 0: the prompt ends with an image"):
        generate(model, batch([2, I], [2, I, 8], padding="right"), 2)


def test_user_positions_count_placeholders_and_are_recomputed():
    """Text positions count text alone, so the positions that stock LLaVA would take change nothing."""
    model, inputs = xf.fuse(llava(), xf.CrossAttention(joint_text=True)), batch([2, I, 4])
    positions = torch.arange(inputs["input_ids"].shape[1])[None]
    assert torch.equal(logits(model, inputs, position_ids=positions), logits(model, inputs))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("fusion", [xf.CrossAttention(), xf.CrossAttention(every=2)], ids=["every", "every=2"])
def test_a_sliding_window_is_honoured_over_text(fusion, attention):
    """Mistral with a window of 5 tokens: cached, uncached, batched and single runs agree; far text does not reach."""
    model = llava("mistral", sliding_window=5)
    model.set_attn_implementation(attention)
    xf.fuse(model, fusion)
    inputs = batch([9, I, 8], [2, I, 4])
    ids = generate(model, inputs, 8)
    assert torch.equal(ids, generate(model, inputs, 8, use_cache=False))
    assert torch.equal(ids, torch.cat([generate(model, single, 8) for single in rows_of(inputs)]))
    single, far = rows_of(inputs)[0], rows_of(inputs)[0]
    far["input_ids"] = far["input_ids"].clone()
    far["input_ids"][0, 0] = far["input_ids"][0, 0] % 50 + 5  # 16 text tokens before the end: 3 blocks reach 12 back
    assert torch.equal(logits(model, single)[0, -1], logits(model, far)[0, -1])
    assert not torch.equal(logits(model, single)[0, 1], logits(model, far)[0, 1])


def test_joint_text_refuses_sliding_windows_by_name():
    with pytest.raises(ValueError, match=r"sliding window of 5 tokens.*joint_text=False"):
        xf.fuse(llava("mistral", sliding_window=5), xf.CrossAttention(joint_text=True))
    qwen = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    with pytest.raises(ValueError, match="sliding window of 5 tokens"):
        xf.fuse(llava("qwen2", **qwen), xf.CrossAttention(joint_text=True))
    xf.fuse(llava("qwen2", **{**qwen, "use_sliding_window": False}), xf.CrossAttention(joint_text=True))
