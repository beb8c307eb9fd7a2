"""The mask of the user's own words."""

from __future__ import annotations

import pytest
import torch

import crossfuse as xf
from crossfuse.analysis.word_patches import scene_records
from crossfuse.data.collate import Collator


def test_only_the_users_words_are_true_and_only_they_get_anchors(embedded):
    model, processor = embedded
    records = list(scene_records("test", 4))
    batch = Collator(processor, prompt_only=True)(records)
    conversations = [
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": r.messages[0].text}]}]
        for r in records
    ]
    mask = xf.user_text_mask(processor, conversations, batch["input_ids"])
    for row, record in enumerate(records):
        words = processor.tokenizer.decode(batch["input_ids"][row, mask[row]])
        assert words.replace(" ", "") == record.messages[0].text.replace(" ", "")
    found = xf.calibrate_threshold(model, [{**batch, "anchor_mask": mask}], share=0.5)
    assert found.n_tokens == int(mask.sum())
    single = xf.user_text_mask(processor, conversations[0], batch["input_ids"][:1])
    assert torch.equal(single, mask[:1])


def test_what_does_not_fit_is_refused(embedded):
    processor, ids = embedded[1], torch.tensor([[5, 6, 7]])
    other = [{"role": "user", "content": "is there a red circle?"}, {"role": "assistant", "content": "yes"}]
    with pytest.raises(ValueError, match="was not found among the tokens of its row"):
        xf.user_text_mask(processor, other, ids)
    with pytest.raises(ValueError, match="got 2 conversations for 1 rows"):
        xf.user_text_mask(processor, [other, other], ids)
