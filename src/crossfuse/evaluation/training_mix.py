"""Training questions for comparisons on the embedded model: rendered scenes and easy-VQA, made when asked for."""

from __future__ import annotations

import functools
import random

from PIL import Image

from crossfuse.data.lazy import LazyRecords
from crossfuse.data.questions import QUESTION_KINDS, ask
from crossfuse.data.records import ImagePart, Record, TextPart
from crossfuse.data.scenes import Scene, Split, make_scene, render

SCENE_SHARE = 11 / 16
EASY_SCENE_SHARE = 0.5
SCENE_POOL = 4096
# Rarer than the others: a caption is as long as ten short answers.
KIND_WEIGHTS = {kind: 1 if kind == "caption" else 3 for kind in QUESTION_KINDS}
HELD_OUT_PICTURES = 200


def training_mix(count: int, *, seed: int, questions: int = 1, split: Split = "train") -> LazyRecords:
    """`count` records of one picture each, with `questions` questions as turns of one conversation.

    11 of 16 pictures are scenes of the split, half of them with one or two objects (binding a colour to a kind is
    learned on few objects first); the others are training pictures of easy-VQA, of which `split="validation"` takes
    200 that `split="train"` never shows. Record i depends on `seed`, i and nothing else.

    Raises:
        ValueError: fewer than one question, or the split "test", which has tasks of its own.
        ImportError: easy-VQA is not installed.
    """
    if questions < 1:
        raise ValueError(f"questions must be at least 1; got {questions}")
    if split == "test":
        raise ValueError("split must be 'train' or 'validation'; test questions are the tasks `scenes` and `easy-vqa`")
    return LazyRecords(count, functools.partial(_record, seed, questions, split))


def _record(seed: int, questions: int, split: Split, index: int) -> Record:
    rng = random.Random(f"mix/{split}/{seed}/{index}")
    make = _scene_turns if rng.random() < SCENE_SHARE else _easy_vqa_turns
    image, turns = make(rng, questions, split)
    messages: list[dict[str, object]] = []
    for number, (question, answer) in enumerate(turns):
        image_slot = [ImagePart()] if number == 0 else []
        messages.append({"role": "user", "content": [*image_slot, TextPart(text=question)]})
        messages.append({"role": "assistant", "content": answer})
    return Record.model_validate({"id": f"{split}-{seed}-{index}", "images": [image], "messages": messages})


def _scene_turns(rng: random.Random, count: int, split: Split) -> tuple[Image.Image, list[tuple[str, str]]]:
    turns: list[tuple[str, str]] = []
    while not turns:
        number = rng.choice(_small_scenes(split)) if rng.random() < EASY_SCENE_SHARE else rng.randrange(SCENE_POOL)
        scene = _scene(number, split)
        kinds = rng.choices(list(KIND_WEIGHTS), list(KIND_WEIGHTS.values()), k=count)
        asked = [ask(scene, kind, rng) for kind in kinds]
        turns = [(question.text, question.answer) for question in asked if question is not None]
    return _picture(number, split), turns


def _easy_vqa_turns(rng: random.Random, count: int, split: Split) -> tuple[Image.Image, list[tuple[str, str]]]:
    data, by_picture = _easy_vqa()
    pictures = sorted(by_picture)
    pictures = pictures[-HELD_OUT_PICTURES:] if split == "validation" else pictures[:-HELD_OUT_PICTURES]
    indices = by_picture[rng.choice(pictures)]
    chosen = [data[i] for i in rng.sample(indices, min(count, len(indices)))]
    return chosen[0].image, [(item.question, item.answer) for item in chosen]


@functools.lru_cache(maxsize=1)
def _easy_vqa():  # type: ignore[no-untyped-def]
    from crossfuse.data.easy_vqa import EasyVQA

    data = EasyVQA("train")
    by_picture: dict[int, list[int]] = {}
    for index, picture in enumerate(data.image_ids):
        by_picture.setdefault(picture, []).append(index)
    return data, by_picture


@functools.lru_cache(maxsize=2)
def _small_scenes(split: Split) -> list[int]:
    return [number for number in range(SCENE_POOL) if len(_scene(number, split).objects) <= 2]


@functools.lru_cache(maxsize=2 * SCENE_POOL)
def _scene(number: int, split: Split) -> Scene:
    return make_scene(number, split)


@functools.lru_cache(maxsize=SCENE_POOL)
def _picture(number: int, split: Split) -> Image.Image:
    return render(_scene(number, split))
