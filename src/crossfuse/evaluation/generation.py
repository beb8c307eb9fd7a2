"""Batched answers to records, in order, with left padding; resumable from the disk."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from PIL import Image

from crossfuse.data.collate import Collator
from crossfuse.data.records import Record
from crossfuse.devices import on_device_of
from crossfuse.evaluation.predictions import PredictionFile, RunSettings


def answer(
    model: Any,
    processor: Any,
    records: Sequence[Record],
    *,
    max_new_tokens: int = 64,
    batch_size: int = 32,
    progress: Callable[[int], None] | None = None,
    **decoding: Any,
) -> list[str]:
    """The model's answers in the order of `records`, without special tokens and surrounding blanks.

    A record's own last answer is left out of the prompt. Batches hold samples of like length and are padded on the left
    whatever the tokenizer's setting, since generation goes on from the last position; in float32 the answers do not
    depend on the batch size.

    Args:
        progress: called with the number of answers that each batch adds.
        decoding: arguments of `model.generate`; greedy by default.

    Raises:
        ValueError: a batch size below 1, an image that cannot be opened, or a reserved string in a prompt.
    """
    answers: dict[int, str] = {}
    for batch in _batches(list(enumerate(records)), batch_size, processor):
        texts = _answer_batch(model, processor, [r for _, r in batch], {"max_new_tokens": max_new_tokens} | decoding)
        answers |= {index: text for (index, _), text in zip(batch, texts, strict=True)}
        if progress is not None:
            progress(len(batch))
    return [answers[index] for index in range(len(records))]


def predict(
    model: Any,
    processor: Any,
    records: Sequence[Record],
    file: PredictionFile,
    *,
    progress: Callable[[int], None] | None = None,
) -> list[str]:
    """Answers in the order of `records`; those that `file` holds already are not asked again.

    Decoding and batch size are those of the file's settings. Every finished batch is on disk before the next starts.
    """
    with file:
        return ask_missing(model, processor, records, file, progress=progress)


def ask_missing(
    model: Any,
    processor: Any,
    records: Sequence[Record],
    file: PredictionFile,
    *,
    decoding: dict[str, Any] | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[str]:
    """As `predict`, with a file that is open for appending; `decoding` in place of that of its settings."""
    missing = [record for record in records if file.answered(record.id, prompt_text(record)) is None]
    if progress is not None:
        progress(len(records) - len(missing))
    for batch in _batches(list(enumerate(missing)), file.settings.batch_size, processor):
        asked = [record for _, record in batch]
        answers = _answer_batch(model, processor, asked, decoding or file.settings.decoding)
        file.append((r.id, prompt_text(r), a) for r, a in zip(asked, answers, strict=True))
        if progress is not None:
            progress(len(batch))
    return [str(file.answered(record.id, prompt_text(record))) for record in records]


def prompt_text(record: Record) -> str:
    """What the record asks, without a last answer: one line a message."""
    messages = record.messages[:-1] if record.answer is not None else record.messages
    return "\n".join(message.text for message in messages)


def run_settings(model: Any, name: str, *, batch_size: int, max_new_tokens: int) -> RunSettings:
    """The settings that each line of a prediction file records, read off the model (fused or not); greedy decoding."""
    from crossfuse import fusion_of

    fusion = fusion_of(model)
    return RunSettings(
        model=name,
        fusion={"name": "none"} if fusion is None else fusion.to_dict(),
        decoding={"do_sample": False, "num_beams": 1, "max_new_tokens": max_new_tokens},
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        attn_implementation=str(model.config.get_text_config()._attn_implementation),
        batch_size=batch_size,
    )


def _batches(
    numbered: Sequence[tuple[int, Record]], size: int, processor: Any
) -> Iterator[Sequence[tuple[int, Record]]]:
    """Batches of samples of like length, the longest first: little padding, and a lack of memory shows at once."""
    if size < 1:
        raise ValueError(f"batch_size must be at least 1; got {size}")
    if size > 1:
        lengths = {index: _length(record, processor) for index, record in numbered}
        numbered = sorted(numbered, key=lambda item: lengths[item[0]], reverse=True)
    for start in range(0, len(numbered), size):
        yield numbered[start : start + size]


def _length(record: Record, processor: Any) -> tuple[int, int, int]:
    """What a sample's length goes by: number of images, their pixels (their headers are read), tokens of the text."""
    pixels = sum(map(_pixels, record.images))
    return len(record.images), pixels, len(processor.tokenizer(prompt_text(record)).input_ids)


def _pixels(image: str | bytes | Image.Image) -> int:
    if isinstance(image, Image.Image):
        return image.width * image.height
    try:
        with Image.open(io.BytesIO(image) if isinstance(image, bytes) else image) as opened:
            return opened.width * opened.height
    except (OSError, ValueError):
        return 0  # told with the sample's id when it is its turn to be asked


@torch.inference_mode()
def _answer_batch(model: Any, processor: Any, records: Sequence[Record], decoding: dict[str, Any]) -> list[str]:
    inputs = on_device_of(model, Collator(processor, prompt_only=True)(records))
    tokens = model.generate(**inputs, **({"do_sample": False} | decoding))
    new = tokens[:, inputs["input_ids"].shape[1] :]
    return [text.strip() for text in processor.tokenizer.batch_decode(new, skip_special_tokens=True)]
