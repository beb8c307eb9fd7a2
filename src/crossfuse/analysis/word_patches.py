"""Which image tokens show what a word names: labels for thresholds, precision and the alignment loss.

Labels come from boxes. A record says which characters of its prompt name an object and where the object is:
``meta={"spans": [{"start": 7, "end": 19, "box": [63, 44, 87, 68]}]}``, boxes in pixels of its (only) image, x to the
right, y down, the last pixel excluded; a name that several objects bear has one span for each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from crossfuse.analysis.patch_boxes import PatchBoxes, patch_boxes
from crossfuse.data.images import open_image
from crossfuse.data.records import Record
from crossfuse.fusions.anchors.explain import anchor_sequence
from crossfuse.fusions.anchors.user_text import find_words

SHOWN = 0.5


@dataclasses.dataclass(frozen=True, eq=False)
class WordPatches:
    """One sample: the words of its prompt that name something in the image, and the patches where that is."""

    columns: tuple[int, ...]  # K columns of input_ids
    token_ids: tuple[int, ...]
    shown: Tensor  # (K, M) bool: does image token m show what word k names?

    @property
    def chance(self) -> float:
        """The share of the image that a named object covers: what placing at random would hit."""
        return float(self.shown.float().mean()) if len(self.columns) else float("nan")


def scene_records(
    split: Any, count: int, seed: int = 0, kinds: Any = ("existence", "colour", "shape", "relation")
) -> Iterator[Record]:
    """Questions about rendered scenes with their spans and all objects of the scene, as records."""
    from crossfuse.data.questions import SceneQuestions

    for index, (image, question, scene) in enumerate(SceneQuestions(split, count, seed, kinds)):
        objects: Any = [{"name": item.name, "box": list(item.box)} for item in scene.objects]
        spans: Any = [{"start": s.start, "end": s.end, "box": list(s.box)} for s in question.spans]
        yield Record.of_question(
            f"scenes-{split}-{seed}-{index}",
            question.text,
            question.answer,
            [image],
            kind=question.kind,
            spans=spans,
            objects=objects,
        )


def word_patches(processor: Any, record: Record, ids: Tensor, grid: tuple[int, int]) -> WordPatches:
    """The labels of one record. ids (L,): its row of input_ids, padding and image placeholders included.

    An image token shows an object when at least half of its patch lies in the object's box; of a smaller object the
    patch that holds most of it. Raises ValueError where the prompt's words are not found in ``ids``.
    """
    spans: Any = record.meta.get("spans") or []
    if not spans or len(record.images) != 1:
        return WordPatches((), (), torch.zeros(0, grid[0] * grid[1], dtype=torch.bool))
    text = next(m.text for m in reversed(record.messages) if m.role == "user")
    boxes = patch_boxes(processor, open_image(record.images[0]).size, grid)
    rows: dict[int, Tensor] = {}
    for column, start, end in find_words(processor.tokenizer, text, ids.tolist()):
        for span in spans:
            if start < span["end"] and end > span["start"]:
                shown = patches_of(boxes, span["box"])
                rows[column] = rows[column] | shown if column in rows else shown
    columns = tuple(sorted(rows))
    stacked = torch.stack([rows[c] for c in columns]) if columns else torch.zeros(0, grid[0] * grid[1]).bool()
    return WordPatches(columns, tuple(int(ids[c]) for c in columns), stacked)


@torch.no_grad()
def labelled_cosines(model: Any, processor: Any, records: list[Record], batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(cosines, related): every pair of a naming word and an image token of its own sample.

    batch: ``Collator(processor, prompt_only=True)(records)``; one image a record.
    """
    sequence, _ = anchor_sequence(model, batch)
    cosines, related = [], []
    for row, image, record in with_images(records):
        grid = sequence.image_grids[image]
        if grid is None:
            raise ValueError("the image tokens of this model form no grid, so boxes cannot be placed on them")
        labels = word_patches(processor, record, sequence.input_ids[row], grid)
        if not labels.columns:
            continue
        unit = torch.nn.functional.normalize(sequence.embeds[row].float(), dim=-1)
        cosines.append((unit[torch.tensor(labels.columns)] @ unit[sequence.is_image[row]].T).flatten().cpu())
        related.append(labels.shown.flatten())
    if not cosines:
        raise ValueError("no record names an object with its box; give records with meta spans")
    return torch.cat(cosines), torch.cat(related)


def with_images(records: list[Record]) -> Iterator[tuple[int, int, Record]]:
    """(row, index of its first image in the batch, record) of the records that have an image."""
    image = 0
    for row, record in enumerate(records):
        if record.images:
            yield row, image, record
        image += len(record.images)


def patches_of(boxes: PatchBoxes, box: list[float]) -> Tensor:
    rows, columns = boxes.grid
    covered = torch.zeros(rows, columns)
    for row in range(rows):
        for column in range(columns):
            left, top, right, bottom = boxes.box(row, column)
            width = max(min(right, box[2]) - max(left, box[0]), 0)
            height = max(min(bottom, box[3]) - max(top, box[1]), 0)
            area = (right - left) * (bottom - top)
            covered[row, column] = width * height / area if area > 0 else 0
    shown = covered >= SHOWN
    if not bool(shown.any()) and float(covered.max()) > 0:
        shown = covered == covered.max()
    return shown.flatten()
