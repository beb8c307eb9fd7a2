"""Batched answers to questions about images, in order, with left padding."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from crossfuse.evaluation.predictions import PredictionFile, RunSettings

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclasses.dataclass(frozen=True)
class Inquiry:
    """One question to a model. `image` is loaded when its batch is due: a set of any size fits in memory."""

    sample_id: str
    prompt: str
    image: Callable[[], Image] | None = None


def answer(
    model: Any,
    processor: Any,
    questions: Sequence[tuple[Image | None, str]],
    *,
    max_new_tokens: int = 64,
    batch_size: int = 32,
    **decoding: Any,
) -> list[str]:
    """Answers to (image, prompt) pairs, in their order, without special tokens and surrounding blanks.

    Batches are padded on the left whatever the tokenizer's setting, since generation goes on from the last
    position; in float32 the answers do not depend on the batch size. `decoding` goes to `model.generate`
    (greedy by default).

    Raises:
        ValueError: the batch size is below 1, a prompt is empty or holds the processor's image placeholder.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1; got {batch_size}")
    answers: list[str] = []
    for start in range(0, len(questions), batch_size):
        batch = questions[start : start + batch_size]
        answers += _answer_batch(
            model, processor, batch, {"do_sample": False, "max_new_tokens": max_new_tokens} | decoding
        )
    return answers


def predict(
    model: Any,
    processor: Any,
    inquiries: Sequence[Inquiry],
    file: PredictionFile,
    *,
    max_new_tokens: int = 64,
    progress: Callable[[int], None] | None = None,
) -> list[str]:
    """Answers in the order of `inquiries`; those that `file` holds already are not asked again.

    Every finished batch is on disk before the next one starts. `progress` is called with the number of
    answers that each step adds.
    """
    missing = [inquiry for inquiry in inquiries if file.answered(inquiry.sample_id, inquiry.prompt) is None]
    if progress is not None:
        progress(len(inquiries) - len(missing))
    size = file.settings.batch_size
    with file:
        for start in range(0, len(missing), size):
            batch = missing[start : start + size]
            pairs = [(None if i.image is None else i.image(), i.prompt) for i in batch]
            answers = answer(model, processor, pairs, max_new_tokens=max_new_tokens, batch_size=size)
            file.append((i.sample_id, i.prompt, a) for i, a in zip(batch, answers, strict=True))
            if progress is not None:
                progress(len(batch))
    return [str(file.answered(inquiry.sample_id, inquiry.prompt)) for inquiry in inquiries]


def run_settings(model: Any, name: str, *, batch_size: int, max_new_tokens: int) -> RunSettings:
    """The settings that each line of a prediction file records, read off the model (fused or not)."""
    from crossfuse import fusion_of

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    fusion = fusion_of(base)
    return RunSettings(
        model=name,
        fusion={"name": "none"} if fusion is None else fusion.to_dict(),
        decoding={"do_sample": False, "num_beams": 1, "max_new_tokens": max_new_tokens},
        dtype=str(next(base.parameters()).dtype).removeprefix("torch."),
        attn_implementation=str(base.config.get_text_config()._attn_implementation),
        batch_size=batch_size,
    )


def chat_prompt(processor: Any, prompt: str, *, images: int) -> str:
    """The user's words in the model's chat template, image slots first, ready for the answer.

    Raises:
        ValueError: the prompt is blank, or holds the string that stands for an image (it would take the
            image's slot).
    """
    if not prompt.strip():
        raise ValueError('the prompt is empty; ask something, as "what is in the image?"')
    placeholder = getattr(processor, "image_token", None)
    if placeholder and placeholder in prompt:
        raise ValueError(
            f"the prompt holds {placeholder!r}, which stands for an image in this model; write it differently, as "
            f"{placeholder.strip('<|>')!r}"
        )
    content = [{"type": "image"} for _ in range(images)] + [{"type": "text", "text": prompt}]
    text: str = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    return text


@contextlib.contextmanager
def left_padding(tokenizer: Any) -> Iterator[None]:
    """Pad on the left inside the block, and as before after it."""
    before = tokenizer.padding_side
    tokenizer.padding_side = "left"
    try:
        yield
    finally:
        tokenizer.padding_side = before


@torch.inference_mode()
def _answer_batch(
    model: Any, processor: Any, batch: Sequence[tuple[Image | None, str]], decoding: dict[str, Any]
) -> list[str]:
    texts = [chat_prompt(processor, prompt, images=0 if image is None else 1) for image, prompt in batch]
    images = [[image] for image, _ in batch if image is not None]
    with left_padding(processor.tokenizer):
        inputs = processor(images=images or None, text=texts, padding=True, return_tensors="pt").to(model.device)
    tokens = model.generate(**inputs, **decoding)
    new = tokens[:, inputs["input_ids"].shape[1] :]
    return [text.strip() for text in processor.batch_decode(new, skip_special_tokens=True)]
