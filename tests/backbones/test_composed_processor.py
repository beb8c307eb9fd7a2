"""The processor of composed models: placeholders, the delimiter after an image, templates, saving."""

from __future__ import annotations

import pytest
import torch
from composed_models import llm, tower
from PIL import Image
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModel, AutoProcessor, CLIPImageProcessor, PreTrainedTokenizerFast, pipeline
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

import crossfuse as xf

RED = Image.new("RGB", (48, 40), (200, 30, 30))
MESSAGES = [{"role": "user", "content": [{"type": "image", "image": RED}, {"type": "text", "text": "w1 w2"}]}]
TENSORS = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": True}


def tokenizer(**options):
    words = ["<pad>", "<unk>", "</s>", "\n", "user", ":", "assistant", *(f"w{i}" for i in range(40))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n|:|[^\s:]+"), behavior="removed", invert=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", padding_side="left", **options
    )


def composed(vision="clip", **options):
    images = CLIPImageProcessor(size={"height": 16, "width": 16}, do_center_crop=False)
    if vision == "qwen":
        images = Qwen2VLImageProcessor(patch_size=2, merge_size=2, min_pixels=16, max_pixels=1024)
    return xf.VisionLanguageModel.compose(
        llm(), tower(vision), tokenizer=tokenizer(**options), image_processor=images, image_size=16
    ).eval()


@pytest.mark.parametrize("vision", ["clip", "cnn", "qwen"])
def test_placeholders_match_the_image_tokens(vision):
    model = composed(vision)
    texts = ["<image>w1", "w2<image>w3<image>"]
    inputs = model.processor(images=[[RED], [RED, RED]], text=texts, padding=True, return_tensors="pt")
    lengths = [len(tokens) for tokens in model.get_image_features(**images_of(inputs)).pooler_output]
    counts = (inputs["input_ids"] == model.config.image_token_id).sum(1).tolist()
    assert counts == [lengths[0], lengths[1] + lengths[2]]
    assert model(**inputs).logits.isfinite().all()


def images_of(inputs):
    return {name: inputs[name] for name in ("pixel_values", "image_grid_thw") if name in inputs}


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("<image>w1", "<image>\nw1"),
        ("<image>\nw1", "<image>\nw1"),
        ("w1<image>", "w1<image>\n"),
        ("<image><image>w1<image>", "<image><image>\nw1<image>\n"),
        ("w1", "w1"),
    ],
)
def test_something_stands_between_an_image_and_what_follows(text, written):
    processor = composed().processor
    assert processor.prepare_inputs_layout(text=text)[1] == [written]


def test_a_prompt_that_ends_with_an_image_can_be_answered_by_cross_attention():
    model = xf.fuse(composed(), xf.CrossAttention())
    inputs = model.processor(images=RED, text="w1<image>", return_tensors="pt")
    assert model.generate(**inputs, max_new_tokens=3).shape[1] == inputs["input_ids"].shape[1] + 3


def test_the_tokenizer_gains_the_placeholder_once():
    tok = tokenizer()
    images = CLIPImageProcessor(size={"height": 16, "width": 16}, do_center_crop=False)
    first = xf.VisionLanguageModel.compose(llm(), tower("clip"), tokenizer=tok, image_processor=images)
    size, rows = len(tok), first.get_input_embeddings().weight.shape[0]
    second = xf.VisionLanguageModel.compose(llm(), tower("clip"), tokenizer=tok, image_processor=images)
    assert len(tok) == size
    assert first.config.image_token_id == second.config.image_token_id == tok.convert_tokens_to_ids("<image>")
    assert rows == 64  # the LLM's table had a free row already


@pytest.mark.parametrize("own", [None, "{% for m in messages %}[{{ m['role'] + ' ' + m['content'] }}]{% endfor %}"])
def test_templates_of_text_models_take_images(own):
    processor = composed(chat_template=own).processor
    text = processor.apply_chat_template([*MESSAGES, {"role": "assistant", "content": "w3"}])
    expected = "user: <image>\nw1 w2\nassistant: w3</s>\n" if own is None else "[user <image>\nw1 w2][assistant w3]"
    assert text == expected


def test_save_then_load_the_processor(tmp_path):
    model = composed()
    model.processor.save_pretrained(tmp_path)
    loaded = AutoProcessor.from_pretrained(tmp_path)
    assert type(loaded) is type(model.processor)
    before, after = (p.apply_chat_template(MESSAGES, **TENSORS) for p in (model.processor, loaded))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("fusion", [xf.Insertion(), xf.TextAnchors(threshold=0.1), xf.CrossAttention()])
def test_pipelines_run(fusion):
    model = xf.fuse(composed(), fusion)
    ask = pipeline("image-text-to-text", model=model, processor=model.processor)
    answer = ask(text=MESSAGES, max_new_tokens=3, return_full_text=False)[0]["generated_text"]
    new = model.generate(**model.processor.apply_chat_template(MESSAGES, **TENSORS), max_new_tokens=3)[0, -3:]
    assert answer.strip() == model.processor.decode(new, skip_special_tokens=True)


def test_a_foreign_tokenizer_is_refused():
    model = xf.VisionLanguageModel.compose(llm(), tower("clip"))
    with pytest.raises(ValueError, match="no token 64, the model's image placeholder"):
        type(composed().processor).for_model(model, tokenizer(), None)


@pytest.mark.parametrize("kind", ["clip", "siglip", "qwen"])
def test_parts_are_loaded_from_directories(kind, tmp_path):
    """Of a dual encoder or a vision-language model, the vision part is taken."""
    torch.manual_seed(0)
    llm().save_pretrained(tmp_path / "llm")
    tokenizer().save_pretrained(tmp_path / "llm")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    if kind == "qwen":
        from transformers import Qwen2_5_VLConfig

        vision = {
            "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 2,
            "out_hidden_size": 32, "fullatt_block_indexes": [0], "window_size": 8,
        }  # fmt: skip
        text = {**sizes, "vocab_size": 64, "num_key_value_heads": 2, "pad_token_id": 0}
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
        config = Qwen2_5_VLConfig(vision_config=vision, text_config=text)
        images = Qwen2VLImageProcessor(patch_size=2, merge_size=2, min_pixels=16, max_pixels=1024)
    else:
        vision, text = {**sizes, "image_size": 16, "patch_size": 4}, {**sizes, "vocab_size": 64}
        config = AutoConfig.for_model(kind, vision_config=vision, text_config=text)
        images = CLIPImageProcessor(size={"height": 16, "width": 16}, do_center_crop=False)
    whole = AutoModel.from_config(config).eval()
    whole.save_pretrained(tmp_path / "vision")
    images.save_pretrained(tmp_path / "vision")
    model = xf.VisionLanguageModel.compose(llm=tmp_path / "llm", vision=str(tmp_path / "vision")).eval()
    part = whole.visual if kind == "qwen" else whole.vision_model
    assert all(torch.equal(model.model.vision_tower.state_dict()[n], t) for n, t in part.state_dict().items())
    inputs = model.processor(images=RED, text="<image>w1 w2", return_tensors="pt")
    model.save_pretrained(tmp_path / "both")
    model.processor.save_pretrained(tmp_path / "both")
    loaded = xf.from_pretrained(tmp_path / "both").eval()
    assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)
    again = AutoProcessor.from_pretrained(tmp_path / "both")(images=RED, text="<image>w1 w2", return_tensors="pt")
    assert all(torch.equal(again[name], value) for name, value in inputs.items())
