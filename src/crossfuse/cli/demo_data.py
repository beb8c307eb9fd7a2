"""Questions that the demo trains on and scores: rendered scenes, or the public easy-VQA set."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Literal

from crossfuse.data.formats.scenes import SCENE_KINDS
from crossfuse.data.lazy import LazyRecords
from crossfuse.data.records import Record

DataName = Literal["scenes", "easy-vqa"]


@dataclasses.dataclass(frozen=True)
class DemoData:
    """Training records, and scored records whose pictures are in no training record.

    Scored records carry their "answer" and "kind" as meta values; `picture_ids` tells which share a picture.
    """

    description: str
    train: Sequence[Record]
    scored: Sequence[Record]
    picture_ids: Sequence[int]


def demo_data(name: DataName, *, train: int, scored: int, seed: int) -> DemoData:
    """The data set called `name`; `ImportError` with the remedy where easy-VQA is not installed."""
    return _scenes(train, scored, seed) if name == "scenes" else _easy_vqa(train, scored, seed)


def _scenes(train: int, scored: int, seed: int) -> DemoData:
    from crossfuse.data.questions import SceneQuestions

    learn = SceneQuestions("train", train, seed=seed, kinds=SCENE_KINDS)
    ask = SceneQuestions("test", scored, seed=seed, kinds=SCENE_KINDS)

    def record(questions: SceneQuestions, index: int) -> Record:
        image, question, _ = questions[index]
        name = f"scenes-{questions.split}-{seed}-{index}"
        return Record.of_question(name, question.text, question.answer, [image], kind=question.kind)

    return DemoData(
        description=(
            "rendered scenes of one to six coloured shapes; questions on "
            f"{', '.join(SCENE_KINDS[:-1])} and {SCENE_KINDS[-1]} in equal parts; training and test share no scene"
        ),
        train=LazyRecords(train, lambda index: record(learn, index)),
        scored=[record(ask, index) for index in range(scored)],
        picture_ids=list(range(scored)),
    )


def _easy_vqa(train: int, scored: int, seed: int) -> DemoData:
    from crossfuse.data.easy_vqa import EasyVQA

    learn, ask = EasyVQA("train"), EasyVQA("test")
    rng = random.Random(seed)
    learned = rng.sample(range(len(learn)), min(train, len(learn)))
    asked = rng.sample(range(len(ask)), min(scored, len(ask)))

    def record(items: EasyVQA, index: int) -> Record:
        item = items[index]
        name = f"easy-vqa-{items.split}-{index}"
        return Record.of_question(name, item.question, item.answer, [item.image], kind=item.kind)

    return DemoData(
        description=f"easy-VQA: {len(asked):,} questions drawn at random from its {len(ask):,} test questions",
        train=LazyRecords(len(learned), lambda index: record(learn, learned[index])),
        scored=[record(ask, index) for index in asked],
        picture_ids=[ask.image_ids[index] for index in asked],
    )
