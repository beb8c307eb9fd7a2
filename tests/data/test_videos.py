"""Frames of videos, and videos in batches."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch
from format_files import level_at, picture, write_video
from PIL import Image

from crossfuse.data.collate import Collator
from crossfuse.data.lengths import Lengths, TokenCounter
from crossfuse.data.records import Record, Video
from crossfuse.data.videos import VideoSampling, read_clip, video_header

WORDS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
    "{% else %}<|vision_start|><|{{ p.type }}_pad|><|vision_end|>{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def qwen():
    """A Qwen2.5-VL processor with a tokenizer of bytes and small bounds of size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    letters = pre_tokenizers.ByteLevel.alphabet()
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(sorted(letters))}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(WORDS)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=WORDS[2], pad_token=WORDS[0])
    size = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16}
    return Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(size=size), tokenizer, Qwen2VLVideoProcessor(size=size), chat_template=TEMPLATE
    )


@pytest.fixture(scope="module")
def video(tmp_path_factory):
    return write_video(tmp_path_factory.mktemp("video") / "a.mp4", 6)


def question(id: str, path: str, images: int = 0, **span) -> Record:
    content = [{"type": "image"}] * images + [{"type": "video"}, {"type": "text", "text": "what?"}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "that"}]
    return Record(
        id=id,
        images=[picture(i, (90, 60)) for i in range(images)],
        videos=[{"path": str(path), **span}],
        messages=messages,
    )


def test_frames_of_a_span(video):
    frames = read_clip(Video(path=str(video), start=1.5, end=3.0), VideoSampling(fps=2))
    assert [time for time, _ in frames] == [0.0, 0.5, 1.0, 1.5]
    for time, image in frames:
        assert abs(float(np.asarray(image).mean()) - level_at(1.5 + time)) <= 3
    assert video_header(str(video)) == (pytest.approx(6.0, abs=0.1), (64, 48))


def test_v5_short_videos_and_high_rates(tmp_path):
    short = write_video(tmp_path / "short.mp4", 0.4)
    assert len(read_clip(Video(path=str(short)), VideoSampling(fps=1))) == 1
    assert len(read_clip(Video(path=str(short)), VideoSampling(fps=100))) == 4


def test_a_longer_span_is_sampled_evenly(video):
    times = [time for time, _ in read_clip(Video(path=str(video)), VideoSampling(fps=2, max_seconds=2))]
    assert len(times) == 4
    assert times == sorted(times)
    assert times[0] == 0.0
    assert times[-1] >= 4.0
    assert np.diff(times).max() <= 2 * np.diff(times).min()


def test_what_is_no_video_is_named(tmp_path, video):
    with pytest.raises(FileNotFoundError, match=r"video file not found: gone\.mp4"):
        read_clip(Video(path="gone.mp4"), VideoSampling())
    (tmp_path / "text.mp4").write_text("hello")
    with pytest.raises(ValueError, match=r"text\.mp4 is not a video that can be read"):
        read_clip(Video(path=str(tmp_path / "text.mp4")), VideoSampling())
    with pytest.raises(ValueError, match="has no frame from 60 s on"):
        read_clip(Video(path=str(video), start=60), VideoSampling())
    with pytest.raises(ValueError, match="fps must be above 0; got 0"):
        VideoSampling(fps=0)
    with pytest.raises(ValueError, match="ends at 1 s, not after its start at 2 s"):
        Video(path="a", start=2, end=1)


def test_a_folder_of_frames_is_a_video(tmp_path):
    for number in range(5):
        picture(number).save(tmp_path / f"{number:04d}.png")
    frames = read_clip(Video(path=str(tmp_path)), VideoSampling(fps=2))
    assert [time for time, _ in frames] == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert np.array_equal(np.asarray(frames[3][1]), np.asarray(picture(3)))
    assert video_header(str(tmp_path)) == (None, (48, 40))


def test_the_rule_that_shrinks_long_videos():
    """CASA's video stage: 3 minutes at 2 fps and 504 x 504 would be 58,320 tokens; 46,080 are allowed."""
    free = VideoSampling(max_tokens=None)
    bounded = VideoSampling(max_tokens=46_080)
    frames = bounded.frame_count(180)
    assert frames == 360
    tokens = frames // 2 * (504 // 28) ** 2
    assert tokens == 58_320
    assert free.frame_size(1920, 1920, frames, 28, 2) == (504, 504)
    assert bounded.frame_size(1920, 1920, frames, 28, 2) == (448, 448)
    assert frames // 2 * (448 // 28) ** 2 == 46_080
    assert bounded.frame_size(504, 504, 20, 28, 2) == (504, 504)
    with pytest.raises(ValueError, match="360 frames take at least 180 tokens, more than max_tokens=100"):
        VideoSampling(max_tokens=100).frame_size(504, 504, frames, 28, 2)


def test_qwen_takes_videos_as_videos(qwen, video):
    records = [
        question("v", video, start=1.0, end=2.6),
        Record.of_question("text", "hi", "yes"),
        question("both", video, images=1),
        Record.of_question("i", "what?", "that", [picture(7, (60, 90))]),
    ]
    collator = Collator(qwen, video=VideoSampling(fps=2))
    batch = collator(records)
    assert batch["video_grid_thw"].tolist() == [[2, 4, 4], [6, 4, 4]]
    assert batch["image_grid_thw"].tolist() == [[1, 4, 6], [1, 6, 4]]
    assert torch.allclose(batch["second_per_grid_ts"], torch.tensor([1.0, 1.0]))
    counter = TokenCounter(qwen, VideoSampling(fps=2))
    lengths = batch["attention_mask"].sum(1).tolist()
    assert [counter(record).total for record in records] == lengths
    labels = [qwen.tokenizer.decode(row[row != -100]) for row in batch["labels"]]
    assert labels == ["that<|im_end|>", "yes<|im_end|>", "that<|im_end|>", "that<|im_end|>"]
    for row, record in enumerate(records):
        alone = collator([record])
        real = batch["attention_mask"][row].bool()
        assert torch.equal(alone["input_ids"][0], batch["input_ids"][row][real])


def test_max_tokens_bounds_what_the_processor_makes(qwen, video):
    for most in (8, 12, 24):
        batch = Collator(qwen, video=VideoSampling(fps=2, max_tokens=most))([question("v", video)])
        assert batch["video_grid_thw"].prod() // 4 <= most


def test_other_processors_take_frames_as_images(embedded, video):
    processor = copy.deepcopy(embedded[1])
    sampling = VideoSampling(fps=1)
    record = question("v", video, images=1, end=2.9)
    batch = Collator(processor, video=sampling)([record, Record.of_question("t", "hi", "yes")])
    assert batch["pixel_values"].shape[0] == 4
    frames = read_clip(record.videos[0], sampling)
    as_images = Record.of_question("i", "what?", "that", [picture(0, (90, 60)), *(image for _, image in frames)])
    same = Collator(processor)([as_images])
    assert torch.equal(same["pixel_values"], batch["pixel_values"])
    assert torch.equal(same["input_ids"][0], batch["input_ids"][0])
    assert TokenCounter(processor, sampling)(record).total == batch["attention_mask"][0].sum()


def test_lengths_equal_the_collators(embedded, qwen):
    processor = embedded[1]
    records = [
        Record.of_question("a", "what color is the circle?", "red", [picture(0)]),
        Record.of_question("b", "hi", "yes"),
        Record.of_question("c", "?", "no", [picture(1, (300, 90)), picture(2, (90, 300))]),
    ]
    for made in (processor, qwen):
        counter, collator = TokenCounter(made), Collator(made)
        placeholder = made.tokenizer.convert_tokens_to_ids(made.image_token)
        for record in records:
            ids = collator([record])["input_ids"][0]
            images = int((ids == placeholder).sum())
            assert counter(record) == Lengths(len(ids) - images, images)


def test_a_bad_video_is_named_or_skipped(qwen, video):
    records = [question("good", video), question("gone", "gone.mp4")]
    with pytest.raises(ValueError, match="record 'gone': video file not found"):
        Collator(qwen)(records)
    collator = Collator(qwen, on_bad_image="skip", keep=("id",))
    assert collator(records)["id"] == ["good"]
    assert collator.report.bad_image == ["gone"]


def test_image_tokens_of_an_upright_picture(qwen):
    turned = picture(0, (90, 60))
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    turned.save(buffer, "JPEG", exif=exif)
    record = Record.of_question("t", "what?", "that", [buffer.getvalue()])
    ids = Collator(qwen)([record])
    assert ids["image_grid_thw"].tolist() == [[1, 6, 4]]
    assert TokenCounter(qwen)(record).total == ids["input_ids"].shape[1]
