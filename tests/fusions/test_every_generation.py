"""``generate`` over every fusion: cache on and off, beams, chunks, prompt lookup, lengths (C2, C3, X6)."""

from __future__ import annotations

import pytest
import torch

from matrix import each_fusion, every_fusion, gists
from tiny import IMAGE, I, batch, fused, generate, logits, rows_of

ROWS = [[2, I, 1, I, 4], [3, I, 5]]  # two images against one: other placeholder counts in every row


@every_fusion
def test_c2_cache_on_equals_cache_off_and_a_plain_loop(fusion):
    model, inputs = fused(fusion), batch(*ROWS)
    ids = generate(model, inputs, 6)
    assert torch.equal(ids, generate(model, inputs, 6, use_cache=False))
    grown, mask = inputs["input_ids"], inputs["attention_mask"]
    length = grown.shape[1]
    for _ in range(6):
        step = {"input_ids": grown, "attention_mask": mask, "pixel_values": inputs["pixel_values"]}
        if fusion.needs_prompt:
            step["prompt_mask"] = torch.ones(2, length, dtype=torch.bool)
        scores = logits(model, step, use_cache=False)[:, -1]
        scores[:, [IMAGE, 0]] = -torch.inf
        grown = torch.cat([grown, scores.argmax(-1, keepdim=True)], 1)
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
    assert torch.equal(ids, grown[:, length:])


@every_fusion
def test_c3_beams_and_return_sequences_equal_unbatched(fusion):
    model, inputs = fused(fusion), batch(*ROWS)
    options = {"num_beams": 3, "num_return_sequences": 2}
    together = generate(model, inputs, **options)
    assert torch.equal(together, torch.cat([generate(model, single, **options) for single in rows_of(inputs)]))
    assert torch.equal(together, generate(model, inputs, use_cache=False, **options))


@each_fusion
def test_c3_first_step_scores_of_every_beam_equal_unbatched(fusion):
    model, inputs = fused(fusion), batch(*ROWS)
    options = {"num_beams": 2, "num_return_sequences": 2, "output_logits": True, "return_dict_in_generate": True}
    together = model.generate(**inputs, max_new_tokens=2, do_sample=False, **options)
    for row, single in enumerate(rows_of(inputs)):
        alone = model.generate(**single, max_new_tokens=2, do_sample=False, **options)
        torch.testing.assert_close(together.logits[0][2 * row : 2 * row + 2], alone.logits[0], atol=1e-5, rtol=1e-5)


@each_fusion
def test_sampled_return_sequences_keep_their_own_images(fusion):
    """num_return_sequences without beams; the cache off must see the same expanded images."""
    model, inputs = fused(fusion), batch(*ROWS)
    options = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 4}
    torch.manual_seed(3)
    cached = model.generate(**inputs, **options)
    torch.manual_seed(3)
    assert torch.equal(cached, model.generate(**inputs, **options, use_cache=False))


@every_fusion
def test_prompt_lookup_equals_greedy(fusion):
    model = fused(fusion)
    for single in rows_of(batch(*ROWS)):
        # A repeated passage gives the look-up something to propose.
        single["input_ids"][:, -2:] = single["input_ids"][:, :2]
        assert torch.equal(
            generate(model, single, 8, prompt_lookup_num_tokens=3, max_matching_ngram_size=1),
            generate(model, single, 8),
        )


@every_fusion
@pytest.mark.parametrize("chunk", [1, 5, 2048])
def test_x6_chunked_prefill_equals_whole_or_is_refused(fusion, chunk):
    model, inputs = fused(fusion), batch(*ROWS)
    if (
        fusion.compress is not None
        or gists(fusion)
        or (chunk < 2048 and fusion.needs_prompt and not fusion.is_identity)
    ):
        with pytest.raises(ValueError, match=r"use (prefill_chunk_size=)?None"):
            generate(model, inputs, 2, prefill_chunk_size=chunk)
        return
    options = {"output_logits": True, "return_dict_in_generate": True, "do_sample": False, "max_new_tokens": 4}
    whole = model.generate(**inputs, **options)
    chunked = model.generate(**inputs, prefill_chunk_size=chunk, **options)
    assert torch.equal(whole.sequences, chunked.sequences)
    torch.testing.assert_close(torch.stack(chunked.logits), torch.stack(whole.logits), atol=1e-5, rtol=1e-5)


@each_fusion
def test_generate_counts_user_tokens(fusion):
    """`max_length` and the returned prompt are in the user's tokens, whatever was inserted or removed."""
    model, inputs = fused(fusion), batch(*ROWS)
    length = inputs["input_ids"].shape[1]
    out = model.generate(**inputs, max_length=length + 3, do_sample=False)
    assert out.shape == (2, length + 3)
    assert torch.equal(out[:, :length], inputs["input_ids"])
    positional = model.generate(
        inputs["input_ids"], attention_mask=inputs["attention_mask"], pixel_values=inputs["pixel_values"],
        max_length=length + 3, do_sample=False,
    )  # fmt: skip
    assert torch.equal(out, positional)


@each_fusion
def test_tower_runs_once_per_generate(fusion):
    model, inputs = fused(fusion), batch(*ROWS)
    calls = []
    model.model.vision_tower.register_forward_hook(lambda module, args, out: calls.append(1))
    generate(model, inputs, 4)
    assert len(calls) == 1
