"""Small files in the true shapes of public formats, as their cards and readers describe them.

Parquet is written with the features of the data set's card; JSON as the sets ship it.
"""

from __future__ import annotations

import io
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def picture(seed: int = 0, size: tuple[int, int] = (48, 40)) -> Image.Image:
    """A smooth picture of its own for each seed."""
    draw = np.random.default_rng(seed)
    x, y = np.linspace(0, 1, size[0]), np.linspace(0, 1, size[1])[:, None]
    planes = [np.broadcast_to(draw.uniform(0, 1) * x + draw.uniform(0, 1) * y, size[::-1]) for _ in range(3)]
    return Image.fromarray((np.stack(planes, -1) * 127).astype(np.uint8))


def png(seed: int = 0, size: tuple[int, int] = (48, 40)) -> bytes:
    buffer = io.BytesIO()
    picture(seed, size).save(buffer, "PNG")
    return buffer.getvalue()


def human(text: str, answer: str) -> list[dict[str, str]]:
    return [{"from": "human", "value": text}, {"from": "gpt", "value": answer}]


# LLaVA-v1.5-mix665k: ids are COCO's, the tag stands first or last, text-only records have no image key.
LLAVA = [
    {
        "id": "000000033471",
        "image": "coco/train2017/000000033471.jpg",
        "conversations": human("<image>\nWhat are the colors of the bus?", "It is white and red.")
        + human("What feature is on its back?", "An advertisement."),
    },
    {
        "id": "000000033471",
        "image": "coco/train2017/000000033471.jpg",
        "conversations": human("Describe the picture.\n<image>", "A bus on a street."),
    },
    {"id": "wgByO4Y_0", "model": "", "conversations": human("How do I use the <video> tag?", "Like this: {x: [1]}.")},
    {
        "id": "several",
        "image": ["a.jpg", "b.jpg"],
        "conversations": human("<image>\n<image>\nWhich is <b>left</b>?", 'The "first".'),
    },
]
LLAVA_VIDEO = [
    {
        "id": "RW587",
        "conversations": human("<image>\nWhat does the person do?", "Opens a door."),
        "data_source": "0_30_s_academic_v0_1",
        "video": "academic_source/Charades/RW587.mp4",
    },
    {
        "id": 7,
        "conversations": human("<video>\nWhere?", "A kitchen."),
        "data_source": "0_30_s_academic_v0_1",
        "video": "academic_source/Charades/Q04US.mp4",
    },
]
LIVECC_WORDS = [
    [6.0, 6.4, "Hello"],
    [6.4, 6.4, "and"],
    [None, None, "welcome"],
    [7.2, 7.6, "back"],
    [12.0, 12.5, "late"],
]


def livecc_row(video: str, start: float, end: float, words: list[Any]) -> list[dict[str, Any]]:
    query = {
        "type": "text",
        "text": "Please describe.",
        "title": "A match",
        "previous": "before that",
        "category": "Sports",
    }
    return [
        {
            "role": "user",
            "content": [{"type": "video", "video": video, "video_start": start, "video_end": end}, query],
        },
        {"role": "assistant", "content": [{"type": "text_stream", "text_stream": words}]},
    ]


def write_llava(folder: Path, rows: list[dict[str, Any]] | None = None, name: str = "llava.json") -> Path:
    """A JSON array; with LLAVA also the pictures."""
    if rows is None:
        for number, path in enumerate(("coco/train2017/000000033471.jpg", "a.jpg", "b.jpg")):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            picture(number).save(folder / path)
    path = folder / name
    path.write_text(json.dumps(LLAVA if rows is None else rows, indent=2), encoding="utf-8")
    return path


def write_livecc(folder: Path, rows: list[Any], seeks: bool = True) -> Path:
    """JSON lines that end, where ``seeks``, in the list of the lines' places."""
    path = folder / ("live_whisperx_with_seeks.jsonl" if seeks else "live_whisperx.jsonl")
    text, places = "", []
    for row in rows:
        places.append(len(text.encode()))
        text += json.dumps(row) + "\n"
    path.write_text(text + (json.dumps(places) + "\n" if seeks else ""), encoding="utf-8")
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]], features: Any) -> Path:
    from datasets import Dataset

    Dataset.from_list(rows, features=features).to_parquet(str(path))
    return path


def write_vsft(path: Path, rows: list[dict[str, Any]] | None = None) -> Path:
    """HuggingFaceH4/llava-instruct-mix-vsft: the card's features."""
    from datasets import Features, Image, List, Value

    part = {"index": Value("int64"), "text": Value("string"), "type": Value("string")}
    features = Features({"messages": List({"content": List(part), "role": Value("string")}), "images": List(Image())})
    return write_parquet(path, VSFT if rows is None else rows, features)


def text(words: str) -> dict[str, Any]:
    return {"index": None, "text": words, "type": "text"}


def image(index: int | None) -> dict[str, Any]:
    return {"index": index, "text": None, "type": "image"}


VSFT = [
    {
        "messages": [
            {"role": "user", "content": [text("Who wrote this book?\n"), image(0)]},
            {"role": "assistant", "content": [text("Donna Eden")]},
            {"role": "user", "content": [text("What is its title?")]},
            {"role": "assistant", "content": [text("The Energies of Love")]},
        ],
        "images": [picture(1)],
    },
    {
        "messages": [
            {"role": "user", "content": [image(1), text("and"), image(0), text("\nsame?")]},
            {"role": "assistant", "content": [text("No")]},
        ],
        "images": [picture(2), picture(3)],
    },
]


def write_finevision(path: Path) -> Path:
    """HuggingFaceM4/FineVision: the card's features."""
    from datasets import Features, Image, List, Value

    columns: dict[str, Any] = {
        "images": List(Image()),
        "texts": List({"user": Value("string"), "assistant": Value("string")}),
        "source": Value("string"),
    }
    names = ("relevance", "image_correspondence", "formatting", "visual_dependency")
    for name in names:
        columns |= {f"{name}_ratings": List(Value("int64")), f"{name}_min": Value("int64")}
    rows: list[dict[str, Any]] = []
    for number, relevance in enumerate(([5, 2], [1, 1], [None, 4])):
        row: dict[str, Any] = {
            "images": [picture(10 * number + i) for i in range(number)],
            "texts": [{"user": f"question {i}?", "assistant": f"answer {i}."} for i in range(2)],
            "source": "ai2d_merged",
        }
        for name in names:
            ratings = relevance if name == "relevance" else [5, 5]
            row |= {f"{name}_ratings": ratings, f"{name}_min": min((r for r in ratings if r), default=None)}
        rows.append(row)
    return write_parquet(path, rows, Features(columns))


def write_onevision(path: Path) -> Path:
    """mvp-lab/LLaVA-OneVision-1.5-Instruct-Data, a subset whose messages have all four keys."""
    from datasets import Features, Image, Value
    from datasets import List as ListOf

    message = {key: Value("string") for key in ("content", "from", "role", "value")}
    features = Features(
        {"id": Value("string"), "image": Image(), "conversations": ListOf(message), "data_source": Value("string")}
    )

    def said(role: str, words: str) -> dict[str, Any]:
        return {"content": words, "from": None, "role": role, "value": None}

    rows = [
        {
            "id": "a1",
            "image": picture(4),
            "conversations": [said("user", "What is it?"), said("assistant", "A gradient.")],
            "data_source": "demo",
        },
        {
            "id": "a2",
            "image": picture(5),
            "conversations": [
                {"content": None, "from": "human", "role": None, "value": "<image>\nAnd this?"},
                {"content": None, "from": "gpt", "role": None, "value": "Another."},
            ],
            "data_source": "demo",
        },
        {
            "id": "a3",
            "image": None,
            "conversations": [said("user", "2 + 2?"), said("assistant", "4")],
            "data_source": "text",
        },
    ]
    return write_parquet(path, rows, features)


def write_video(
    path: Path, seconds: float, fps: int = 10, first: float = 0.0, codec: str = "mpeg4", clock: float = 0.0
) -> Path:
    """A video whose grey tells the time of the source: a step each half second. ``first``: where in the source it
    starts; ``clock``: what its own clock says then."""
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = 64, 48, "yuv420p", 5
        for number in range(round(seconds * fps)):
            level = level_at(first + number / fps)
            frame = av.VideoFrame.from_image(Image.new("RGB", (64, 48), (level, level, level)))
            frame.pts, frame.time_base = number + round(clock * fps), Fraction(1, fps)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def level_at(seconds: float) -> int:
    """The grey of a source's frame at a time."""
    return 20 + round(seconds * 2) * 12 % 216
