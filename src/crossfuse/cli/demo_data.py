"""Questions that the demo trains on and scores: rendered scenes, or the public easy-VQA set."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any, Literal

from PIL import Image

from crossfuse.evaluation.comparison import ScoredQuestion

DataName = Literal["scenes", "easy-vqa"]
SCENE_KINDS = ("existence", "colour", "shape", "count", "relation")


@dataclasses.dataclass(frozen=True)
class Sample:
    """An image, a question about it and the right answer."""

    image: Image.Image
    prompt: str
    answer: str


class Samples(Sequence[Sample]):
    """`count` samples made one at a time by `make(index)`."""

    def __init__(self, count: int, make: Callable[[int], Sample]) -> None:
        self._count = count
        self._make = make

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index):  # type: ignore[no-untyped-def, override]
        return (
            [self._make(i) for i in range(*index.indices(self._count))]
            if isinstance(index, slice)
            else self._make(index)
        )


@dataclasses.dataclass(frozen=True)
class DemoData:
    """Training samples, and scored questions (a sample of `scored` each, whose image is in no training sample)."""

    description: str
    train: Sequence[Sample]
    scored: Sequence[Sample]
    questions: Sequence[ScoredQuestion]
    image_ids: Sequence[object]


def demo_data(name: DataName, *, train: int, scored: int, seed: int) -> DemoData:
    """The data set called `name`; `ImportError` with the remedy where easy-VQA is not installed."""
    return _scenes(train, scored, seed) if name == "scenes" else _easy_vqa(train, scored, seed)


def _scenes(train: int, scored: int, seed: int) -> DemoData:
    from crossfuse.data.questions import SceneQuestions

    learn = SceneQuestions("train", train, seed=seed, kinds=SCENE_KINDS)
    ask = SceneQuestions("test", scored, seed=seed, kinds=SCENE_KINDS)

    def sample(index: int) -> Sample:
        image, question, _ = learn[index]
        return Sample(image, question.text, question.answer)

    items = [ask[index] for index in range(scored)]
    return DemoData(
        description=(
            "rendered scenes of one to six coloured shapes; questions on "
            f"{', '.join(SCENE_KINDS[:-1])} and {SCENE_KINDS[-1]} in equal parts; training and test share no scene"
        ),
        train=Samples(train, sample),
        scored=[Sample(image, question.text, question.answer) for image, question, _ in items],
        questions=[
            ScoredQuestion(f"scenes-test-{seed}-{i}", question.text, question.answer, question.kind)
            for i, (_, question, _) in enumerate(items)
        ],
        image_ids=list(range(scored)),
    )


def _easy_vqa(train: int, scored: int, seed: int) -> DemoData:
    from crossfuse.data.easy_vqa import EasyVQA

    learn, ask = EasyVQA("train"), EasyVQA("test")
    rng = random.Random(seed)
    learned = rng.sample(range(len(learn)), min(train, len(learn)))
    asked = rng.sample(range(len(ask)), min(scored, len(ask)))

    def sample(index: int) -> Sample:
        item = learn[learned[index]]
        return Sample(item.image, item.question, item.answer)

    items = [ask[index] for index in asked]
    return DemoData(
        description=f"easy-VQA: {len(asked):,} questions drawn at random from its {len(ask):,} test questions",
        train=Samples(len(learned), sample),
        scored=[Sample(item.image, item.question, item.answer) for item in items],
        questions=[
            ScoredQuestion(f"easy-vqa-test-{index}", item.question, item.answer, item.kind)
            for index, item in zip(asked, items, strict=True)
        ],
        image_ids=[item.image_id for item in items],
    )


def training_collator(processor: Any) -> Callable[[list[Sample]], dict[str, Any]]:
    """Model inputs with labels on the answer and its end token alone."""

    def prompt_and_answer(sample: Sample) -> list[dict[str, Any]]:
        content = [{"type": "image"}, {"type": "text", "text": sample.prompt}]
        return [{"role": "user", "content": content}, {"role": "assistant", "content": sample.answer}]

    def collate(rows: list[Sample]) -> dict[str, Any]:
        texts = [processor.apply_chat_template(prompt_and_answer(r)) for r in rows]
        pre = [processor.apply_chat_template(prompt_and_answer(r)[:1], add_generation_prompt=True) for r in rows]
        processor.tokenizer.padding_side = "right"
        batch = dict(processor(images=[[r.image] for r in rows], text=texts, padding=True, return_tensors="pt"))
        labels = batch["input_ids"].clone()
        labels[batch["attention_mask"] == 0] = -100
        for i, (row, text) in enumerate(zip(rows, pre, strict=True)):
            labels[i, : processor(images=[row.image], text=[text], return_tensors="pt")["input_ids"].shape[1]] = -100
        return batch | {"labels": labels}

    return collate
