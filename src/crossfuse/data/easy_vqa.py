"""The public easy-VQA data set (Victor Zhou): one flat shape on a light ground, 64 x 64 pixels, 13 answers.

The PyPI package ``easy-vqa`` holds 4,000 training pictures with 38,575 questions and 1,000 test pictures with 9,673.
Much of it can be guessed: the best guess from the question alone is right for about two thirds of the questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from PIL import Image

Part = Literal["train", "test"]


@dataclass(frozen=True)
class EasyVQAItem:
    """A question about a picture of 64 x 64 pixels (RGB); ``image_id`` is unique within its split."""

    image: Image.Image
    question: str
    answer: str
    image_id: int

    @property
    def kind(self) -> str:
        """``yes/no``, ``colour`` or ``shape``, by the answer."""
        return answer_kind(self.answer)


def answer_kind(answer: str) -> str:
    """``yes/no``, ``colour`` or ``shape``: what kind of question has this answer."""
    if answer in ("yes", "no"):
        return "yes/no"
    return "shape" if answer in ("circle", "rectangle", "triangle") else "colour"


class EasyVQA(Sequence[EasyVQAItem]):
    """Map-style dataset of one split, in the package's order.

    Raises ``ImportError`` naming ``pip install easy-vqa`` where the package is missing, ``ValueError`` for an
    unknown split.
    """

    def __init__(self, split: Part) -> None:
        if split not in ("train", "test"):
            raise ValueError(f"split must be 'train' or 'test'; got {split!r}")
        package = _package()
        read = package.get_train_questions if split == "train" else package.get_test_questions
        paths = package.get_train_image_paths if split == "train" else package.get_test_image_paths
        self.split: Part = split
        self.questions, self.answers, self.image_ids = read()
        self.paths: dict[int, str] = paths()

    def __len__(self) -> int:
        return len(self.questions)

    def __getitem__(self, index):  # type: ignore[no-untyped-def, override]
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        image_id = self.image_ids[index]
        with Image.open(self.paths[image_id]) as image:
            return EasyVQAItem(image.convert("RGB"), self.questions[index], self.answers[index], image_id)


def _package() -> Any:
    try:
        import easy_vqa
    except ImportError as error:
        raise ImportError("the easy-VQA data are not installed; run: pip install easy-vqa") from error
    return easy_vqa
