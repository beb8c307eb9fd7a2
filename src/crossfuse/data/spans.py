"""Where the assistant speaks in the text that a chat template renders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SupervisedText:
    """The rendered conversation and the (start, end) character spans of the assistant's words with their stop token."""

    text: str
    spans: tuple[tuple[int, int], ...]


def render_supervised(processor: Any, messages: list[dict[str, Any]], prompt_only: bool = False) -> SupervisedText:
    """Render a conversation and find the assistant's spans by rendering its beginnings.

    The text up to an answer is rendered with the template's own opening of an answer; what the next message adds to
    it is the answer and its stop token. So it does not matter what the answer says: it may repeat the question or
    the name of a role. What a template writes after the stop token (a line break) is not part of the span. A
    template that writes no stop token gets the tokenizer's eos after a last answer. An empty answer has no span.

    Raises ``ValueError`` where the template renders a conversation differently once it goes on, and where the
    assistant speaks first.
    """
    if prompt_only:
        return SupervisedText(_render(processor, messages, True), ())
    whole = _render(processor, messages, False)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if i == 0:
            raise ValueError("the assistant speaks first; a conversation begins with the system or the user")
        before = _render(processor, messages[:i], True)
        through = whole if i + 1 == len(messages) else _render(processor, messages[: i + 1], False)
        start, end = _common(before, through), len(through)
        if start < len(before.rstrip()) or not whole.startswith(through.rstrip()):
            raise ValueError(
                f"the chat template renders message {i + 1} differently once the conversation goes on, so the "
                "assistant's words cannot be found in it; use one conversation a record"
            )
        answer = "".join(part["text"] for part in message["content"] if part["type"] == "text")
        if not answer.strip():
            continue
        stop = _after_stop(processor.tokenizer, whole, start, end, answer)
        end = len(through.rstrip()) if stop is None else stop
        if stop is None and i + 1 == len(messages):
            whole = whole[:end] + processor.tokenizer.eos_token
            end = len(whole)
        spans.append((start, end))
    return SupervisedText(whole, tuple(spans))


def _render(processor: Any, messages: list[dict[str, Any]], opening: bool) -> str:
    text: str = processor.apply_chat_template(messages, add_generation_prompt=opening, tokenize=False)
    return text


def _common(a: str, b: str) -> int:
    """Length of the common beginning (an opening may end in a blank that the answer's rendering lacks)."""
    if b.startswith(a):
        return len(a)
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _after_stop(tokenizer: Any, text: str, start: int, end: int, answer: str) -> int | None:
    """End of the first special token after the answer's words, or None where the template writes none."""
    words = text.find(answer.strip(), start, end)
    search = words + len(answer.strip()) if words >= 0 else start
    found = [
        (place, place + len(token))
        for token in tokenizer.all_special_tokens
        if (place := text.find(token, search, end)) >= 0
    ]
    return min(found)[1] if found else None
