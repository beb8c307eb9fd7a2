"""BERTScore (Zhang et al. 2020) by bert-score, with any local or hub encoder."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator, Sequence

from crossfuse.evaluation.benchmarks.base import Metric
from crossfuse.evaluation.text_metrics import version


def bertscore(
    predictions: Sequence[str], references: Sequence[Sequence[str]], model: str, layers: int | None = None
) -> dict[str, Metric]:
    """Mean precision, recall and F1, each sample against the reference with the best F1; no idf, not rescaled.

    An empty prediction scores 0 (the library would compare its special tokens). Texts longer than the model reads are
    cut, with a note. The variant holds the library's hash: model, layer, library and transformers versions.

    Raises:
        ValueError: a model that bert-score has no layer for, and no `layers`; and what loading the model raises.
    """
    with _quiet():
        from bert_score import BERTScorer

        try:
            scorer = BERTScorer(model_type=model, num_layers=layers, rescale_with_baseline=False)
        except KeyError as error:
            raise ValueError(
                f"bert-score has no default layer for {model!r}: give --bertscore-layers (`bertscore_layers` in Python)"
            ) from error
        limit = _read_at_most(scorer)
        # bert-score truncates by the tokenizer's limit, which some tokenizers state as 10^30.
        scorer._tokenizer.model_max_length = limit
        full = [place for place, text in enumerate(predictions) if text and any(references[place])]
        scores = dict.fromkeys(range(len(predictions)), (0.0, 0.0, 0.0))
        if full:
            known = [[text for text in references[place] if text] for place in full]
            parts = scorer.score([predictions[place] for place in full], known)
            for place, *triple in zip(full, *(part.tolist() for part in parts), strict=True):
                scores[place] = (triple[0], triple[1], triple[2])
    cut = sum(_tokens(scorer, text) > limit for text in (*predictions, *(t for each in references for t in each)))
    note = f"{cut} text(s) cut at {limit} tokens, what the model reads" if cut else None
    empty = len(predictions) - len(full)
    variant = f"mean over samples, best reference, no idf, not rescaled, {empty} empty scored 0; {scorer.hash}"
    names = ("bertscore_precision", "bertscore_recall", "bertscore")
    return {
        name: Metric(
            sum(triple[part] for triple in scores.values()) / len(scores),
            len(scores),
            f"BERTScore {('precision', 'recall', 'F1')[part]}, {variant}",
            "0-1",
            version("bert-score"),
            note,
        )
        for part, name in enumerate(names)
    }


def _read_at_most(scorer: object) -> int:
    """Tokens that the model reads: its position table, less what RoBERTa keeps for padding; at most its tokenizer's."""
    config = scorer._model.config  # type: ignore[attr-defined]
    positions = int(getattr(config, "max_position_embeddings", 512) or 512)
    if getattr(config, "model_type", "") in ("roberta", "xlm-roberta", "camembert"):
        positions -= int(config.pad_token_id) + 1
    return min(positions, int(scorer._tokenizer.model_max_length))  # type: ignore[attr-defined]


def _tokens(scorer: object, text: str) -> int:
    return len(scorer._tokenizer(text, truncation=False, verbose=False)["input_ids"])  # type: ignore[attr-defined]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Loading messages of transformers (a missing pooler, unused weights) would stand in the middle of our tables."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(before)
