"""An audio encoder composes like a vision encoder: Whisper's, tiny. Anchors and windows work on it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from composed_models import llm
from test_composed_processor import tokenizer
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperModel
from transformers.models.whisper.modeling_whisper import WhisperEncoder

import crossfuse as xf
from oracles import cross_attention_logits
from tiny import IMAGE, PATCHES, I, assert_close, batch, generate, gradients, labelled, logits, rows_of

MEL = 8
FUSIONS = [
    xf.Insertion(),
    xf.Insertion(compress=xf.QFormer(queries=5, layers=1)),
    xf.TextAnchors(threshold=0.05),
    xf.ImageAnchors(threshold=0.05),
    xf.CrossAttention(),
    xf.CrossAttention(joint_text=True, history=2),
    xf.CrossAttention(joint_text=True, anchors=xf.TextAnchors(threshold=0.05)),
]
every_fusion = pytest.mark.parametrize("fusion", FUSIONS, ids=lambda f: f"{f.name}-{FUSIONS.index(f)}")
ROWS = [[3, I, 4], [6], [2, I, I, 1, I, 3]]


def whisper(positions=PATCHES):
    """A whole Whisper whose encoder makes ``positions`` tokens of 2 * positions mel frames."""
    torch.manual_seed(3)
    config = WhisperConfig(
        vocab_size=20, num_mel_bins=MEL, d_model=24, encoder_layers=2, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=positions,
        max_target_positions=8, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return WhisperModel(config).eval()


def composed(**options):
    model = xf.VisionLanguageModel.compose(llm(), audio=whisper(), **options).eval()
    for parameter in model.model.multi_modal_projector.parameters():
        parameter.data.mul_(6)
    return model


def fused(fusion):
    model = xf.fuse(composed(), fusion)
    draw = torch.Generator().manual_seed(7)
    for parameter in xf.fusion_parameters(model).values():
        parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=draw))
    return model


def heard(model, inputs):
    """A batch of `tiny` with clips in place of images."""
    made = dict(inputs)
    made["input_ids"] = inputs["input_ids"].masked_fill(inputs["input_ids"] == IMAGE, model.config.audio_token_id)
    pixels = made.pop("pixel_values", None)
    if pixels is not None:
        made["input_features"] = pixels.flatten(1)[:, : MEL * 2 * PATCHES].reshape(len(pixels), MEL, 2 * PATCHES)
    return made


def asked(fusion, inputs):
    mask = torch.ones_like(inputs["input_ids"], dtype=torch.bool)
    return {**inputs, "prompt_mask": mask} if fusion.needs_prompt else inputs


def test_the_parts_are_whispers_encoder_and_the_llm():
    model = composed()
    assert isinstance(model.model.audio_tower, WhisperEncoder)
    assert not hasattr(model.model, "vision_tower")
    assert (model.config.audio_tokens, model.config.audio_frames, model.config.audio_hidden_size) == (16, 32, 24)
    plain, text = llm(), batch([6])
    assert torch.equal(logits(model, text)[..., :-1], logits(plain, text))  # the placeholder has a row of its own
    inputs = heard(model, batch([2, I, 3]))
    tokens = whisper().encoder(inputs["input_features"]).last_hidden_state
    assert_close(
        model.model.get_audio_features(inputs["input_features"]).pooler_output[0],
        model.model.multi_modal_projector(tokens)[0],
    )
    louder = {**inputs, "input_features": inputs["input_features"] * 2 + 0.3}
    assert not torch.allclose(logits(model, louder)[0, -1], logits(model, inputs)[0, -1], atol=1e-3)


@torch.no_grad()
def test_windows_over_clips_equal_the_equations():
    for fusion in FUSIONS[-3:]:
        model = fused(fusion)
        inputs = batch([1, I, 2], [2, I, I, 1, I, 2])
        out = logits(model, heard(model, inputs))
        for row, single in enumerate(rows_of(inputs)):
            clips = model.model.get_audio_features(heard(model, single)["input_features"]).pooler_output
            expected = cross_attention_logits(model, fusion, single["input_ids"][0].tolist(), list(clips))
            assert_close(out[row, inputs["attention_mask"][row].bool()], expected)


@every_fusion
def test_batched_single_cached_and_uncached_agree_and_unfuse_is_exact(fusion):
    model, inputs = composed(), batch(*ROWS)
    before, keys = logits(model, heard(model, inputs)), list(model.state_dict())
    xf.fuse(model, fusion)
    out = logits(model, heard(model, asked(fusion, inputs)))
    for row, single in enumerate(rows_of(asked(fusion, inputs))):
        assert_close(out[row, inputs["attention_mask"][row].bool()], logits(model, heard(model, single))[0])
    ids = generate(model, heard(model, inputs))
    assert torch.equal(ids, generate(model, heard(model, inputs), use_cache=False))
    assert torch.equal(ids, torch.cat([generate(model, heard(model, single)) for single in rows_of(inputs)]))
    xf.unfuse(model)
    assert list(model.state_dict()) == keys
    assert torch.equal(logits(model, heard(model, inputs)), before)


@pytest.mark.parametrize("fusion", [xf.Insertion(), FUSIONS[-1]], ids=["insertion", "cross-attention"])
def test_beams_keep_the_clips_of_a_row_together(fusion):
    model, inputs = fused(fusion), batch([3, I, 4], [2, I, I, 1, I, 3])
    together = generate(model, heard(model, inputs), num_beams=3, num_return_sequences=2)
    for row, single in enumerate(rows_of(inputs)):
        alone = generate(model, heard(model, single), num_beams=3, num_return_sequences=2)
        assert torch.equal(together[2 * row : 2 * row + 2], alone)


@pytest.mark.parametrize("fusion", [FUSIONS[1], FUSIONS[-1]], ids=["q-former", "anchors-in-windows"])
def test_training_and_steps_without_clips(fusion):
    model = fused(fusion)
    found = gradients(model, heard(model, labelled(batch([2, I, 5], [6]))), use_cache=False)
    silent = gradients(model, labelled(batch([6])), use_cache=False)
    for name in xf.fusion_parameters(model):
        assert name in silent, name
        if not name.endswith("key.bias"):
            assert found[name].any(), name
    assert any("audio_tower" in name for name in silent)


def test_save_then_load_is_bit_equal(tmp_path):
    fusion = xf.CrossAttention(every=2, compress=xf.QFormer(queries=4, layers=1))
    model = fused(fusion)
    model.save_pretrained(tmp_path)
    loaded = xf.from_pretrained(tmp_path).eval()
    state = model.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())
    inputs = heard(model, batch(*ROWS))
    assert torch.equal(logits(loaded, inputs), logits(model, inputs))


def test_the_processor_expands_clips(tmp_path):
    from transformers import AutoProcessor

    extractor = WhisperFeatureExtractor(feature_size=MEL, chunk_length=1, hop_length=160, n_fft=400)
    model = xf.VisionLanguageModel.compose(
        llm(vocab_size=200), audio=whisper(50), tokenizer=tokenizer(), feature_extractor=extractor
    ).eval()
    sound = np.sin(np.arange(12000) / 20).astype(np.float32)
    inputs = model.processor(text="<audio>what is it", audio=sound, sampling_rate=16000, return_tensors="pt")
    placeholder = inputs["input_ids"][0] == model.config.audio_token_id
    assert int(placeholder.sum()) == 50
    assert inputs["input_features"].shape == (1, MEL, 100)
    assert model.processor.tokenizer.decode(inputs["input_ids"][0][~placeholder]).startswith("\n")
    ids = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert ids.shape[1] == inputs["input_ids"].shape[1] + 3
    message = [{"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "what"}]}]
    assert "<audio>\nwhat" in model.processor.apply_chat_template(message, add_generation_prompt=True)
    model.processor.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    again = AutoProcessor.from_pretrained(tmp_path)
    same = again(text="<audio>what is it", audio=sound, sampling_rate=16000, return_tensors="pt")
    assert all(torch.equal(inputs[name], same[name]) for name in inputs)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="exactly one of vision and audio"):
        xf.VisionLanguageModel.compose(llm())
    with pytest.raises(ValueError, match="Linear is no audio encoder"):
        xf.VisionLanguageModel.compose(llm(), audio=torch.nn.Linear(2, 2))
    model = composed()
    inputs = heard(model, batch([2, I, 3]))
    inputs["input_features"][0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"input_features\[0\] holds NaN"):
        xf.fuse(model, xf.CrossAttention())(**inputs)
    with pytest.raises(ValueError, match=r"MeanPool\(4\) needs a full patch grid; got 16 image tokens"):
        logits(fused(xf.Insertion(compress=xf.MeanPool(4))), heard(model, batch([2, I, 3])))
