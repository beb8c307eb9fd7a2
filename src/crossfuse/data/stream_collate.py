"""Streams as batches: the tokens that a `StreamSession` would forward, and the labels of those that it should say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from crossfuse.data.collate import IGNORE_INDEX
from crossfuse.data.images import open_image
from crossfuse.data.streams import StreamRecord


class StreamTooLongError(ValueError):
    """A stream has more tokens than ``max_length``."""


class ReservedTextError(ValueError):
    """A text holds a token that has a meaning of its own in the layout."""


@dataclass(frozen=True)
class StreamLayout:
    """The tokens between frames and words, the same in training and in a session.

    silence: one token of the model that says "nothing".
    keep_silence: whether it stays in the stream. Without (the default) a silent frame costs its delimiter alone: the
        token is predicted after the delimiter and is no input of what follows.
    delimiter: text after every frame. ``""`` needs ``gist_tokens`` with cross-attention.
    end: one token after the words of a frame; None is the tokenizer's end-of-sequence token.
    """

    silence: str = "..."
    keep_silence: bool = False
    delimiter: str = "\n"
    end: str | None = None

    def silence_id(self, tokenizer: Any) -> int:
        """ValueError where silence is not one token of this model."""
        return _one_token(tokenizer, self.silence, "silence")

    def end_id(self, tokenizer: Any) -> int:
        """ValueError where the end is not one token of this model, or it has none."""
        if self.end is not None:
            return _one_token(tokenizer, self.end, "end")
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no end-of-sequence token; give end= another token")
        return int(tokenizer.eos_token_id)

    def session(self, model: Any, processor: Any, *, max_new_tokens: int = 32, **options: Any) -> Any:
        """A `StreamSession` that takes and says streams of this layout; ``options`` are the session's."""
        from crossfuse.streaming.sampling import Decoding
        from crossfuse.streaming.session import StreamSession

        decoding = Decoding(
            max_new_tokens=max_new_tokens,
            silence_token=self.silence_id(processor.tokenizer),
            keep_silence=self.keep_silence,
            stop_tokens=(self.end_id(processor.tokenizer),),
        )
        return StreamSession(model, processor, delimiter=self.delimiter, decoding=decoding, **options)


@dataclass
class StreamCollator:
    """Turn a list of `StreamRecord` into one batch.

    The batch has ``input_ids``, ``attention_mask`` and ``labels`` (B, L) int64, padded on the right, and what the
    processor makes of all frames: ``pixel_values`` (frames of the batch, C, H, W) float32 and the like. Labels hold the
    words, the token that ends them, silence and answers; all else is -100. Silence that is not kept is the label of the
    column after the delimiter, whose input is the next frame: the delimiter predicts it, nothing ever reads it.

    Args:
        processor: a Hugging Face processor with an image processor.
        layout: the tokens between frames and words.
        max_length: most tokens a stream may have, image tokens included. ValueError beyond it; nothing is cut.
        image_tokens: tokens of one frame; None asks the processor.
    """

    processor: Any
    layout: StreamLayout = field(default_factory=StreamLayout)
    max_length: int | None = None
    image_tokens: int | None = None

    def __post_init__(self) -> None:
        tokenizer = self.processor.tokenizer
        self._silence, self._end = self.layout.silence_id(tokenizer), self.layout.end_id(tokenizer)
        self._keeps_silence = self.layout.keep_silence
        # One token may stand for both; then words end in silence, which a session keeps or does not keep alike.
        self._keeps_end = self._end != self._silence or self._keeps_silence
        self._delimiter = self._tokens(self.layout.delimiter)
        self._placeholder = int(tokenizer.convert_tokens_to_ids(self.processor.image_token))
        opening = tokenizer("").input_ids
        self._bos: list[int] = list(opening) if opening == [tokenizer.bos_token_id] else []

    def __call__(self, records: Sequence[StreamRecord]) -> dict[str, Any]:
        images = [open_image(frame.image) for record in records for frame in record.frames]
        batch = dict(self.processor.image_processor(images=images, return_tensors="pt"))
        sizes = self._sizes(batch, len(images))
        rows, taken = [], 0
        for record in records:
            rows.append(self.tokens(record, sizes[taken : taken + len(record.frames)]))
            taken += len(record.frames)
        return self.padded(rows) | batch

    def tokens(self, record: StreamRecord, sizes: Sequence[int]) -> tuple[list[int], list[int]]:
        """(input ids, labels) of one stream; ``sizes`` are the image tokens of its frames."""
        row = _Row()
        opening = self._given(record, record.opening)
        if opening[: len(self._bos)] != self._bos:
            opening = self._bos + opening
        if opening != self._bos or not self._bos:
            row.given(opening)
        for frame, size in zip(record.frames, sizes, strict=True):
            row.given([self._placeholder] * size + self._delimiter)
            if frame.words is None:
                continue
            words = self._spoken(record, frame.words)
            if words:
                row.said(words)
                row.said([self._end], kept=self._keeps_end)
            else:
                row.said([self._silence], kept=self._keeps_silence)
        if record.question is not None and record.answer is not None:
            row.given(self._given(record, record.question))
            row.said(self._spoken(record, record.answer))
            row.said([self._end], kept=self._keeps_end)
        ids, labels = row.finished()
        if self.max_length is not None and len(ids) > self.max_length:
            raise StreamTooLongError(
                f"stream {record.id!r} has {len(ids)} tokens, more than max_length={self.max_length}; raise it, or "
                "take fewer frames"
            )
        return ids, labels

    def _sizes(self, batch: dict[str, Any], count: int) -> list[int]:
        if self.image_tokens is not None:
            return [self.image_tokens] * count
        grid = batch.get("image_grid_thw")
        if grid is not None:
            merge = int(getattr(self.processor.image_processor, "merge_size", 1))
            return [int(n) // merge**2 for n in torch.as_tensor(grid).prod(-1)]
        height, width = batch["pixel_values"].shape[-2:]
        patch = getattr(self.processor, "patch_size", None)
        if not patch:
            raise ValueError("this processor does not say how many tokens a frame has; give image_tokens")
        extra = int(getattr(self.processor, "num_additional_image_tokens", 0))
        if getattr(self.processor, "vision_feature_select_strategy", None) == "default":
            extra -= 1
        return [(height // patch) * (width // patch) + extra] * count

    def _given(self, record: StreamRecord, text: str) -> list[int]:
        return self._checked(record, text, {self._placeholder})

    def _spoken(self, record: StreamRecord, text: str) -> list[int]:
        # A session would end the words there.
        return self._checked(record, text, {self._placeholder, self._silence, self._end})

    def _checked(self, record: StreamRecord, text: str, reserved: set[int]) -> list[int]:
        ids = self._tokens(text)
        found = reserved & set(ids)
        if found:
            token = self.processor.tokenizer.convert_ids_to_tokens(min(found))
            raise ReservedTextError(
                f"stream {record.id!r}: the text {text[:40]!r} holds {token!r}, which is reserved in this layout; "
                "remove it, or choose another silence or end"
            )
        return ids

    def _tokens(self, text: str) -> list[int]:
        return list(self.processor.tokenizer(text, add_special_tokens=False).input_ids)

    def padded(self, rows: Sequence[tuple[list[int], list[int]]]) -> dict[str, Tensor]:
        """Rows of (ids, labels) as tensors, padded on the right."""
        tokenizer = self.processor.tokenizer
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self._end
        longest = max(len(ids) for ids, _ in rows)
        fills = [longest - len(ids) for ids, _ in rows]
        return {
            "input_ids": torch.tensor([ids + [pad] * n for (ids, _), n in zip(rows, fills, strict=True)]),
            "attention_mask": torch.tensor([[1] * len(ids) + [0] * n for (ids, _), n in zip(rows, fills, strict=True)]),
            "labels": torch.tensor([labels + [IGNORE_INDEX] * n for (_, labels), n in zip(rows, fills, strict=True)]),
        }


class _Row:
    """Input ids and labels side by side; what is said without trace waits to be the label of the next column."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.labels: list[int] = []
        self._unkept: int | None = None

    def given(self, ids: Sequence[int]) -> None:
        labels = [IGNORE_INDEX] * len(ids)
        if ids and self._unkept is not None:
            labels[0], self._unkept = self._unkept, None
        self.ids += ids
        self.labels += labels

    def said(self, ids: Sequence[int], kept: bool = True) -> None:
        if kept:
            self.ids += ids
            self.labels += ids
        else:
            (self._unkept,) = ids

    def finished(self) -> tuple[list[int], list[int]]:
        """At the end of the stream nothing follows that the token could disturb."""
        if self._unkept is not None:
            return [*self.ids, self._unkept], [*self.labels, self._unkept]
        return self.ids, self.labels


def _one_token(tokenizer: Any, text: str, name: str) -> int:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    if len(ids) != 1:
        raise ValueError(f"{name} must be one token of this model; {text!r} is {len(ids)}")
    return int(ids[0])
