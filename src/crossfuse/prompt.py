"""What must be known or refused before a call: the end of the prompt, padding sides, labels without a delimiter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from crossfuse.fusion import Fusion

_SEQUENCE_ALIGNED = (
    "attention_mask",
    "mm_token_type_ids",
    "token_type_ids",
    "anchor_mask",
    "prompt_mask",
    "segment_ids",
)


def prompt_before_labels(labels: Tensor, segment_ids: Tensor | None) -> Tensor:
    """(B, L) bool: everything before the first supervised label of the sample (of the segment in packed rows)."""
    answered = (labels != -100).cumsum(1)
    if segment_ids is None:
        return answered == 0
    before = torch.nn.functional.pad(segment_ids[:, :-1], (1, 0), value=-2)
    inherited = torch.where(segment_ids != before, answered - (labels != -100).long(), 0).cummax(1).values
    return answered == inherited


def answer_starts(labels: Tensor) -> Tensor:
    """(B, L) bool: the first supervised token of every answer."""
    supervised = labels != -100
    return supervised & ~torch.nn.functional.pad(supervised[:, :-1], (1, 0), value=False)


def check_pixels(pixel_values: Any, name: str = "pixel_values") -> None:
    """ValueError where an image (or what ``name`` holds) has NaN or infinite values."""
    if not isinstance(pixel_values, Tensor) or not pixel_values.is_floating_point():
        return
    finite = torch.isfinite(pixel_values)
    if not bool(finite.all()):
        first = int((~finite.flatten(1).all(1)).nonzero()[0])
        raise ValueError(f"{name}[{first}] holds NaN or infinite values; check how the input was decoded")


def check_supervision(
    input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None, placeholders: tuple[int, ...]
) -> None:
    """Cross-attention predicts a token from the text before it, so no label may follow an image directly."""
    image = torch.isin(input_ids, torch.tensor(placeholders, device=input_ids.device))
    direct = image[:, :-1] & ~image[:, 1:] & (labels[:, 1:] != -100)
    if attention_mask is not None and attention_mask.ndim == 2:
        direct &= attention_mask[:, 1:].bool()
    if bool(direct.any()):
        row, column = direct.nonzero()[0].tolist()
        raise ValueError(
            f"row {row}, token {column + 1}: supervised text directly after an image would be predicted from the text "
            "before the image; put a delimiter (a newline) between them or use gist_tokens=1"
        )


def check_generation_prompt(input_ids: Tensor, attention_mask: Tensor | None, placeholders: tuple[int, ...]) -> None:
    """The same rule for the first generated token."""
    last = torch.isin(input_ids[:, -1], torch.tensor(placeholders, device=input_ids.device))
    if attention_mask is not None:
        last &= attention_mask[:, -1].bool()
    if bool(last.any()):
        raise ValueError(
            f"row {int(last.nonzero()[0])}: the prompt ends with an image, so the first new token would be predicted "
            "from the text before it; end the prompt with a delimiter (a newline) or use gist_tokens=1"
        )


def left_pad(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Move padding to the left in every argument aligned with the tokens; ``generate`` goes on from the last column."""
    mask = kwargs.get("attention_mask")
    if mask is None or mask.ndim != 2 or bool(mask[:, -1].all()):
        return kwargs
    order = mask.bool().long().argsort(dim=1, stable=True)
    moved = dict(kwargs)
    for name in ("input_ids", *_SEQUENCE_ALIGNED):
        value = moved.get(name)
        if isinstance(value, Tensor) and value.shape == mask.shape:
            moved[name] = value.gather(1, order)
    position_ids = moved.get("position_ids")
    if isinstance(position_ids, Tensor):
        moved["position_ids"] = position_ids.gather(-1, order.expand_as(position_ids))
    return moved


def own_columns(mask: Tensor | None, past: int, length: int, name: str) -> Tensor | None:
    """The columns of this call out of a mask over the whole prompt; what lies after the prompt is False."""
    if mask is None:
        return None
    mask = mask.bool()
    if bool(mask[:, past + length :].any()):
        raise ValueError(
            f"the prompt of {mask.shape[1]} tokens ({name}) was split at {past + length}: anchors are decided once, "
            "over the whole prompt; use prefill_chunk_size=None"
        )
    part = mask[:, past : past + length]
    return torch.nn.functional.pad(part, (0, length - part.shape[1]), value=False)


def check_counts(is_image: Tensor, lengths: list[int]) -> None:
    """Placeholders and image tokens must agree; the message names the first row that does not."""
    total = int(is_image.sum())
    if total == sum(lengths):
        return
    ends = {0}
    for length in lengths:
        ends.add(max(ends) + length)
    counts = is_image.sum(1)
    row = next((i for i, end in enumerate(counts.cumsum(0).tolist()) if end not in ends), len(counts) - 1)
    raise ValueError(
        f"{total} image placeholders for {len(lengths)} images of {sum(lengths)} tokens (row {row} holds "
        f"{int(counts[row])} placeholders): give one image per placeholder, keep the placeholder string out of the "
        "text, and raise max_length where truncation cut an image"
    )


def refuse_reentrant(decoder: Any, fusion: Fusion) -> None:
    """ValueError where a block is checkpointed reentrantly: tensors in keyword arguments then get no gradient."""
    for layer in decoder.layers:
        if not getattr(layer, "gradient_checkpointing", False):
            continue
        options = getattr(layer._gradient_checkpointing_func, "keywords", {})
        if options.get("use_reentrant", True):
            raise ValueError(
                f"checkpointing with use_reentrant=True loses the gradients of the images in {fusion.name}; pass "
                "activation_checkpointing_kwargs={'use_reentrant': False}"
            )
