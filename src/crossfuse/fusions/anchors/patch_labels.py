"""Words for image patches without boxes: a CLIP-type model compares each patch with a list of words, as SEA does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import normalize

from crossfuse.data.images import open_image
from crossfuse.data.records import Record


class ClipLabeller:
    """(patch, word) pairs of a record's image, by a CLIP-type model; each record is looked at once.

    words: at least 2; a patch takes the likeliest where its share of the softmax is at least ``least``.
    """

    def __init__(self, model: Any, processor: Any, words: Sequence[str], least: float = 0.5) -> None:
        if len(words) < 2:
            raise ValueError(f"patches are told apart by at least 2 words; got {len(words)}")
        self.model, self.processor, self.words, self.least = model, processor, tuple(words), least
        self._known: dict[tuple[str, tuple[int, int]], list[list[Any]]] = {}

    @classmethod
    def load(cls, source: str, words: Sequence[str], least: float = 0.5) -> ClipLabeller:
        """From a directory or hub id of a CLIP checkpoint (`CLIPModel` and its processor)."""
        from transformers import CLIPModel, CLIPProcessor

        return cls(CLIPModel.from_pretrained(source).eval(), CLIPProcessor.from_pretrained(source), words, least)

    def __call__(self, record: Record, grid: tuple[int, int]) -> list[list[Any]]:
        key = (record.id, grid)
        if key not in self._known:
            image = open_image(record.images[0])
            self._known[key] = clip_patch_words(self.model, self.processor, image, self.words, grid, self.least)
        return self._known[key]


@torch.no_grad()
def clip_patch_words(
    label_model: Any, label_processor: Any, image: Any, words: Sequence[str], grid: tuple[int, int], least: float = 0.5
) -> list[list[Any]]:
    """(patch, word) pairs from a CLIP-type model, for ``meta["patch_words"]``, as SEA labels patches without boxes.

    Each patch takes its most likely word of the list where the softmax over the list (at the model's own temperature)
    is at least ``least``; the label model's patch grid is laid over ``grid``. label_model: has ``vision_model``,
    ``visual_projection`` and ``get_text_features`` (`CLIPModel`).
    """
    if len(words) < 2:
        raise ValueError(f"patches are told apart by at least 2 words; got {len(words)}")
    vision = label_model.vision_model(**label_processor.image_processor(images=image, return_tensors="pt"))
    patches = label_model.visual_projection(label_model.vision_model.post_layernorm(vision.last_hidden_state[0, 1:]))
    text = label_model.get_text_features(**label_processor.tokenizer(list(words), padding=True, return_tensors="pt"))
    text = getattr(text, "pooler_output", text)
    scores = (normalize(patches, dim=-1) @ normalize(text, dim=-1).T) * label_model.logit_scale.exp()
    chance = scores.softmax(-1)
    side = round(len(patches) ** 0.5)
    rows = (torch.arange(grid[0]) * 2 + 1) * side // (2 * grid[0])
    columns = (torch.arange(grid[1]) * 2 + 1) * side // (2 * grid[1])
    place = (rows[:, None] * side + columns).flatten()
    best = chance[place].max(-1)
    pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    return [[patch, words[word]] for patch, (value, word) in enumerate(pairs) if value >= least]
