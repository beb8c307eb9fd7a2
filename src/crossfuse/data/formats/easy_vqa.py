"""easy-VQA, read from its package: 38,575 questions for training, 9,673 for testing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from crossfuse.data.easy_vqa import EasyVQA, answer_kind
from crossfuse.data.formats.base import Format, Notes, Reading
from crossfuse.data.records import Record


class EasyVQARows(Sequence[dict[str, Any]]):
    """easy-VQA's questions as rows ``{"id", "image" (a path), "question", "answer", "kind"}``."""

    def __init__(self, split: str) -> None:
        self._data = EasyVQA(split)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        data = self._data
        image_id, answer = data.image_ids[index], data.answers[index]
        return {
            "id": f"easy-vqa-{data.split}-{index % len(self)}",
            "image": str(data.paths[image_id]),
            "image_id": image_id,
            "question": data.questions[index],
            "answer": answer,
            "kind": answer_kind(answer),
        }


def _matches(row: Any) -> bool:
    """Never: these rows lie in no file."""
    return False


def _convert(row: Any, index: int, reading: Reading, notes: Notes) -> Record:
    return Record.of_question(
        row["id"], row["question"], row["answer"], [row["image"]], kind=row["kind"], image_id=row["image_id"]
    )


FORMAT = Format(
    name="easy-vqa",
    title="easy-VQA (package)",
    source="https://github.com/vzhou842/easy-VQA",
    matches=_matches,
    convert=_convert,
)
