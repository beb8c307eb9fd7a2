"""Captions against references: BLEU, ROUGE-L, METEOR, CIDEr, BERTScore, and the negated validation loss.

Every score comes from the library that the field quotes, with its variant, scale and version. What cannot be computed
here (no Java, no model, a library that is not installed) is None with the reason; the others still are.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from functools import partial

from crossfuse.evaluation.benchmarks.base import Metric

Captions = Sequence[str]
References = Sequence[Sequence[str]]

TEXT_METRICS = ("bleu", "rouge_l", "meteor", "cider", "cider@simple", "bertscore")
CIDER_NEEDS = 50
"""Below so many images the document frequencies of CIDEr say little, and a note says so."""


def text_metrics(
    predictions: Captions,
    references: References,
    *,
    metrics: Sequence[str] = TEXT_METRICS,
    bertscore_model: str | None = None,
    bertscore_layers: int | None = None,
    java_timeout: float = 600.0,
) -> dict[str, Metric]:
    """Scores of predictions, each against one or more references of its own.

    Args:
        predictions: one text an image; line breaks are blanks to all metrics.
        references: at least one text for every prediction.
        metrics: names of `TEXT_METRICS`.
        bertscore_model: directory or hub id of the encoder that BERTScore compares with. None leaves BERTScore out,
            with the reason: its usual model, roberta-large, is no part of the library.
        bertscore_layers: layer whose states are compared; needed for models that bert-score has no default for.
        java_timeout: seconds after which METEOR's or the tokenizer's Java process is stopped.

    Returns:
        "bleu", "rouge_l", "meteor", "cider" (0-10), "cider@simple", and for BERTScore "bertscore_precision",
        "bertscore_recall" and "bertscore" (F1). All but CIDEr lie in 0-1.

    Raises:
        ValueError: no predictions, another number of references, a prediction without a reference, an unknown metric.
    """
    _check(predictions, references, metrics)
    said = [one_line(text) for text in predictions]
    known = [[one_line(text) for text in texts] for texts in references]
    results: dict[str, Metric] = {}
    if "bleu" in metrics:
        results["bleu"] = _guarded(partial(bleu, said, known), len(said), "corpus BLEU-4", "0-1")
    if "rouge_l" in metrics:
        results["rouge_l"] = _guarded(partial(rouge_l, said, known), len(said), "ROUGE-L F1", "0-1")
    if {"meteor", "cider", "cider@simple"} & set(metrics):
        from crossfuse.evaluation import caption_metrics as coco

        if "meteor" in metrics:
            compute = partial(coco.meteor, said, known, timeout=java_timeout)
            results["meteor"] = _guarded(compute, len(said), coco.METEOR, "0-1")
        if "cider" in metrics:
            compute = partial(coco.cider, said, known, timeout=java_timeout)
            results["cider"] = _guarded(compute, len(said), coco.CIDER, "0-10")
        if "cider@simple" in metrics:
            compute = partial(coco.cider_simple, said, known)
            results["cider@simple"] = _guarded(compute, len(said), coco.CIDER_SIMPLE, "0-10")
    if "bertscore" in metrics:
        results |= _bertscore(said, known, bertscore_model, bertscore_layers)
    return results


def negated_validation_loss(losses: Sequence[float], tokens: Sequence[int]) -> Metric:
    """Minus the mean cross-entropy per supervised token, in nats: the papers' "-val loss". Higher is better.

    Args:
        losses: mean loss of each batch.
        tokens: supervised tokens of each batch; the batches are weighted by them.
    """
    variant, total = "minus the mean cross-entropy per supervised token (nats)", sum(tokens)
    if len(losses) != len(tokens):
        raise ValueError(f"one token count a loss: got {len(losses)} losses and {len(tokens)} counts")
    if total == 0:
        return Metric(None, 0, variant, "-inf-0", reason="no supervised tokens")
    value = sum(loss * count for loss, count in zip(losses, tokens, strict=True)) / total
    return Metric(-value, total, variant, "-inf-0")


def bleu(predictions: Captions, references: References) -> Metric:
    """Corpus BLEU (Papineni et al. 2002; sacrebleu, Post 2018), which is not the mean of the sentences' scores."""
    from sacrebleu.metrics import BLEU

    metric = BLEU()
    most = max(len(texts) for texts in references)
    # sacrebleu takes references column by column; where a sample has fewer, the column holds None.
    columns = [[texts[k] if k < len(texts) else None for texts in references] for k in range(most)]
    value = metric.corpus_score(list(predictions), columns).score / 100  # type: ignore[arg-type]
    return Metric(value, len(predictions), f"corpus BLEU-4, {metric.get_signature()}", "0-1", version("sacrebleu"))


def rouge_l(predictions: Captions, references: References) -> Metric:
    """Mean ROUGE-L F1 (Lin 2004; rouge-score), the best of a sample's references, no stemming."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"], use_stemmer=False)
    scores = [
        scorer.score_multi(list(texts), said)["rougeL"].fmeasure
        for said, texts in zip(predictions, references, strict=True)
    ]
    variant = "mean ROUGE-L F1, best reference, no stemming"
    return Metric(sum(scores) / len(scores), len(scores), variant, "0-1", version("rouge-score"))


def one_line(text: str) -> str:
    """The text with every run of white space as one blank: a line break ends a record in several tools."""
    return " ".join(text.split())


def version(distribution: str) -> str:
    """Name and installed version of a library."""
    return f"{distribution} {importlib.metadata.version(distribution)}"


def _bertscore(said: Captions, known: References, model: str | None, layers: int | None) -> dict[str, Metric]:
    from crossfuse.evaluation.bertscore import bertscore

    names = {"bertscore_precision": "precision", "bertscore_recall": "recall", "bertscore": "F1"}
    if model is None:
        why = "no model given: --bertscore-model DIR or a hub id (bertscore_model here), and its layers"
        return {name: Metric(None, len(said), f"BERTScore {part}", "0-1", reason=why) for name, part in names.items()}
    try:
        return bertscore(said, known, model, layers)
    except Exception as error:
        why = _reason(error)
        return {name: Metric(None, len(said), f"BERTScore {part}", "0-1", reason=why) for name, part in names.items()}


def _guarded(compute: Callable[[], Metric], n: int, variant: str, scale: str) -> Metric:
    """A metric that fails leaves its reason, not the run: the other scores are still wanted."""
    try:
        return compute()
    except Exception as error:
        return Metric(None, n, variant, scale, reason=_reason(error))


def _reason(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"not computed: {str(error.name).split('.')[0]} is not installed (pip install 'crossfuse[eval]')"
    return f"not computed: {str(error).splitlines()[0] if str(error) else type(error).__name__}"


def _check(predictions: Captions, references: References, metrics: Sequence[str]) -> None:
    from crossfuse.fusion import nearest

    for name in metrics:
        if name not in TEXT_METRICS:
            raise ValueError(
                f"unknown text metric {name!r}{nearest(name, TEXT_METRICS)}; known: {', '.join(TEXT_METRICS)}"
            )
    if not predictions or len(predictions) != len(references):
        raise ValueError(f"one list of references a prediction: got {len(predictions)} and {len(references)}")
    for place, texts in enumerate(references):
        if isinstance(texts, str) or not texts:
            raise ValueError(f"prediction {place} needs a list of at least one reference; got {texts!r}")
