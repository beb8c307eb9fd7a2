"""Anchors on Qwen2.5-VL: m-RoPE positions, side inputs, packing, caches, beams, videos (T3, T4, R2-R4, C2, C3, W4)."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_qwen import END, IMAGE, START, VIDEO, Seen, batch, qwen, rows_of
from torch import Tensor
from torch.nn.functional import cosine_similarity

import crossfuse as xf
from crossfuse.prompt import answer_starts, prompt_before_labels

TEXT = xf.TextAnchors(threshold=0.1)
IMAGES = xf.ImageAnchors(threshold=0.15)
PAUSED = xf.ImageAnchors(threshold=0.15, pause_tokens=3, pause_token_id=7)
FUSIONS = [TEXT, xf.TextAnchors(threshold=0.1, copy_order="prompt"), IMAGES, PAUSED]
every = pytest.mark.parametrize("fusion", FUSIONS, ids=["text", "text-prompt-order", "image", "image-pauses"])
ROWS = [[3, (4, 6), 4], [6], [2, (4, 4), 1, (6, 4), 5], [2, (3, 4, 4), 3]]
LIKE = {"atol": 2e-5, "rtol": 2e-5}


def whole_prompt(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**inputs, "prompt_mask": torch.ones_like(inputs["input_ids"], dtype=torch.bool)}


@torch.no_grad()
def logits(model, inputs, **options) -> Tensor:
    return model(**inputs, **options).logits


@torch.no_grad()
def generate(model, inputs, tokens=6, **options) -> Tensor:
    return model.generate(**inputs, max_new_tokens=tokens, do_sample=False, **options)[:, -tokens:]


def labelled(inputs, answer=2):
    labels = torch.full_like(inputs["input_ids"], -100)
    for row, mask in enumerate(inputs["attention_mask"].bool()):
        columns = mask.nonzero()[-answer:, 0]
        labels[row, columns] = inputs["input_ids"][row, columns]
    return {**inputs, "labels": labels}


# ---------------------------------------------------------------- the oracle
def literal_order(model, single, fusion) -> tuple[list[int], list[int], Tensor]:
    """(host, source) columns and (3, L) positions of one unpadded sample; source -1 is a pause token."""
    ids = single["input_ids"][0].tolist()
    body = model.model
    embeds = body.get_input_embeddings()(single["input_ids"])[0].detach().clone()
    for kind, pixels, grid, encode in (
        (IMAGE, "pixel_values", "image_grid_thw", body.get_image_features),
        (VIDEO, "pixel_values_videos", "video_grid_thw", body.get_video_features),
    ):
        if pixels in single:
            with torch.no_grad():
                tokens = torch.cat(list(encode(single[pixels], single[grid]).pooler_output))
            embeds[torch.tensor(ids) == kind] = tokens
    seen = [c for c, token in enumerate(ids) if token in (IMAGE, VIDEO)]
    text = [c for c, token in enumerate(ids) if token not in (0, 2, 3, IMAGE, VIDEO, START, END)]  # not: pad, bos, eos
    seekers, hosts = (text, seen) if fusion.name == "text-anchors" else (seen, text)
    order = [(c, c) for c in range(len(ids))]  # (host, source)
    for n in seekers if fusion.copy_order == "algorithm" else reversed(seekers):
        best, partner = -math.inf, None
        for m in hosts:
            value = float(cosine_similarity(embeds[n], embeds[m], dim=0))
            if value > best:
                best, partner = value, m
        if partner is not None and best >= fusion.threshold:
            order.insert(order.index((partner, partner)) + 1, (partner, n))
    order += [(len(ids) - 1, -1)] * getattr(fusion, "pause_tokens", 0)
    names = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts", "mm_token_type_ids")
    grids = {name: single.get(name) for name in names}
    positions, _ = body.get_rope_index(single["input_ids"], attention_mask=single["attention_mask"], **grids)
    positions = positions[:, 0]
    for place in range(1, len(ids)):  # what follows a video starts above its largest position
        if ids[place - 1] == VIDEO and ids[place] != VIDEO:
            positions[:, place:] += positions[:, :place].max() + 1 - positions[0, place]
    table = torch.cat([embeds, body.get_input_embeddings()(torch.tensor([7])).detach()])
    sources = [s for _, s in order]
    return [h for h, _ in order], sources, positions, table[sources]


@every
def test_originals_keep_their_positions_and_copies_inherit_their_hosts_triple(fusion):
    """Every original token keeps its (t, h, w), every copy has its host's, pause tokens count on."""
    for single in rows_of(batch(*ROWS)):
        hosts, sources, stock, embeds = literal_order(qwen(), single, fusion)
        model = xf.fuse(qwen(), fusion)
        with Seen(model) as seen:
            logits(model, whole_prompt(single))
        call = seen.calls[0]
        expected = stock[:, hosts]
        pauses = torch.tensor(sources) < 0
        expected = expected + pauses.cumsum(0)
        assert torch.equal(positions_of(seen)[:, 0], expected)
        torch.testing.assert_close(call["inputs_embeds"][0], embeds, **LIKE)


@every
def test_the_next_token_goes_on_from_the_originals_position_not_from_the_fused_length(fusion):
    single = rows_of(batch(*ROWS))[2]
    model, plain = xf.fuse(qwen(), fusion), qwen()
    with Seen(model) as seen, Seen(plain) as stock:
        generate(model, single, 3)
        generate(plain, single, 3)
    for fused, usual in zip(seen.calls[1:], stock.calls[1:], strict=True):
        pauses = getattr(fusion, "pause_tokens", 0)
        assert torch.equal(fused["position_ids"][-3:].expand(3, 1, 1), usual["position_ids"][-3:] + pauses)


# ---------------------------------------------------------------- T3, T4
@every
def test_t3_everything_along_the_sequence_grows_in_step_and_grids_stay(fusion):
    inputs = batch(*ROWS)
    grids = {name: inputs[name].clone() for name in ("image_grid_thw", "video_grid_thw")}
    model = xf.fuse(qwen(), fusion)
    with Seen(model) as seen:
        out = model(**labelled(inputs))
    call = seen.calls[0]
    rows, length, _width = call["inputs_embeds"].shape
    assert length > inputs["input_ids"].shape[1]
    assert call["attention_mask"].shape == (rows, length)
    assert call["position_ids"].shape[-2:] == (rows, length)
    assert out.logits.shape[:2] == inputs["input_ids"].shape
    assert torch.isfinite(out.loss)
    assert all(torch.equal(inputs[name], grid) for name, grid in grids.items())
    without = {name: value for name, value in inputs.items() if name != "mm_token_type_ids"}
    assert torch.equal(logits(model, whole_prompt(without)), logits(model, whole_prompt(inputs)))


def test_t4_a_placeholder_in_the_users_text_is_refused_with_its_row():
    model = xf.fuse(qwen(), TEXT)
    inputs = batch(*ROWS)
    inputs["input_ids"][1, -2] = IMAGE
    with pytest.raises(ValueError, match=r"row 1 .*keep the placeholder string out of the text"):
        logits(model, whole_prompt(inputs))
    alone = batch([6])
    alone["input_ids"][0, 2] = IMAGE
    assert logits(model, whole_prompt(alone)).shape == (1, 6, 200)  # no image at all: an ordinary token


# ---------------------------------------------------------------- R2, R3, R4
@pytest.mark.parametrize(("seconds", "frames"), [(0.5, [0, 1, 2, 3]), (0.75, [0, 1, 3, 4])])
def test_r2_frame_times_are_quantised_after_multiplying(seconds, frames):
    """tokens_per_second = 2: the time position of grid row i is floor(2 · seconds · i), for copies too."""
    inputs = batch([2, (4, 4, 4), 3], seconds=seconds)
    model = xf.fuse(qwen(), TEXT)
    with Seen(model) as seen:
        logits(model, whole_prompt(inputs))
    positions = seen.calls[0]["position_ids"][-3:, 0]
    start = 3  # two words and the start token come first
    ids = inputs["input_ids"][0]
    hosts, sources, _, _ = literal_order(qwen(), inputs, TEXT)
    image = (ids[torch.tensor(hosts)] == VIDEO).nonzero()[:, 0]
    times = (positions[0, image] - start).tolist()
    assert sorted(set(times)) == frames
    assert times == [frames[(hosts[place] - start) // 4] for place in image.tolist()]
    after = positions[:, int(image[-1]) + 1 :]
    assert int(after.min()) > int(positions[:, image].max())
    assert len(sources) > len(ids)


@every
def test_r3_training_and_generation_use_the_same_positions(fusion):
    single = batch([2, (3, 4, 4), 2, (4, 6), 3], seconds=0.75)
    model = xf.fuse(qwen(), fusion)
    with Seen(model) as prefill:
        generate(model, single, 1)
    answered = {
        name: torch.cat([value, value[:, -1:]], 1) if value.shape == single["input_ids"].shape else value
        for name, value in single.items()
    }
    with Seen(model) as training:
        model.train()
        model(**labelled(answered, answer=1), use_cache=False)
    before, now = (seen.calls[0]["position_ids"][-3:] for seen in (prefill, training))
    assert torch.equal(now[..., :-1], before)
    assert torch.equal(now[..., -1], before.amax((0, -1)).expand(3, 1) + 1)


@every
def test_r4_packed_equals_padded(fusion):
    """Samples with images of different size, a video and plain text in one row: logits and positions of each."""
    inputs = labelled(batch(*ROWS))
    model = xf.fuse(qwen(), fusion)
    singles = rows_of(inputs)
    packed = {
        name: torch.cat([single[name] for single in singles], 1)
        for name in ("input_ids", "mm_token_type_ids", "labels")
    }
    packed["segment_ids"] = torch.cat([torch.full_like(s["input_ids"], i) for i, s in enumerate(singles)], 1)
    others = {n: v for n, v in inputs.items() if "grid" in n or "pixel" in n}
    packed |= {
        n: torch.nn.functional.pad(v, (0, 3), value=-1 if n == "segment_ids" else -100 if n == "labels" else 0)
        for n, v in packed.items()
    } | others
    packed["prompt_mask"] = prompt_before_labels(packed["labels"], packed["segment_ids"])
    packed["answer_starts"] = answer_starts(packed["labels"])
    labels = packed.pop("labels")
    with Seen(model) as seen:
        out = logits(model, packed, use_cache=False)
    end, place = 0, 0
    together = seen.calls[0]["position_ids"][-3:].expand(3, 1, -1)
    skipped = together.shape[-1] - int((seen.calls[0]["attention_mask"].diagonal(dim1=-2, dim2=-1)).sum())
    for single in singles:
        asked = {n: v for n, v in single.items() if n != "labels"}
        asked["prompt_mask"] = prompt_before_labels(single["labels"], None)
        asked["answer_starts"] = answer_starts(single["labels"])
        with Seen(model) as alone:
            expected = logits(model, asked)
        length = expected.shape[1]
        torch.testing.assert_close(out[:, end : end + length], expected, **LIKE)
        end += length
        positions = positions_of(alone)
        first = together.shape[-1] - fused_length(seen) + place + skipped
        assert torch.equal(together[..., first : first + positions.shape[-1]], positions)
        place += positions.shape[-1]
    assert int((labels != -100).sum()) == 2 * len(ROWS)


def positions_of(seen: Seen) -> Tensor:
    """(3, 1, F) of one row; None (text alone, nothing inserted) is counted by the decoder."""
    call = seen.calls[0]
    given = call["position_ids"]
    if given is None:
        return torch.arange(call["inputs_embeds"].shape[1]).expand(3, 1, -1)
    return given.expand(3, 1, -1) if given.ndim == 2 else given[-3:]


def fused_length(seen: Seen) -> int:
    return seen.calls[0]["inputs_embeds"].shape[1] - int((seen.calls[0]["inputs_embeds"][0] == 0).all(-1).sum())


@every
def test_changing_one_packed_sample_leaves_the_others_bit_equal(fusion):
    singles = rows_of(batch(*ROWS))
    segments = torch.cat([torch.full_like(s["input_ids"], i) for i, s in enumerate(singles)], 1)
    packed = {n: torch.cat([s[n] for s in singles], 1) for n in ("input_ids", "mm_token_type_ids")}
    packed |= {n: v for n, v in batch(*ROWS).items() if "grid" in n or "pixel" in n} | {"segment_ids": segments}
    model = xf.fuse(qwen(), fusion)
    before = logits(model, whole_prompt(packed), use_cache=False)
    pixels = packed["pixel_values"].clone()
    pixels[:24] = pixels[:24] * 1.0001  # the image of sample 0: too little to move an anchor
    after = logits(model, whole_prompt({**packed, "pixel_values": pixels}), use_cache=False)
    others = segments[0] != 0
    assert torch.equal(before[:, others], after[:, others])
    assert not torch.equal(before[:, ~others], after[:, ~others])


# ---------------------------------------------------------------- batches, caches, beams
@every
@pytest.mark.parametrize("padding", ["left", "right"])
def test_batched_equals_one_by_one(fusion, padding):
    model, inputs = xf.fuse(qwen(), fusion), batch(*ROWS, padding=padding)
    out = logits(model, whole_prompt(inputs))
    ids = generate(model, inputs)
    for row, single in enumerate(rows_of(inputs)):
        real = inputs["attention_mask"][row].bool()
        torch.testing.assert_close(out[row, real], logits(model, whole_prompt(single))[0], **LIKE)
        assert torch.equal(ids[row], generate(model, single)[0])


@every
def test_c2_generation_is_the_same_with_the_cache_off(fusion):
    model, inputs = xf.fuse(qwen(), fusion), batch(*ROWS)
    assert torch.equal(generate(model, inputs, 10), generate(model, inputs, 10, use_cache=False))


@every
def test_c3_beams_of_a_batch_equal_beams_one_by_one(fusion):
    """Images of 64 and 256 patches, a video and plain text: every returned beam and its score."""
    model, inputs = xf.fuse(qwen(), fusion), batch([3, (8, 8), 4], [2, (16, 16), 3], [2, (3, 4, 4), 3], [6])
    options = {"num_beams": 3, "num_return_sequences": 2, "output_scores": True, "return_dict_in_generate": True}
    together = model.generate(**inputs, max_new_tokens=5, do_sample=False, **options)
    for row, single in enumerate(rows_of(inputs)):
        alone = model.generate(**single, max_new_tokens=5, do_sample=False, **options)
        pair = slice(2 * row, 2 * row + 2)
        assert torch.equal(together.sequences[pair, -5:], alone.sequences[:, -5:])
        torch.testing.assert_close(together.sequences_scores[pair], alone.sequences_scores, **LIKE)
        first = slice(3 * row, 3 * row + 3)
        torch.testing.assert_close(together.scores[0][first], alone.scores[0], atol=1e-4, rtol=1e-4)


@every
def test_sampling_returns_several_sequences_of_one_prompt(fusion):
    model, inputs = xf.fuse(qwen(), fusion), batch(*ROWS)
    torch.manual_seed(3)
    many = model.generate(**inputs, max_new_tokens=4, do_sample=True, num_return_sequences=2)
    again = {n: v.repeat_interleave(2, 0) for n, v in inputs.items() if v.shape == inputs["input_ids"].shape}
    singles = [single for single in rows_of(inputs) for _ in range(2)]
    for kind in ("image", "video"):
        for name in (f"{kind}_grid_thw", "pixel_values" if kind == "image" else "pixel_values_videos"):
            again[name] = torch.cat([single[name] for single in singles if name in single])
    again["second_per_grid_ts"] = inputs["second_per_grid_ts"].repeat_interleave(2)
    torch.manual_seed(3)
    assert torch.equal(many, model.generate(**again, max_new_tokens=4, do_sample=True))


# ---------------------------------------------------------------- training, precision, kernels
@every
def test_checkpointing_changes_no_gradient(fusion):
    found = []
    for checkpointing in (False, True):
        model = xf.fuse(qwen(), fusion)
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        model.train()
        model(**labelled(batch(*ROWS)), use_cache=False).loss.backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name])
    assert any("visual" in name for name in found[0])
    # A copy is a gather: its gradient reaches the embedding of the word that was copied.
    assert float(found[0]["model.language_model.embed_tokens.weight"].abs().sum()) > 0


@every
def test_w4_no_attention_weights_are_asked_for_and_kernels_agree(fusion):
    inputs, results = whole_prompt(batch(*ROWS)), []
    for kernel in ("sdpa", "eager"):
        model = qwen()
        model.set_attn_implementation(kernel)
        xf.fuse(model, fusion)
        with Seen(model) as seen:
            results.append(logits(model, inputs))
        assert not any(call.get("output_attentions") for call in seen.calls)
        assert not model.config.output_attentions
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(results[0][real], results[1][real], **LIKE)


@every
def test_bfloat16_runs_and_generates_the_same_with_and_without_cache(fusion):
    model, inputs = xf.fuse(qwen().to(torch.bfloat16), fusion), batch(*ROWS)
    out = logits(model, whole_prompt(inputs))
    assert out.dtype == torch.bfloat16
    assert torch.isfinite(out[inputs["attention_mask"].bool()]).all()
    assert generate(model, inputs).shape == (4, 6)


@pytest.mark.parametrize("fusion", [xf.TextAnchors(threshold=1.0), xf.ImageAnchors(threshold=1.0)])
def test_threshold_one_equals_the_unfused_model_exactly(fusion):
    plain, model, inputs = qwen(), xf.fuse(qwen(), fusion), batch(*ROWS)
    assert torch.equal(logits(model, inputs), logits(plain, inputs))
    asked = labelled(inputs)
    assert torch.equal(model(**asked).loss, plain(**asked).loss)
    assert torch.equal(generate(model, inputs), generate(plain, inputs))


@every
def test_fuse_then_unfuse_is_exact(fusion):
    model, inputs = qwen(), batch(*ROWS)
    before, keys = logits(model, inputs), list(model.state_dict())
    xf.unfuse(xf.fuse(model, fusion))
    assert list(model.state_dict()) == keys
    assert torch.equal(logits(model, inputs), before)


@every
def test_two_models_interleaved_equal_two_runs_apart(fusion):
    """transformers keeps ``rope_deltas`` on the model; a fused one never reads it."""
    model, one, two = xf.fuse(qwen(), fusion), batch([3, (4, 6), 4]), batch([2, (8, 8), 5], seed=4)
    apart = [generate(model, inputs) for inputs in (one, two)]
    steps = []
    caches = [xf.new_cache(model) for _ in range(2)]
    for inputs, cache in zip((one, two), caches, strict=True):
        with torch.no_grad():
            steps.append(model(**whole_prompt(inputs), cache=cache, use_cache=True).logits[:, -1])
    found = [[], []]
    banned = model.generation_config.suppress_tokens
    for _ in range(6):
        for k, cache in enumerate(caches):
            steps[k][:, banned] = -torch.inf
            token = steps[k].argmax(-1, keepdim=True)
            found[k].append(token)
            with torch.no_grad():
                steps[k] = model(input_ids=token, cache=cache, use_cache=True).logits[:, -1]
    for k in range(2):
        assert torch.equal(torch.cat(found[k], 1), apart[k])
