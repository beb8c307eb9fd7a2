"""Records to model inputs with labels, through the processor's own chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from crossfuse.data.images import open_image
from crossfuse.data.media import MediaOpener, OpenedRecord
from crossfuse.data.records import Record
from crossfuse.data.spans import SupervisedText, render_supervised
from crossfuse.data.videos import VideoSampling

__all__ = ["IGNORE_INDEX", "CollationReport", "Collator", "NoUsableRecordError", "open_image"]

IGNORE_INDEX = -100
# Token-aligned outputs of processors, with what fills the padding.
_ALIGNED = {"attention_mask": 0, "token_type_ids": 0, "mm_token_type_ids": 0}

_Rows = list[dict[str, list[int]]]


class NoUsableRecordError(ValueError):
    """Every record of a batch had to be left out."""


@dataclass
class CollationReport:
    """What a collator has seen so far: how many records, and the ids of those that were not used as they are."""

    seen: int = 0
    unsupervised: list[str] = field(default_factory=list)
    too_long: list[str] = field(default_factory=list)
    bad_image: list[str] = field(default_factory=list)
    truncated: list[str] = field(default_factory=list)
    bad_text: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        cut = f", {len(self.truncated)} cut at max_length" if self.truncated else ""
        if self.bad_text:
            cut += f", {len(self.bad_text)} skipped for words that hold a reserved token"
        return (
            f"{self.seen} records: {len(self.unsupervised)} without a supervised token, "
            f"{len(self.too_long)} skipped as too long, {len(self.bad_image)} skipped for a bad image{cut}"
        )


@dataclass
class Collator:
    """Turn a list of `Record` into one batch.

    The batch has ``input_ids``, ``attention_mask`` and ``labels`` (B, L) int64, and what the processor makes of the
    images: ``pixel_values`` (images of the batch, C, H, W) float32 and the like. Labels hold exactly the assistant's
    tokens and the stop token after each; everything else is -100. The spans come from the rendered template and the
    tokenizer's offsets, and padding is masked by its place, so a pad token that is also the stop token is no trouble.
    Videos go to processors that take them as videos, to others as runs of images.

    Args:
        processor: a Hugging Face processor with a chat template and a fast tokenizer.
        max_length: most tokens a record may have, image tokens included. An image is never cut.
        on_overflow: a record that is too long raises ``ValueError``, is skipped and counted, or ("truncate") loses the
            text beyond ``max_length`` and is counted; where that would cut an image it is skipped and counted.
        on_bad_image: an image or video that cannot be opened (or that the processor or ``min_side`` refuses) raises
            ``ValueError``, or its record is skipped and counted.
        padding_side: "right" or "left"; by default right for training and left for prompts.
        prompt_only: leave the assistant's last message out and end with the template's opening of an answer: inputs
            for ``generate``, without labels.
        keep: names of ``meta`` values (or "id") that go into the batch as lists, such as ("answer", "kind").
        max_unsupervised: stop with ``ValueError`` where more than this share of at least 20 records has no
            supervised token: a sign that template and records do not fit.
        allow_urls: fetch images given as URLs.
        video: how videos become frames.
        min_side: images with a shorter side, in pixels, count as bad.
    """

    processor: Any
    max_length: int | None = None
    on_overflow: Literal["raise", "skip", "truncate"] = "raise"
    on_bad_image: Literal["raise", "skip"] = "raise"
    padding_side: Literal["left", "right"] | None = None
    prompt_only: bool = False
    keep: Sequence[str] = ()
    max_unsupervised: float = 0.5
    allow_urls: bool = False
    video: VideoSampling = field(default_factory=VideoSampling)
    min_side: int = 1
    report: CollationReport = field(default_factory=CollationReport)

    def __post_init__(self) -> None:
        if self.on_overflow not in ("raise", "skip", "truncate"):
            raise ValueError(f"on_overflow must be 'raise', 'skip' or 'truncate'; got {self.on_overflow!r}")
        if self.on_overflow == "truncate" and self.prompt_only:
            raise ValueError("on_overflow='truncate' would cut the question of a prompt; use 'raise' or 'skip'")
        if self.on_bad_image not in ("raise", "skip"):
            raise ValueError(f"on_bad_image must be 'raise' or 'skip'; got {self.on_bad_image!r}")
        if self.padding_side not in (None, "left", "right"):
            raise ValueError(f"padding_side must be 'left' or 'right'; got {self.padding_side!r}")
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"max_length must be at least 1; got {self.max_length}")
        if not getattr(self.processor.tokenizer, "is_fast", False):
            raise ValueError("labels need a fast tokenizer (one with offsets); load it with use_fast=True")

    def __call__(self, records: Sequence[Record]) -> dict[str, Any]:
        """One batch; `NoUsableRecordError` (a ``ValueError``) where every record had to be skipped."""
        opened = self._open(records)
        rows, tensors = self._encode(opened)
        fitting = [i for i, row in enumerate(rows) if self._fits(opened[i].record, row)]
        if len(fitting) < len(rows):
            opened = [opened[i] for i in fitting]
            rows, tensors = self._encode(opened)
        if self.on_overflow == "truncate" and self.max_length is not None:
            rows = [{name: values[: self.max_length] for name, values in row.items()} for row in rows]
        if not rows:
            raise NoUsableRecordError(
                f"no record of this batch could be used ({self.report}); check the data or a larger batch"
            )
        for item, row in zip(opened, rows, strict=True):
            if not self.prompt_only and all(label == IGNORE_INDEX for label in row["labels"]):
                self.report.unsupervised.append(item.record.id)
                self._stop_if_too_many()
        batch: dict[str, Any] = self._pad(rows)
        batch |= tensors
        kept = [item.record for item in opened]
        batch |= {name: [r.id if name == "id" else r.meta.get(name) for r in kept] for name in self.keep}
        return batch

    def _fits(self, record: Record, row: dict[str, list[int]]) -> bool:
        length = len(row["input_ids"])
        if self.max_length is None or length <= self.max_length:
            return True
        if self.on_overflow == "raise":
            raise ValueError(
                f"record {record.id!r} has {length} tokens, more than max_length={self.max_length}; "
                "raise max_length or skip such records with on_overflow='skip'"
            )
        if self.on_overflow == "truncate" and not self._placeholders() & set(row["input_ids"][self.max_length :]):
            self.report.truncated.append(record.id)
            return True
        self.report.too_long.append(record.id)
        return False

    def _placeholders(self) -> set[int]:
        names = (getattr(self.processor, name, None) for name in ("image_token", "video_token"))
        return {int(self.processor.tokenizer.convert_tokens_to_ids(name)) for name in names if name is not None}

    def _open(self, records: Sequence[Record]) -> list[OpenedRecord]:
        opener = MediaOpener(self.processor, self.video, self.allow_urls, self.min_side)
        opened = []
        for record in records:
            self.report.seen += 1
            try:
                opened.append(opener(record))
            except (OSError, ValueError) as error:
                if self.on_bad_image == "raise":
                    raise ValueError(f"record {record.id!r}: {error}") from error
                self.report.bad_image.append(record.id)
        return opened

    def _encode(self, opened: list[OpenedRecord]) -> tuple[_Rows, dict[str, Tensor]]:
        """Token rows in the order of the records, and the image tensors of all of them."""
        if not opened:
            return [], {}
        texts = []
        for item in opened:
            refuse_reserved(item.record, self.processor)
            try:
                texts.append(render_supervised(self.processor, self._messages(item), self.prompt_only))
            except ValueError as error:
                raise ValueError(f"record {item.record.id!r}: {error}") from error
        clips = [clip for item in opened for clip in item.clips]
        options: dict[str, Any] = {}
        if clips:
            # The frames were sampled already; the processor learns their rate for the positions in time.
            options["videos"] = [[np.asarray(frame) for frame in clip.frames] for clip in clips]
            options["video_metadata"] = [clip.metadata for clip in clips]
            options["do_sample_frames"] = False
        outputs = self.processor(
            text=[text.text for text in texts],
            images=[image for item in opened for image in item.images] or None,
            add_special_tokens=not starts_with_bos(texts[0].text, self.processor.tokenizer),
            padding=False,
            return_offsets_mapping=True,
            return_text_replacement_offsets=True,
            **options,
        )
        offsets = outputs.pop("offset_mapping")
        replaced = outputs.pop("text_replacement_offsets", None) or [[] for _ in opened]
        aligned = {name: outputs.pop(name) for name in ("input_ids", *_ALIGNED) if name in outputs}
        rows: _Rows = []
        for n, text in enumerate(texts):
            rows.append({name: list(values[n]) for name, values in aligned.items()})
            if not self.prompt_only:
                rows[n]["labels"] = _labels(rows[n]["input_ids"], offsets[n], text, replaced[n])
        return rows, {name: _stack(name, values) for name, values in outputs.items()}

    def _messages(self, item: OpenedRecord) -> list[dict[str, Any]]:
        answered = item.messages[-1]["role"] == "assistant"
        return item.messages[:-1] if self.prompt_only and answered else item.messages

    def _pad(self, rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        tokenizer = self.processor.tokenizer
        # Attention is what hides padding; the pad id only has to be a valid one.
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        fills = {"input_ids": pad, "labels": IGNORE_INDEX, **_ALIGNED}
        side = self.padding_side or ("left" if self.prompt_only else "right")
        longest = max(len(row["input_ids"]) for row in rows)
        batch = {}
        for name in rows[0]:
            padded = []
            for row in rows:
                fill = [fills[name]] * (longest - len(row[name]))
                padded.append(fill + row[name] if side == "left" else row[name] + fill)
            batch[name] = torch.tensor(padded)
        return batch

    def _stop_if_too_many(self) -> None:
        missing, seen = len(self.report.unsupervised), self.report.seen
        if seen >= 20 and missing > self.max_unsupervised * seen:
            raise ValueError(
                f"{missing} of {seen} records have no supervised token, more than max_unsupervised="
                f"{self.max_unsupervised}; check that their last message is the assistant's and not empty"
            )


def refuse_reserved(record: Record, processor: Any) -> None:
    """``ValueError`` where a text of the record holds the processor's placeholder or another special token.

    Such a string would be read as the token itself, and an image would be bound to the user's words.
    """
    tokenizer = processor.tokenizer
    reserved = {getattr(processor, name, None) for name in ("image_token", "video_token", "audio_token")}
    reserved |= set(tokenizer.all_special_tokens)
    for message in record.messages:
        words = message.text
        for string in sorted(filter(None, reserved)):
            if string in words:
                raise ValueError(
                    f"record {record.id!r}: the text holds {string!r}, which is reserved; remove it, and mark the "
                    "place of an image by an image part"
                )


def _labels(
    ids: list[int], offsets: list[tuple[int, int]], text: SupervisedText, replaced: list[dict[str, Any]]
) -> list[int]:
    """Labels of tokens whose characters lie within a supervised span.

    The spans are in the template's text, the offsets in the text with expanded image placeholders.
    """
    labels = [IGNORE_INDEX] * len(ids)
    for start, end in text.spans:
        growth = sum(
            len(item["replacement"]) - (item["span"][1] - item["span"][0])
            for item in replaced
            if item["span"][1] <= start
        )
        first, last = start + growth, end + growth
        for i, (a, b) in enumerate(offsets):
            # A token that only begins with the blank before the answer (sentencepiece) belongs to the answer.
            if a < last and b > first and b <= last and b > a:
                labels[i] = ids[i]
    return labels


def starts_with_bos(text: str, tokenizer: Any) -> bool:
    """Whether the template wrote the token that the tokenizer would otherwise put first."""
    return tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)


def _stack(name: str, values: Any) -> Tensor:
    if isinstance(values, Tensor):
        return values
    tensors = [torch.as_tensor(value) for value in values]
    shapes = sorted({tuple(tensor.shape) for tensor in tensors})
    if len(shapes) > 1:
        raise ValueError(f"{name} of this batch have the shapes {', '.join(map(str, shapes))}; use a batch size of 1")
    return torch.stack(tensors)
