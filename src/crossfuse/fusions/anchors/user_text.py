"""Which tokens are the user's own words: the narrowest choice of candidates for anchors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def user_text_mask(processor: Any, messages: Sequence[Any], input_ids: Tensor) -> Tensor:
    """(B, L) bool for ``anchor_mask=``: True at the words of the user's messages, not at template, system or answers.

    messages: one conversation a row in the form of a chat template (``[{"role": "user", "content": [{"type": "text",
    "text": ...}, ...]}, ...]``; content may be a string), a single one for one row; input_ids (B, L): what the
    processor made of them. Raises ValueError where the rows differ in number or a message is not found in its row.
    """
    rows = [messages] if messages and isinstance(messages[0], dict) else list(messages)
    if len(rows) != len(input_ids):
        raise ValueError(f"one conversation a row: got {len(rows)} conversations for {len(input_ids)} rows")
    mask = torch.zeros_like(input_ids, dtype=torch.bool)
    for row, conversation in enumerate(rows):
        ids = input_ids[row].tolist()
        for message in conversation:
            if message["role"] != "user":
                continue
            content = message["content"]
            parts = [content] if isinstance(content, str) else [p["text"] for p in content if p.get("type") == "text"]
            for text in parts:
                if text.strip():
                    mask[row, [column for column, _, _ in find_words(processor.tokenizer, text, ids)]] = True
    return mask


def find_words(tokenizer: Any, text: str, ids: list[int]) -> list[tuple[int, int, int]]:
    """(column, first character, end) of the tokens of ``text`` inside a longer row of ids, at its last place there.

    ValueError where it is not found.
    """
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    wanted, offsets = encoded["input_ids"], encoded["offset_mapping"]
    # The first token may have merged with what the template writes before it (a blank), the last with what follows.
    for first, last in ((0, len(wanted)), (1, len(wanted)), (0, len(wanted) - 1), (1, len(wanted) - 1)):
        part = wanted[first:last]
        for start in range(len(ids) - len(part), -1, -1) if part else ():
            if ids[start : start + len(part)] == part:
                return [(start + n, *offsets[first + n]) for n in range(len(part))]
    raise ValueError(f"the prompt {text!r} was not found among the tokens of its row; was another template used?")
