"""Tells anchors where the prompt ends, for trainers that do not hand the labels to the model (TRL's)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class PromptCollator:
    """A collator whose batches hold ``prompt_mask`` and ``answer_starts`` (B, L) beside the labels they come from.

    ::

        trainer = SFTTrainer(model=crossfuse.fuse(model, crossfuse.TextAnchors()), ...)
        trainer.data_collator = PromptCollator(trainer.data_collator)

    The labels must leave the prompt out (prompt-completion data): where every token is supervised there is no prompt,
    and nothing is copied.
    """

    def __init__(self, collator: Callable[[list[Any]], Any]) -> None:
        self.collator = collator

    def __call__(self, examples: list[Any]) -> Any:
        from crossfuse.prompt import answer_starts, prompt_before_labels

        batch = self.collator(examples)
        batch["prompt_mask"] = prompt_before_labels(batch["labels"], batch.get("segment_ids"))
        batch["answer_starts"] = answer_starts(batch["labels"])
        return batch
