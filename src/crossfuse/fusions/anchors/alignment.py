"""The alignment loss: pulls an image token towards the embedding of the word that names what is there.

AttAnchor's future work, after SEA: anchors find their place by cosine, so image tokens and word embeddings should agree
before anything is copied. The loss is contrastive in both directions: which word names this image token, and which
image tokens show this word. Labels are (image token, word) pairs from boxes (`meta["objects"]` or `meta["spans"]` of a
record), from the user, or from a CLIP-type model's own patch-word cosines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, normalize
from torch.nn.utils.rnn import pad_sequence

from crossfuse.data.collate import Collator
from crossfuse.data.images import open_image
from crossfuse.data.records import Record
from crossfuse.fusions.anchors.patch_labels import ClipLabeller

TEMPERATURE = 0.07


def alignment_loss(
    image_tokens: Tensor, words: Tensor, named: Tensor, sizes: Sequence[int], temperature: float = TEMPERATURE
) -> Tensor:
    """Mean of two cross-entropies over cos / temperature.

    Words of a token: -log softmax over all words, averaged over those that name the token (colour and kind alike),
    over the tokens that have a name. Tokens of a word: -log of the share of the softmax over its *own image's* tokens
    that falls on those that show it, over the pairs of an image and a word that names something there. The anchor of a
    word is an argmax over its image's tokens, which only the second trains; unnamed tokens are its wrong answers.

    Args:
        image_tokens: (N, d), those of all images one after the other, any float dtype (cosines in float32).
        words: (W, d).
        named: (N, W) bool; all False for tokens without a name.
        sizes: tokens of each image, N in sum.

    Returns:
        A scalar; gradients flow to both sides.

    Raises:
        ValueError: no token is named at all, or `sizes` do not add up to N.
    """
    if sum(sizes) != len(image_tokens):
        raise ValueError(f"images of {sum(sizes)} tokens in sum do not hold the {len(image_tokens)} tokens given")
    has_name = named.any(1)
    if not bool(has_name.any()):
        raise ValueError("the alignment loss needs at least one image token with a word that names it")
    logits = normalize(image_tokens.float(), dim=-1) @ normalize(words.float(), dim=-1).T / temperature
    likelihood, names = log_softmax(logits[has_name], dim=-1), named[has_name]
    words_of_token = -(likelihood * names).sum(1).div(names.sum(1)).mean()
    by_image = pad_sequence(logits.split(list(sizes)), batch_first=True, padding_value=-torch.inf)
    shown = pad_sequence(named.split(list(sizes)), batch_first=True)
    pairs = shown.any(1)  # (images, W)
    of_pairs, shown = by_image.transpose(1, 2)[pairs], shown.transpose(1, 2)[pairs]
    hit = of_pairs.masked_fill(~shown, -torch.inf).logsumexp(1)
    tokens_of_word = (of_pairs.logsumexp(1) - hit).mean()
    return (words_of_token + tokens_of_word) / 2


@dataclasses.dataclass
class AlignedCollator:
    """A collator whose batches carry alignment labels beside everything else.

    ``alignment_tokens`` (P,) long: image tokens by their place in reading order over the batch; ``alignment_words``
    (P, K) long: ids of the tokens that name each, -1 where there are fewer. Records without boxes or without an image
    add none.

    word_ids: further token ids that serve as wrong answers; by default only the words of the batch.
    labeller: names the patches of records that bring neither boxes nor pairs of their own.
    """

    collator: Collator
    word_ids: Sequence[int] = ()
    labeller: ClipLabeller | None = None

    def __call__(self, records: Sequence[Record]) -> dict[str, Any]:
        batch = self.collator(records)
        processor = self.collator.processor
        tokens: list[int] = []
        words: list[list[int]] = []
        start = image = 0
        placeholder = processor.image_token_id
        for row, record in enumerate(records):
            total = int((batch["input_ids"][row] == placeholder).sum())
            if len(record.images) == 1 and total:
                grid = image_grid(batch, processor, image, total)
                for patch, ids in named_patches(processor, record, grid, self.labeller).items():
                    tokens.append(start + patch)
                    words.append(sorted(ids))
            start += total
            image += len(record.images)
        if tokens:
            most = max(map(len, words))
            batch["alignment_tokens"] = torch.tensor(tokens)
            batch["alignment_words"] = torch.tensor([ids + [-1] * (most - len(ids)) for ids in words])
            batch["alignment_others"] = torch.tensor(sorted({*self.word_ids}), dtype=torch.long)
        return batch


def aligned_forward(model: Any, inputs: dict[str, Any], weight: float) -> Any:
    """One forward whose ``loss`` holds ``weight`` times the alignment loss (``alignment_loss``) beside the model's own.

    inputs: a batch of `AlignedCollator`. Images are encoded once. Words do not move: only the image side is pulled.
    """
    labels = {
        name: inputs[name] for name in ("alignment_tokens", "alignment_words", "alignment_others") if name in inputs
    }
    rest = {name: value for name, value in inputs.items() if name not in labels}
    if not labels or weight == 0:
        return model(**rest)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    body, backbone = base.model, _backbone(base)
    images = backbone.encode(body, None, rest)
    features = torch.cat(images.features)
    list_ids = torch.cat([labels["alignment_words"].flatten(), labels["alignment_others"]]).unique()
    list_ids = list_ids[list_ids >= 0]
    named = torch.zeros(len(features), len(list_ids), dtype=torch.bool, device=features.device)
    named[labels["alignment_tokens"]] = (labels["alignment_words"][:, :, None] == list_ids).any(1)
    words = body.get_input_embeddings()(list_ids).detach()
    pulled = alignment_loss(features, words, named, [len(image) for image in images.features])
    outputs = model(
        **{k: v for k, v in rest.items() if not k.startswith("pixel_values")},
        mm_encoder_outputs=images.as_encoder_outputs(),
    )
    outputs["alignment_loss"] = pulled
    outputs["loss"] = outputs["loss"] + weight * pulled
    return outputs


def named_patches(
    processor: Any, record: Record, grid: tuple[int, int], labeller: ClipLabeller | None = None
) -> dict[int, set[int]]:
    """Image token -> ids of the words that name what it shows, by the boxes of the record's ``meta``.

    ``meta["objects"]``: ``[{"name": "red circle", "box": [x0, y0, x1, y1]}]`` names everything in the image;
    ``meta["spans"]``: characters of the prompt that name an object; ``meta["patch_words"]``: ``[[patch, "word"], ...]``
    gives the pairs themselves. A record with none of the three is labelled by ``labeller``, where one is given.
    """
    from crossfuse.analysis.patch_boxes import patch_boxes
    from crossfuse.analysis.word_patches import patches_of

    tokenizer = processor.tokenizer
    found: dict[int, set[int]] = {}

    def add(patch: int, name: str) -> None:
        # As it stands in running text: many tokenizers write a word differently at the start of a line.
        found.setdefault(patch, set()).update(_tokens(tokenizer, f" {name}"))

    meta: Any = record.meta
    pairs = meta.get("patch_words") or []
    if labeller is not None and not any(name in meta for name in ("patch_words", "objects", "spans")):
        pairs = labeller(record, grid)
    for patch, word in pairs:
        if not 0 <= patch < grid[0] * grid[1]:
            raise ValueError(f"record {record.id!r} names patch {patch}, outside the grid of {grid[0]} x {grid[1]}")
        add(int(patch), str(word))
    objects = meta.get("objects")
    if objects is None:
        text = next(m.text for m in reversed(record.messages) if m.role == "user")
        objects = [{"name": text[s["start"] : s["end"]], "box": s["box"]} for s in meta.get("spans") or []]
    if objects:
        boxes = patch_boxes(processor, open_image(record.images[0]).size, grid)
        for item in objects:
            for patch in patches_of(boxes, item["box"]).nonzero()[:, 0].tolist():
                add(patch, item["name"])
    return found


def _tokens(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text without those of blanks alone."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return [i for i in ids if tokenizer.decode([i]).strip()]


def image_grid(batch: dict[str, Any], processor: Any, image: int, tokens: int) -> tuple[int, int]:
    """(rows, columns) of an image's tokens, from the processor's output; ValueError where they form no known grid."""
    if "image_grid_thw" in batch:
        merge = processor.image_processor.merge_size
        _, height, width = batch["image_grid_thw"][image].tolist()
        return height // merge, width // merge
    side = round(tokens**0.5)
    if side * side != tokens:
        raise ValueError(f"boxes need a grid of image tokens; {tokens} tokens are no square")
    return side, side


def _backbone(model: Any) -> Any:
    from crossfuse.api import fusion_of
    from crossfuse.backbones import backbone_for

    return model.model._backbone if fusion_of(model) is not None else backbone_for(model)
