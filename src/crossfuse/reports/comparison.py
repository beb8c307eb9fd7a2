"""The page of a comparison: scores with counts and intervals, curves, pictures, and what was not measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from crossfuse.evaluation.comparison import Comparison, Outcome
from crossfuse.evaluation.scoring import Score
from crossfuse.reports.curves import Curve, cache_bytes, loss_curves, png_bytes
from crossfuse.reports.html import ReportPage
from crossfuse.reports.radar import radar_chart

# Numbers that belong together stay on one line of a table.
NO_BREAK, JOINER = "\N{NO-BREAK SPACE}", "\N{WORD JOINER}"


@dataclasses.dataclass(frozen=True)
class ComparisonTexts:
    """What the page says in words; every sentence is about this very run."""

    title: str
    summary: Sequence[str]
    method: Sequence[str]
    limits: Sequence[str]
    command: str


def comparison_charts(comparison: Comparison, cache: Mapping[str, Curve]) -> dict[str, bytes]:
    """PNG files by name: loss.png, radar.png (three kinds of questions or more) and cache.png."""
    charts = {}
    trained = {o.name: o.losses for o in comparison.outcomes if o.losses}
    if trained:
        charts["loss.png"] = png_bytes(loss_curves(trained))
    if len(comparison.kinds) >= 3:
        shares = {
            o.name: {kind: comparison.score(o, kind).share for kind in comparison.kinds} for o in comparison.outcomes
        }
        charts["radar.png"] = png_bytes(radar_chart(shares))
    if cache:
        charts["cache.png"] = png_bytes(cache_bytes(cache))
    return charts


def comparison_page(
    comparison: Comparison,
    texts: ComparisonTexts,
    charts: Mapping[str, bytes],
    pictures: Sequence[tuple[bytes, str]],
    cache: Mapping[str, Curve],
) -> ReportPage:
    """The whole report. `pictures`: (PNG, caption) of anchors; `cache`: bytes against images, by name."""
    page = ReportPage(texts.title)
    for sentence in texts.summary:
        page.paragraph(sentence)
    _scores(page, comparison)
    if "radar.png" in charts:
        page.figure(charts["radar.png"], caption="Share of right answers by kind of question.")
    page.heading("Training")
    _training(page, comparison)
    if "loss.png" in charts:
        page.figure(charts["loss.png"], caption="Training loss at every optimiser step; the same batches for each.")
    page.heading("Anchors")
    if pictures:
        page.paragraph(
            "Words of the question that were copied next to an image token, each at that token's patch, with the "
            "cosine of the two. Questions are from the scored set."
        )
        page.gallery(pictures)
    else:
        page.paragraph("No word of the pictured questions reached the threshold, so there is nothing to draw.")
    if cache:
        page.heading("Memory")
        _cache_table(page, cache)
        page.figure(charts["cache.png"], caption="Bytes of the key-value cache after the prefill, batch 1.")
    page.heading("How this was measured")
    page.bullets(texts.method)
    page.heading("What this does not show")
    page.bullets(texts.limits)
    page.paragraph("Made by:", note=True)
    page.code(texts.command)
    return page


def _scores(page: ReportPage, comparison: Comparison) -> None:
    page.heading("Scores")
    page.table(
        ["fusion", "right", "share", "95 % interval", "images shuffled", "unparsed", "difference to the first row"],
        [_score_row(comparison, outcome) for outcome in comparison.outcomes],
        caption=(
            f"{len(comparison.questions)} questions that training never saw. Intervals of shares: Wilson; of "
            "differences: Agresti and Min, paired by question. Images shuffled: each question with another's image. "
            "Unparsed: answers without a yes or no where one was asked for; they count as wrong."
        ),
    )
    page.table(
        ["kind of question", "questions", *(o.name for o in comparison.outcomes)],
        [
            [kind, str(comparison.score(comparison.outcomes[0], kind).total)]
            + [_share(comparison.score(o, kind)) for o in comparison.outcomes]
            for kind in comparison.kinds
        ],
        caption="Share of right answers by kind, with the 95 % Wilson interval.",
    )


def _score_row(comparison: Comparison, outcome: Outcome) -> list[str]:
    value, shuffled = comparison.score(outcome), comparison.score(outcome, shuffled=True)
    difference = comparison.difference(outcome)
    if outcome is comparison.outcomes[0]:
        against = "–"
    else:
        against = (
            f"{100 * difference.value:+.1f} ({100 * difference.low:+.1f} to {100 * difference.high:+.1f}), "
            f"{difference.verdict}"
        )
    low, high = value.interval
    return [
        outcome.name,
        f"{value.right} of {value.total}".replace(" ", NO_BREAK),
        f"{value.share:.1%}",
        f"{100 * low:.1f}{JOINER}–{JOINER}{high:.1%}",
        f"{shuffled.share:.1%}",
        str(value.unparsed),
        against,
    ]


def _share(value: Score) -> str:
    low, high = value.interval
    return f"{value.share:.0%} ({100 * low:.0f}–{high:.0%})".replace(" ", NO_BREAK).replace("–", f"{JOINER}–{JOINER}")


def _training(page: ReportPage, comparison: Comparison) -> None:
    rows = []
    for outcome in comparison.outcomes:
        recipe = outcome.recipe
        if recipe is None:
            rows.append([outcome.name, "not trained here", "–", "–", "–", "–"])
            continue
        what = f"LoRA, rank {recipe.lora.rank}" if recipe.trainable.llm == "lora" else "cross-attention layers"
        rows.append(
            [
                outcome.name,
                what,
                f"{outcome.trained_parameters:,}",
                f"{recipe.steps or 0:,}",
                f"{(recipe.steps or 0) * recipe.batch_size:,}",
                f"{outcome.train_seconds:.1f} s",
            ]
        )
    page.table(["fusion", "trained", "parameters", "steps", "samples seen", "wall time"], rows)


def _cache_table(page: ReportPage, cache: Mapping[str, Curve]) -> None:
    counts = [count for count, _ in next(iter(cache.values()))]
    page.table(
        ["bytes of the key-value cache", *(f"{count:g} images" if count != 1 else "1 image" for count in counts)],
        [[name, *(f"{value:,.0f}" for _, value in points)] for name, points in cache.items()],
    )
