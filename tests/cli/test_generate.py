"""`crossfuse generate` on the embedded model: answers, options of fusions, and every kind of bad input."""

import numpy as np
import pytest
from PIL import Image

import crossfuse as xf
from crossfuse.data.collate import Collator
from crossfuse.data.records import Record

QUESTION = "what color is the circle?"


@pytest.fixture
def picture(tmp_path):
    """A red square on white, as a PNG file."""
    image = Image.new("RGB", (64, 64), "white")
    image.paste((255, 0, 0), (16, 16, 48, 48))
    path = tmp_path / "picture.png"
    image.save(path)
    return path


def reply(run, *arguments):
    code, out, err = run("generate", *(str(a) for a in arguments), "--max-new-tokens", "5")
    assert code == 0, err
    return out.rstrip("\n")


def refusal(run, *arguments):
    code, out, err = run("generate", *(str(a) for a in arguments))
    assert code == 2, (out, err)
    assert out == ""
    (line,) = err.splitlines()
    return line.removeprefix("crossfuse: ")


def library_answer(picture, fusion=None):
    """The same through the Python API."""
    model, processor = xf.load_embedded()
    if fusion is not None:
        xf.fuse(model, fusion)
    inputs = Collator(processor, prompt_only=True)([Record.of_question("q", QUESTION, images=[str(picture)])])
    tokens = model.generate(**inputs, do_sample=False, max_new_tokens=5)[0, inputs["input_ids"].shape[1] :]
    return processor.tokenizer.decode(tokens, skip_special_tokens=True).strip()


def test_answer_is_that_of_the_library(run, picture):
    assert reply(run, picture, QUESTION) == library_answer(picture)


@pytest.mark.parametrize(
    ("options", "fusion"),
    [
        (["--fusion", "text-anchors", "--threshold", "0.0"], xf.TextAnchors(threshold=0.0)),
        (
            ["--fusion=text-anchors", "--threshold=0.05", "--copy-order=prompt"],
            xf.TextAnchors(0.05, copy_order="prompt"),
        ),
        (["--fusion", "insertion", "--compress", "mean-pool:4"], xf.Insertion(compress=xf.MeanPool(4))),
        (["--fusion", "cross-attention", "--joint-text", "--every", "2"], xf.CrossAttention(joint_text=True, every=2)),
        (["--fusion", "cross-attention", "--no-joint-text", "--history", "none"], xf.CrossAttention(history=None)),
    ],
)
def test_every_field_of_a_fusion_is_an_option(run, picture, options, fusion):
    assert reply(run, picture, QUESTION, *options) == library_answer(picture, fusion)


def test_options_may_stand_before_the_arguments(run, picture):
    options = ["--fusion", "cross-attention", "--joint-text"]
    assert reply(run, *options, picture, QUESTION) == reply(run, picture, QUESTION, *options)


def test_untrained_weights_are_said_to_be_untrained(run, picture):
    _, _, err = run("generate", str(picture), QUESTION, "--fusion", "cross-attention", "--max-new-tokens", "2")
    assert err == "crossfuse: note: cross-attention adds weights that this model was never trained with\n"


def test_saved_fusion_comes_back(run, picture, tmp_path):
    model, processor = xf.load_embedded()
    xf.fuse(model, xf.TextAnchors(threshold=0.0)).save_pretrained(tmp_path / "m")
    processor.save_pretrained(tmp_path / "m")
    expected = library_answer(picture, xf.TextAnchors(threshold=0.0))
    assert reply(run, picture, QUESTION, "--model", tmp_path / "m") == expected
    assert (
        reply(run, picture, QUESTION, "--model", tmp_path / "m", "--fusion", "text-anchors", "--threshold", 0)
        == expected
    )
    line = refusal(run, picture, QUESTION, "--model", tmp_path / "m", "--fusion", "insertion")
    assert "was saved with TextAnchors(" in line
    assert line.endswith("leave --fusion out to use it")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--threshold", "-0.2"], "threshold must be at least 0 (1 or more switches anchors off); got -0.2"),
        (["--threshold", "nan"], "threshold must be at least 0 (1 or more switches anchors off); got nan"),
        (["--threshold", "much"], "--threshold takes a number; got 'much'"),
        (["--share", "1.5"], "share must be above 0 and at most 1 (0.1 copies a tenth of the tokens); got 1.5"),
        (["--threshold"], "--threshold needs a value"),
        (["--treshold", "0.1"], "text-anchors has no field 'treshold' (did you mean 'threshold'?)"),
        (["--exclude-token-ids", "a,b"], "--exclude-token-ids takes whole numbers with commas between them; got 'a,b'"),
        (["--compress", "4"], "--compress takes a compression and its size, as mean-pool:4 or q-former:32; got '4'"),
    ],
)
def test_bad_fields(run, picture, options, message):
    assert refusal(run, picture, QUESTION, "--fusion", "text-anchors", *options).startswith(message)


def test_unknown_fusion_suggests_the_nearest(run, picture):
    line = refusal(run, picture, QUESTION, "--fusion", "text-anchor")
    assert line.startswith("unknown fusion 'text-anchor' (did you mean 'text-anchors'?)")


def test_field_without_a_fusion(run, picture):
    line = refusal(run, picture, QUESTION, "--threshold", "0.1")
    assert line == "unknown option --threshold; fields of a fusion need --fusion NAME"


@pytest.mark.parametrize("prompt", ["", "   ", "\n"])
def test_empty_prompt(run, picture, prompt):
    assert refusal(run, picture, prompt).startswith("the prompt is empty; ask something")


def test_t4_placeholder_in_the_prompt(run, picture):
    line = refusal(run, picture, "explain the <image> tag")
    assert "'<image>'" in line
    assert "reserved" in line


def test_missing_image(run, tmp_path):
    assert refusal(run, tmp_path / "no.png", QUESTION).startswith(f"image file not found: {tmp_path / 'no.png'}")


def test_truncated_image(run, tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "whole.jpg")
    cut = tmp_path / "cut.jpg"
    cut.write_bytes((tmp_path / "whole.jpg").read_bytes()[:1500])
    line = refusal(run, cut, QUESTION)
    assert line.startswith(f"{cut} cannot be decoded")
    assert line.endswith("the file may be truncated")


def test_text_file_as_image(run, tmp_path):
    (tmp_path / "a.png").write_text("no picture")
    assert "is not an image" in refusal(run, tmp_path / "a.png", QUESTION)


def test_directory_as_image(run, tmp_path):
    assert "is not a file" in refusal(run, tmp_path, QUESTION)


def test_gif_named_jpg_works(run, picture, tmp_path):
    Image.open(picture).convert("P").save(tmp_path / "really.gif", format="GIF")
    (tmp_path / "picture.jpg").write_bytes((tmp_path / "really.gif").read_bytes())
    Image.open(tmp_path / "really.gif").convert("RGB").save(tmp_path / "same.png")
    assert reply(run, tmp_path / "picture.jpg", QUESTION) == reply(run, tmp_path / "same.png", QUESTION)


def test_one_pixel_works(run, tmp_path):
    Image.new("RGB", (1, 1), "red").save(tmp_path / "dot.png")
    Image.new("RGB", (64, 64), "red").save(tmp_path / "red.png")
    assert reply(run, tmp_path / "dot.png", QUESTION) == reply(run, tmp_path / "red.png", QUESTION)


def test_palette_with_transparency_is_put_on_white(run, picture, tmp_path):
    clear = Image.open(picture).convert("RGBA")
    pixels = np.array(clear)
    pixels[(pixels[..., :3] == 255).all(-1)] = 0
    Image.fromarray(pixels).quantize().save(tmp_path / "palette.png")
    assert Image.open(tmp_path / "palette.png").mode == "P"
    assert reply(run, tmp_path / "palette.png", QUESTION) == reply(run, picture, QUESTION)


def test_exif_rotation_is_applied(run, tmp_path):
    image = Image.new("RGB", (64, 64), "white")
    image.paste((0, 0, 255), (0, 0, 64, 20))
    image.save(tmp_path / "upright.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    image.rotate(90).save(tmp_path / "turned.png", exif=exif)
    assert reply(run, tmp_path / "turned.png", QUESTION) == reply(run, tmp_path / "upright.png", QUESTION)


def test_model_that_is_not_there(run, picture, tmp_path):
    line = refusal(run, picture, QUESTION, "--model", tmp_path / "none")
    assert line.startswith(f"no such directory: {tmp_path / 'none'}")
    line = refusal(run, picture, QUESTION, "--model", tmp_path)
    assert line == f"{tmp_path} is a directory without config.json; give one that save_pretrained wrote"


def test_model_on_a_hub_out_of_reach(run, picture):
    assert refusal(run, picture, QUESTION, "--model", "nobody/nothing").startswith("cannot load nobody/nothing:")


def test_family_that_is_not_supported(run, picture, tmp_path):
    from transformers import BertConfig

    BertConfig(architectures=["BertModel"]).save_pretrained(tmp_path)
    line = refusal(run, picture, QUESTION, "--model", tmp_path)
    assert line.startswith(f"{tmp_path} holds BertModel, which is not supported; crossfuse fuses LlavaFor")
