"""The paper's video recipes on real MP4 files in the sets' own formats, with a tiny random Qwen2.5-VL."""

from __future__ import annotations

import json
import math

import pytest
import torch
from format_files import human, level_at, livecc_row, write_finevision, write_livecc, write_onevision, write_video
from paper_models import llava_json, qwen
from PIL import Image

from crossfuse.data.records import Record
from crossfuse.data.streams import UnopenedStream
from crossfuse.data.videos import VideoSampling
from crossfuse.training.layouts import LayoutCollator
from crossfuse.training.recipe_files import load_recipe
from crossfuse.training.start import collator_for, open_sources, starting_model
from crossfuse.training.trainer import run

IGNORE = -100
START, END = 5.5, 9.5
# Times of the source; the last two have none or are out of order and stand with the word before them.
WORDS = [[6.0, 6.3, "red"], [6.4, 6.6, "green"], [8.1, 8.2, "blue"], [None, None, "picture"], [7.0, 7.1, "here"]]
COMMON = ["batch_size=1", "accumulation=1", "workers=0", "gradient_checkpointing=false", "save_every=null"]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return qwen(tmp_path_factory.mktemp("model"))


@pytest.fixture
def batches(monkeypatch):
    """Every batch that the trainer is given."""
    seen = []
    collate = LayoutCollator.__call__

    def noting(self, items):
        seen.append(collate(self, items))
        return seen[-1]

    monkeypatch.setattr(LayoutCollator, "__call__", noting)
    return seen


def train(recipe, folder, steps):
    torch.manual_seed(0)
    result = run(recipe, folder, progress=lambda info: None, say=lambda line: None)
    assert [step for step, _ in result.losses] == list(range(1, steps + 1))
    assert all(math.isfinite(loss) and loss > 0 for _, loss in result.losses)
    return result


def livecc_recipe(folder, model_folder, *changes):
    write_video(folder / "video/youtube/ID_x-1.mp4", 12)
    write_video(folder / f"part_3/ID_y-2_{START:.2f}-{END:.2f}_2.0fps.mp4", END - START, first=START)
    rows = [livecc_row(f"video/youtube/{name}.mp4", START, END, WORDS) for name in ("ID_x-1", "ID_y-2")]
    data = write_livecc(folder, rows)
    change = [f"model={model_folder}", f"data=[{{path: {data}, layout: stream}}]", *COMMON, *changes]
    return load_recipe("casa-qwen2.5-vl-3b-livecc", change)


@pytest.mark.slow
def test_livecc_trains_on_words_between_frames(tmp_path, model_folder, batches):
    """A whole video and a cut clip: the words after each frame's delimiter and silence are supervised, nothing else."""
    recipe = livecc_recipe(tmp_path, model_folder, "steps=3")
    result = train(recipe, tmp_path / "run", 3)
    tok = starting_model(recipe)[1].tokenizer
    word = {text: tok.convert_tokens_to_ids(text) for text in ("...", "\n", "<|im_end|>", "<|image_pad|>")}
    assert len(batches) == 3
    for batch in batches:
        frames = len(batch["image_grid_thw"])
        whole = batch["id"] == ["ID_x-1-0"]
        assert frames == (9 if whole else 8)  # of the whole video the frame at the very end is in the span too
        ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
        spoken = [labels[i] for i in range(len(labels)) if labels[i] != IGNORE]
        said = ["..."] * frames
        said[1], said[5] = "red green <|im_end|>", "blue picture here <|im_end|>"
        assert tok.convert_ids_to_tokens(spoken) == " ".join(said).split()
        # After each delimiter (the opening ends in one too) the first label: what this frame makes the model say.
        delimiters = [i for i, token in enumerate(ids) if token == word["\n"]][1:]
        assert len(delimiters) == frames
        for place, expected in zip(delimiters, said, strict=True):
            assert ids[place - 1] == word["<|image_pad|>"]
            assert labels[place + 1] == tok.convert_tokens_to_ids(expected.split()[0])
        silent = [i for i in range(len(ids)) if labels[i] == word["..."]]
        assert all(ids[i] == word["<|image_pad|>"] for i in silent[:-1])  # silence is said, never read
        assert (batch["image_grid_thw"] == torch.tensor([1, 4, 4])).all()
    assert result.image_tokens == sum(4 * len(batch["image_grid_thw"]) for batch in batches)


def test_livecc_streams_have_the_times_and_pictures_of_their_span(tmp_path, model_folder):
    recipe = livecc_recipe(tmp_path, model_folder)
    data = open_sources(recipe.data)
    assert {type(data[i]) for i in range(2)} == {UnopenedStream}
    for i in range(2):
        stream = data[i].open(VideoSampling(fps=recipe.video.fps), 28)
        assert [frame.time for frame in stream.frames[:8]] == [k / 2 for k in range(8)]
        for frame in stream.frames:
            assert abs(frame.image.convert("L").getpixel((30, 20)) - level_at(START + frame.time)) <= 4
        assert stream.spoken == [(1, "red green"), (5, "blue picture here")]
        assert stream.opening == "Please describe.\n"
    # Without a word about the layout the words' times decide; asked for, a record is a chat.
    assert type(open_sources([recipe.data[0].model_copy(update={"layout": None})])[0]) is UnopenedStream
    (chat,) = open_sources([recipe.data[0].model_copy(update={"layout": "chat", "limit": 1})]).datasets[0][:]
    assert chat.answer == "red green blue picture here"


@torch.no_grad()
def logits_of(model, batch):
    return model(**{k: v for k, v in batch.items() if k not in ("id", "labels")}, use_cache=False).logits


def test_each_frame_of_a_stream_reaches_its_own_window_and_later_text_alone(tmp_path, model_folder):
    recipe = livecc_recipe(tmp_path, model_folder)
    model, processor = starting_model(recipe)
    batch = collator_for(recipe, processor)([open_sources(recipe.data)[1]])
    before = logits_of(model, batch)
    patches = int(batch["image_grid_thw"][0].prod())
    changed = batch["pixel_values"].clone()
    changed[3 * patches : 4 * patches] += 1.0  # the fourth frame
    after = logits_of(model, batch | {"pixel_values": changed})
    delimiters = (batch["input_ids"][0] == processor.tokenizer.convert_tokens_to_ids("\n")).nonzero().flatten()[1:]
    assert torch.equal(before[0, : delimiters[3]], after[0, : delimiters[3]])
    assert not torch.allclose(before[0, delimiters[3]], after[0, delimiters[3]], atol=1e-4)


def video_recipe(folder, model_folder, *changes, seconds=6.0):
    """LLaVA-Video-178K's JSON beside unpacked clips, FineVision and LLaVA-OneVision-1.5."""
    write_video(folder / "source_a" / "clips" / "one.mp4", seconds)
    turns = human("<image>\nwhat is this ?", "a red picture") + human("what colour ?", "green .")
    row = {"id": "v1", "conversations": turns, "data_source": "source_a", "video": "clips/one.mp4"}
    (folder / "source_a_oe_v0_1.json").write_text(json.dumps([row]))
    fine, vision = write_finevision(folder / "fine.parquet"), write_onevision(folder / "onevision.parquet")
    data = (
        f"data=[{{path: {folder}/source_a_oe_v0_1.json, layout: chat, weight: 0.5}}, "
        f"{{path: {fine}, weight: 0.25, on_error: skip}}, {{path: {vision}, weight: 0.25, on_error: skip}}]"
    )
    return load_recipe("casa-qwen2.5-vl-3b-video", [f"model={model_folder}", data, *COMMON, *changes])


@pytest.mark.slow
def test_the_video_stage_goes_on_from_the_image_stage_with_clips_among_images(tmp_path, model_folder, batches):
    images, pictures = llava_json(tmp_path / "images")
    change = [f"model={model_folder}", f"data=[{{path: {images}, images: {pictures}}}]", "steps=1", "packing=null"]
    train(load_recipe("casa-qwen2.5-vl-3b", [*change, *COMMON]), tmp_path / "image-stage", 1)
    batches.clear()
    recipe = video_recipe(tmp_path, model_folder, f"start_from={tmp_path / 'image-stage'}", "steps=4")
    train(recipe, tmp_path / "run", 4)
    clips = [batch for batch in batches if "video_grid_thw" in batch]
    assert 0 < len(clips) < len(batches)  # half of the samples on average
    processor = starting_model(recipe)[1]
    tok = processor.tokenizer
    for batch in clips:
        assert batch["video_grid_thw"][:, 0].tolist() == [6]  # 12 frames at 2 a second, two a token
        labels = batch["labels"][0]
        answers = ["a", "red", "picture", "<|im_end|>", "green", ".", "<|im_end|>"]
        assert tok.convert_ids_to_tokens(labels[labels != IGNORE].tolist()) == answers
        count = (batch["input_ids"] == tok.convert_tokens_to_ids("<|video_pad|>")).sum()
        assert count == batch["video_grid_thw"].prod() // 4 <= 46_080


@pytest.mark.parametrize("windows", ["all", "frame"])
def test_a_question_sees_every_frame_of_its_clip(tmp_path, model_folder, windows):
    """As shipped. With one window a frame and no gists the first frames would reach nobody."""
    recipe = video_recipe(tmp_path, model_folder, "start_from=null")
    assert recipe.fusion["video_windows"] == "all"
    recipe = recipe.changed({"fusion.video_windows": windows})
    model, processor = starting_model(recipe)
    batch = collator_for(recipe, processor)([open_sources(recipe.data)[0]])
    before = logits_of(model, batch)
    _, height, width = batch["video_grid_thw"][0].tolist()
    changed = batch["pixel_values_videos"].clone()
    changed[: height * width] += 1.0
    after = logits_of(model, batch | {"pixel_values_videos": changed})
    supervised = (batch["labels"][0] != IGNORE).nonzero().flatten() - 1
    assert torch.equal(before[0, supervised], after[0, supervised]) == (windows == "frame")


def test_long_clips_lose_pixels_then_frames(tmp_path, model_folder):
    """The recipe's rule at a hundredth of its size: the frames shrink alike; beyond max_seconds they are spread."""
    few = ["start_from=null", "video.max_image_tokens=200", "video.max_seconds=4", "video.max_pixels=12544"]
    recipe = video_recipe(tmp_path, model_folder, *few)
    _, processor = starting_model(recipe)
    processor.video_processor.size = {"shortest_edge": 28 * 28, "longest_edge": 504 * 504}
    batch = collator_for(recipe, processor)([open_sources(recipe.data)[0]])
    frames, height, width = batch["video_grid_thw"][0].tolist()
    assert frames == 4  # 8 frames, of 12
    assert frames * height * width // 4 <= 200


def test_bad_clips_are_left_out_and_a_batch_without_any_counts_nothing(tmp_path, model_folder):
    recipe = livecc_recipe(tmp_path, model_folder)
    recipe = recipe.model_copy(update={"data": (recipe.data[0].model_copy(update={"on_error": "skip"}),)})
    _, processor = starting_model(recipe)
    data = open_sources(recipe.data)
    collate = collator_for(recipe, processor)
    record = data[0].record
    broken = UnopenedStream(
        record.model_copy(
            update={"id": "broken", "videos": (record.videos[0].model_copy(update={"path": "gone.mp4"}),)}
        )
    )
    reserved = UnopenedStream(record.model_copy(update={"id": "dots", "meta": {"words": [[0.1, 0.2, "so ..."]]}}))
    with pytest.raises(ValueError, match="no record of this batch could be used"):
        collate([broken])
    good = collate([data[1], broken, reserved])
    assert good["id"] == [data[1].id]
    assert collate.report.bad_image == ["broken", "broken"]
    assert collate.report.bad_text == ["dots"]
    again = collate([broken])
    assert torch.equal(again["input_ids"], good["input_ids"])
    assert (again["labels"] == IGNORE).all()
    strict = collator_for(livecc_recipe(tmp_path / "again", model_folder), processor)
    with pytest.raises(ValueError, match=r"record 'broken': video file not found: gone\.mp4"):
        strict([broken])


def test_chats_and_streams_share_a_batch(tmp_path, model_folder):
    recipe = livecc_recipe(tmp_path, model_folder, "precision=fp32")
    model, processor = starting_model(recipe)
    stream = open_sources(recipe.data)[1]
    chat = Record.of_question("chat", "what is this ?", "red", [Image.new("RGB", (56, 56), "red")])
    collate = collator_for(recipe, processor)
    together = collate([stream, chat])
    assert together["id"] == ["chat", stream.id]
    with torch.no_grad():
        for row, item in enumerate((chat, stream)):
            alone = collate([item])
            alone.pop("id")
            width = alone["input_ids"].shape[1]
            assert torch.equal(together["input_ids"][row, :width], alone["input_ids"][0])
            assert torch.equal(together["labels"][row, :width], alone["labels"][0])
            assert not together["attention_mask"][row, width:].any()
            expected, found = logits_of(model, alone)[0], logits_of(model, together)[row, :width]
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
