"""Batches of records in two layouts: the chat template, and the stream of frames and words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from crossfuse.data.collate import IGNORE_INDEX, CollationReport, Collator, NoUsableRecordError
from crossfuse.data.records import Record
from crossfuse.data.stream_collate import ReservedTextError, StreamCollator, StreamLayout, StreamTooLongError
from crossfuse.data.streams import StreamRecord, UnopenedStream
from crossfuse.training.batches import join_batches

Layout = Literal["chat", "stream"]


class LaidOut(Sequence[Any]):
    """A data set whose records are marked for their layout: `Record` (chat), `UnopenedStream` or `StreamRecord`.

    layout: None: a record whose words have times is a stream, every other one a chat.
    """

    def __init__(self, records: Any, layout: Layout | None) -> None:
        self.records, self.layout = records, layout

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        item = self.records[index]
        if not isinstance(item, Record):
            return item
        spoken = self.layout == "stream" or (self.layout is None and item.meta.get("words") is not None)
        return UnopenedStream(item) if spoken else item


class LayoutCollator:
    """Turns items of `LaidOut` sets into one batch, whatever their layouts: the chats first, then the streams.

    A batch of which nothing can be used (counted, where the chat collator skips) is the batch before it without its
    labels, so that every process goes on with the same number of forward passes; ValueError where there is none.

    Args:
        collator: of chats; what it does with bad media and with records that are too long holds for streams too.
        layout: the tokens of streams; None refuses streams, because the collator adds what only chats have.
    """

    def __init__(self, collator: Any, layout: StreamLayout | None) -> None:
        self.collator, self.layout = collator, layout
        self._streams: StreamCollator | None = None
        self._last: dict[str, Any] | None = None

    @property
    def chat(self) -> Collator:
        """The collator of chats itself, without what may be wrapped around it."""
        return getattr(self.collator, "collator", self.collator)  # type: ignore[no-any-return]

    @property
    def streams(self) -> StreamCollator:
        """Made when the first stream comes. ValueError where silence or end is not one token of the model."""
        if self.layout is None:
            raise ValueError(
                "the data hold streams of words with times, which carry no alignment labels; set alignment_weight to 0 "
                "or the layout of the data to chat"
            )
        if self._streams is None:
            self._streams = StreamCollator(self.chat.processor, self.layout, self.chat.max_length)
        return self._streams

    @property
    def report(self) -> CollationReport:
        """Of all records, streams included."""
        return self.chat.report

    def __call__(self, items: Sequence[Any]) -> dict[str, Any]:
        chats = [item for item in items if isinstance(item, Record)]
        spoken = [item for item in items if not isinstance(item, Record)]
        batches, reason = [], None
        if chats:
            try:
                batches.append(self.collator(chats))
            except NoUsableRecordError as error:
                reason = error
        batches += [batch for item in spoken if (batch := self._stream(item)) is not None]
        if batches:
            tokenizer = self.chat.processor.tokenizer
            pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
            self._last = join_batches(batches, {"input_ids": pad})
            return self._last
        if self._last is None:
            raise reason or NoUsableRecordError(
                f"no record of this batch could be used ({self.report}); check the data or a larger batch"
            )
        unlabelled = torch.full_like(self._last["labels"], IGNORE_INDEX)
        return {k: v for k, v in self._last.items() if k not in self.chat.keep} | {"labels": unlabelled}

    def _stream(self, item: StreamRecord | UnopenedStream) -> dict[str, Any] | None:
        """The batch of one stream; None where it is left out and counted."""
        self.report.seen += 1
        streams = self.streams
        keep = {name: [item.id] for name in self.chat.keep if name == "id"}
        try:
            record = item if isinstance(item, StreamRecord) else item.open(self.chat.video, self._stride)
            return streams([record]) | keep
        except StreamTooLongError:
            if self.chat.on_overflow == "raise":
                raise
            self.report.too_long.append(item.id)
        except (OSError, ValueError) as error:
            if self.chat.on_bad_image == "raise":
                raise ValueError(f"record {item.id!r}: {error}") from error
            kind = self.report.bad_text if isinstance(error, ReservedTextError) else self.report.bad_image
            kind.append(item.id)
        return None

    @property
    def _stride(self) -> int:
        """Pixels (one side) of an image token; the frames of a stream are images each, whatever the processor takes."""
        images = self.chat.processor.image_processor
        patch, merge = getattr(images, "patch_size", None), getattr(images, "merge_size", None)
        return patch * merge if isinstance(patch, int) and isinstance(merge, int) else 1
