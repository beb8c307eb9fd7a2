"""Rendered scenes as a data set: questions with one right answer, drawn when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from crossfuse.data.formats.base import Format, Notes, Reading
from crossfuse.data.records import Record

SCENE_KINDS = ("existence", "colour", "shape", "count", "relation")
SCENES_DEFAULT = 20_000


class SceneRows(Sequence[dict[str, Any]]):
    """Rows ``{"id", "image", "question", "answer", "kind"}`` of rendered scenes, drawn when asked for."""

    def __init__(self, split: str, size: int, seed: int) -> None:
        from crossfuse.data.questions import SceneQuestions

        self.split, self.size, self.seed = split, size, seed
        self._questions = SceneQuestions(split, size, seed=seed, kinds=SCENE_KINDS)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        image, question, _ = self._questions[index]
        return {
            "id": f"scenes-{self.split}-{self.seed}-{index}",
            "image": image,
            "question": question.text,
            "answer": question.answer,
            "kind": question.kind,
        }


def _matches(row: Any) -> bool:
    """Never: these rows lie in no file."""
    return False


def _convert(row: Any, index: int, reading: Reading, notes: Notes) -> Record:
    return Record.of_question(row["id"], row["question"], row["answer"], [row["image"]], kind=row["kind"])


FORMAT = Format(
    name="scenes",
    title="rendered scenes",
    source="crossfuse.data.scenes",
    matches=_matches,
    convert=_convert,
)
