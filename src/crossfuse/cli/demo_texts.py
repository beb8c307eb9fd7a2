"""The words of the demo's report, made from what this run measured."""

from __future__ import annotations

from crossfuse.analysis.threshold import Calibration
from crossfuse.evaluation.comparison import Comparison
from crossfuse.reports.comparison import ComparisonTexts


def demo_texts(
    comparison: Comparison, data: str, calibration: Calibration, seconds: float, command: str
) -> ComparisonTexts:
    """Summary, method and limits of one run."""
    trained = [outcome for outcome in comparison.outcomes if outcome.recipe is not None]
    recipe = trained[0].recipe
    assert recipe is not None
    summary = [comparison.verdict(outcome) for outcome in comparison.outcomes[1:]]
    method = [
        f"Data: {data}.",
        "Start: every row starts from the same file, the model inside the package, which was trained as an insertion "
        "model. That favours insertion and text anchors, which keep its way of reading images; cross-attention begins "
        "with layers that never saw an image.",
        f"Budget: {recipe.steps} optimiser steps of {recipe.batch_size} samples each, the same samples in the same "
        f"order, AdamW, peak learning rate {recipe.learning_rate:g}; wall time differs and stands in the table.",
        "Trained: insertion and text anchors get LoRA adapters in the language model's layers; cross-attention trains "
        "its own new layers. Everything else is frozen.",
        f"Text anchors: threshold {calibration.threshold:.4f}, set on {calibration.n_samples} training questions "
        f"({calibration.n_tokens:,} prompt tokens) so that {calibration.share:.0%} of the tokens are copied; "
        f"{calibration.achieved:.1%} were. The best of the image's cosines between unrelated vectors would be "
        f"{calibration.noise_floor:.3f} in the median, and {calibration.noise_share:.1%} of unrelated tokens would "
        "reach the threshold.",
        "Answers: greedy decoding in float32; right means equal to the reference after lower-casing and stripping "
        "punctuation, and for yes/no questions that the first yes or no is the right one.",
        f"The whole run took {seconds:.0f} s.",
    ]
    limits = [
        "One seed and one start: another seed may order the fusions differently; the intervals cover the choice of "
        "questions only.",
        "A model of 1.8 million parameters on drawn shapes: nothing here says how the fusions rank on photographs or "
        "on large models.",
        "A short budget: fusions that start further from the model's habits may need longer than this.",
    ]
    return ComparisonTexts(
        title="crossfuse demo: three ways for image tokens to reach the text",
        summary=summary,
        method=method,
        limits=limits,
        command=command,
    )
