"""Composed models: ordinary transformers models under every fusion (invariants 1, 2, 4, 9, 10; C2, C3, D3, G2)."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from composed_models import PAIRS, cnn, composed, for_model, llm, tower
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, CohereConfig, GPT2Config

import crossfuse as xf
from tiny import WIDTH, I, assert_close, batch, generate, gradients, labelled, logits, prompt_mask, rows_of

ROWS = [[3, I, 4], [6], [2, I, I, 1, I, 3]]
FUSIONS = [
    xf.Insertion(),
    xf.Insertion(compress=xf.MeanPool(4)),
    xf.TextAnchors(threshold=0.1),
    xf.CrossAttention(),
    xf.CrossAttention(joint_text=True, every=2),
    xf.CrossAttention(share_projections=True, history=2),
]
every_pair = pytest.mark.parametrize(("text", "vision"), PAIRS)
every_fusion = pytest.mark.parametrize("fusion", FUSIONS, ids=lambda f: f"{f.name}-{FUSIONS.index(f)}")


def asked(fusion, inputs, answer=2):
    return {**inputs, "prompt_mask": prompt_mask(inputs, answer)} if fusion.needs_prompt else inputs


@every_pair
def test_text_logits_are_those_of_the_llm(text, vision):
    ids = batch([7], [4])["input_ids"]
    with torch.no_grad():
        expected = llm(text)(ids, use_cache=False).logits
    model = composed(text, vision)
    assert torch.equal(logits(model, {"input_ids": ids})[..., : expected.shape[-1]], expected)


@every_pair
def test_images_are_seen_and_the_parts_keep_their_weights(text, vision):
    source, encoder = llm(text), tower(vision)
    before = {**source.model.state_dict(), **encoder.state_dict()}
    before = {name: tensor.clone() for name, tensor in before.items() if "embed_tokens" not in name}
    model = xf.VisionLanguageModel.compose(source, encoder, image_size=16)
    after = {**model.model.language_model.state_dict(), **model.model.vision_tower.state_dict()}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    inputs = for_model(model, batch([2, I, 3]))
    other = {**inputs, "pixel_values": inputs["pixel_values"].flip(0) + 1}
    assert not torch.equal(logits(model, inputs)[:, -1], logits(model, other)[:, -1])


@every_pair
@every_fusion
def test_fuse_then_unfuse_is_exact(text, vision, fusion):
    model = composed(text, vision)
    inputs = for_model(model, batch(*ROWS))
    before, keys = logits(model, inputs), list(model.state_dict())
    xf.fuse(model, fusion)
    logits(model, asked(fusion, inputs))
    xf.unfuse(model)
    assert list(model.state_dict()) == keys
    assert torch.equal(logits(model, inputs), before)


@every_pair
@every_fusion
def test_batched_equals_one_by_one(text, vision, fusion):
    model = xf.fuse(composed(text, vision), fusion)
    inputs = batch(*ROWS)
    out = logits(model, for_model(model, asked(fusion, inputs)))
    for row, single in enumerate(rows_of(asked(fusion, inputs))):
        real = inputs["attention_mask"][row].bool()
        assert_close(out[row, real], logits(model, for_model(model, single))[0])


@every_pair
@every_fusion
def test_c2_cache_on_equals_off(text, vision, fusion):
    model = xf.fuse(composed(text, vision), fusion)
    inputs = for_model(model, batch(*ROWS))
    assert torch.equal(generate(model, inputs), generate(model, inputs, use_cache=False))


@pytest.mark.parametrize(("text", "vision"), [("llama", "cnn"), ("helium", "qwen")])
@every_fusion
def test_c3_beams_keep_images_and_their_grids_together(text, vision, fusion):
    model = xf.fuse(composed(text, vision), fusion)
    inputs = batch([3, I, 4], [2, I, I, 1, I, 3])
    together = generate(model, for_model(model, inputs), num_beams=3, num_return_sequences=2)
    for row, single in enumerate(rows_of(inputs)):
        alone = generate(model, for_model(model, single), num_beams=3, num_return_sequences=2)
        assert torch.equal(together[2 * row : 2 * row + 2], alone)


@every_pair
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("fusion", [None, xf.CrossAttention(every=2)], ids=["plain", "cross-attention"])
def test_save_then_load_is_bit_equal(text, vision, tied, fusion, tmp_path):
    model = composed(text, vision, tie_word_embeddings=tied)
    if fusion is not None:
        xf.fuse(model, fusion)
        for parameter in xf.fusion_parameters(model).values():
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    inputs = for_model(model, batch(*ROWS))
    model.save_pretrained(tmp_path)
    modules = {"vision": cnn()} if vision == "cnn" else {}
    loaded = xf.from_pretrained(tmp_path, **modules).eval()
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    assert xf.fusion_of(loaded) == fusion
    assert torch.equal(logits(loaded, inputs), logits(model, inputs))
    assert torch.equal(generate(loaded, inputs), generate(model, inputs))


def test_the_auto_classes_know_composed_models_after_one_import(tmp_path):
    composed("helium", "clip").save_pretrained(tmp_path)
    auto = "import crossfuse.backbones\nfrom transformers import AutoModelForImageTextToText as loader\n"
    for header in (auto, "import crossfuse as loader\n"):
        code = f"{header}print(type(loader.from_pretrained({str(tmp_path)!r})).__name__)"
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert out.split() == ["VisionLanguageModel"]


def test_a_plain_module_must_be_given_when_loading(tmp_path):
    composed("llama", "cnn").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"vision of this model is a plain module \(Sequential\).*pass one"):
        AutoModelForImageTextToText.from_pretrained(tmp_path)


def test_a_projector_of_your_own(tmp_path):
    own = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, WIDTH))
    model = composed("llama", "cnn", projector=own)
    inputs = for_model(model, batch([2, I, 3]))
    model.save_pretrained(tmp_path)
    again = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, WIDTH))
    loaded = xf.from_pretrained(tmp_path, vision=cnn(), projector=again).eval()
    assert torch.equal(logits(loaded, inputs), logits(model, inputs))
    with pytest.raises(ValueError, match="makes tokens of width 7; the LLM's width is 32"):
        composed("llama", "cnn", projector=nn.Linear(24, 7))
    with pytest.raises(ValueError, match="refuses tokens of width 24"):
        composed("llama", "cnn", projector=nn.Linear(5, WIDTH))
    assert isinstance(composed("llama", "cnn", projector="linear").model.multi_modal_projector, nn.Linear)


def test_a_frozen_cnn_keeps_its_batch_statistics():
    model = composed("llama", "cnn")
    statistics = model.model.vision_tower[1]
    inputs = for_model(model, labelled(batch([2, I, 3], [1, I, 4])))
    before = statistics.running_mean.clone()
    model.train()
    model.model.vision_tower.requires_grad_(False)
    model(**inputs).loss.backward()
    assert torch.equal(statistics.running_mean, before)
    model.model.vision_tower.requires_grad_(True)
    model.train()
    model(**inputs).loss.backward()
    assert not torch.equal(statistics.running_mean, before)


@every_pair
@pytest.mark.parametrize("fusion", [None, xf.Insertion(), xf.CrossAttention()], ids=["plain", "insertion", "cross"])
def test_g2_a_frozen_encoder_records_nothing(text, vision, fusion):
    model = composed(text, vision)
    if fusion is not None:
        xf.fuse(model, fusion)
    model.model.vision_tower.requires_grad_(False)
    received = []
    model.model.multi_modal_projector.register_forward_pre_hook(lambda _, args: received.append(args[0].requires_grad))
    grads = gradients(model, for_model(model, labelled(batch([2, I, 3], [4], [1, I, 5]))))
    assert received == [False]
    assert not [name for name in grads if "vision_tower" in name]
    projector = [name for name, _ in model.named_parameters() if "multi_modal_projector" in name]
    assert all(grads[name].abs().sum() > 0 for name in projector)


@every_pair
def test_a_training_step_without_images_touches_everything(text, vision):
    model = xf.fuse(composed(text, vision), xf.CrossAttention())
    grads = gradients(model, for_model(model, labelled(batch([5], [4]))))
    wanted = {n for n, p in model.named_parameters() if p.requires_grad and (".cross." in n or "projector" in n)}
    assert wanted <= set(grads)
    assert all(bool(grads[name].isfinite().all()) for name in wanted)


@every_pair
@pytest.mark.parametrize("fusion", [xf.Insertion(), xf.CrossAttention(every=2)], ids=["insertion", "cross"])
def test_d3_parts_of_different_precision_meet(text, vision, fusion):
    model = composed(text, vision)
    inputs = for_model(model, labelled(batch([2, I, 3], [1, I, 4])))
    with torch.no_grad():
        expected = xf.fuse(model, fusion)(**inputs).loss
    xf.unfuse(model)
    for part in (model.model.language_model, model.model.multi_modal_projector, model.lm_head):
        part.bfloat16()
    xf.fuse(model, fusion)
    assert {p.dtype for p in xf.fusion_parameters(model).values()} <= {torch.bfloat16}
    loss = model(**inputs).loss
    loss.backward()
    assert_close(loss.float(), expected, atol=0, rtol=0.02)


def test_the_placeholder_has_a_row_of_its_own_and_is_never_generated():
    source = llm("llama")
    before = source.get_input_embeddings().weight.detach().clone()
    model = xf.VisionLanguageModel.compose(source, tower("cnn"), image_size=16)
    table = model.get_input_embeddings().weight
    assert model.config.image_token_id == len(before) == len(table) - 1
    assert torch.equal(table[:-1], before)
    assert not table[-1].any()
    assert model.config.text_config.vocab_size == len(table)
    with torch.no_grad():
        model.lm_head.weight[-1] = 1e3 * torch.ones(WIDTH)
    assert not (generate(model, for_model(model, batch([3, I, 4]))) == model.config.image_token_id).any()


def test_placeholders_and_image_tokens_must_agree():
    model = composed("llama", "cnn")
    inputs = for_model(model, batch([2, I, 3]))
    with pytest.raises(ValueError, match=r"16 image placeholders for 2 images of 32 tokens"):
        model(**{**inputs, "pixel_values": inputs["pixel_values"].repeat(2, 1, 1, 1)})


def test_what_cannot_be_composed_is_refused_with_the_reason():
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    with pytest.raises(ValueError, match="GPT2LMHeadModel cannot be composed: its decoder needs layers, rotary_emb"):
        xf.VisionLanguageModel.compose(AutoModelForCausalLM.from_config(GPT2Config(**sizes)), cnn())
    scaled = CohereConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, logit_scale=0.5
    )
    with pytest.raises(ValueError, match="changes its logits after the head"):
        xf.VisionLanguageModel.compose(AutoModelForCausalLM.from_config(scaled), cnn(), image_size=16)
    pooled = nn.Sequential(cnn(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(ValueError, match=r"shape \(1, 24\); it must be \(B, C, H, W\)"):
        xf.VisionLanguageModel.compose(llm(), pooled, image_size=16)


def test_a_timm_network_and_one_of_its_stages(tmp_path):
    pytest.importorskip("timm")
    from transformers import AutoModel, TimmWrapperConfig

    torch.manual_seed(0)
    network = AutoModel.from_config(TimmWrapperConfig(architecture="test_resnet", do_pooling=False)).eval()
    model = xf.VisionLanguageModel.compose(llm(), network, image_size=32, vision_feature_layer=2).eval()
    stage = network(torch.zeros(1, 3, 32, 32), output_hidden_states=True).hidden_states[2]
    assert model.config.vision_hidden_size == stage.shape[1]
    assert model.config.image_stride == 32 // stage.shape[2]
    pixels = torch.randn(2, 3, 32, 32)
    tokens = stage.shape[2] * stage.shape[3]
    inputs = {
        "input_ids": torch.tensor([[5] + [model.config.image_token_id] * tokens + [6, 7]] * 2),
        "pixel_values": pixels,
    }
    assert [len(t) for t in model.get_image_features(pixels).pooler_output] == [tokens] * 2
    model.save_pretrained(tmp_path)
    loaded = xf.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(loaded, inputs), logits(model, inputs))
    xf.fuse(model, xf.CrossAttention())
    assert torch.equal(generate(model, inputs), generate(model, inputs, use_cache=False))
