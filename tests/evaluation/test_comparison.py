"""A comparison says what was measured, of what, and against what."""

import pytest
from PIL import Image

from crossfuse.data.records import Record
from crossfuse.evaluation.comparison import Comparison, Outcome, ScoredQuestion
from crossfuse.evaluation.scoring import Score
from crossfuse.reports.comparison import ComparisonTexts, comparison_charts, comparison_page
from crossfuse.training.recipe import Recipe


def comparison() -> Comparison:
    """Sixty questions of three kinds: the baseline has 50 right, "worse" 20, "same" 50 others."""
    kinds = ("existence", "colour", "count")
    questions = [ScoredQuestion(f"q{i}", "?", "yes" if i % 3 == 0 else "red", kinds[i % 3]) for i in range(60)]

    def outcome(name: str, right: range, recipe: Recipe | None = None) -> Outcome:
        answers = [q.answer if i in right else "maybe" for i, q in enumerate(questions)]
        return Outcome(name, {"name": name}, answers, ["no"] * 60, 1.5, recipe, ((1, 2.0), (2, 1.0)), 3.0, 1234)

    return Comparison(
        questions,
        [outcome("base", range(50), Recipe(steps=2)), outcome("worse", range(20)), outcome("same", range(50))],
    )


def test_scores_by_kind_add_up():
    found = comparison()
    base = found.outcomes[0]
    assert found.kinds == ["existence", "colour", "count"]
    assert found.score(base) == Score(50, 60, unparsed=3)
    parts = [found.score(base, kind) for kind in found.kinds]
    assert sum(part.right for part in parts) == 50
    assert sum(part.total for part in parts) == 60
    assert found.score(base, shuffled=True) == Score(0, 60, unparsed=0)


def test_a_fusion_that_is_worse_is_said_to_be_worse():
    found = comparison()
    assert found.verdict(found.outcomes[1]).startswith("worse is worse than base on these 60 questions (-50.0 points")
    assert found.verdict(found.outcomes[2]).startswith("same cannot be told apart from base")


def test_page_holds_the_counts_the_intervals_and_the_verdict():
    found = comparison()
    texts = ComparisonTexts("T", [found.verdict(found.outcomes[1])], ["how"], ["limit"], "crossfuse demo")
    cache = {"insertion": [(1, 1000), (2, 2000)]}
    charts = comparison_charts(found, cache)
    assert set(charts) == {"loss.png", "radar.png", "cache.png"}
    page = comparison_page(found, texts, charts, [], cache).render().replace("\N{NO-BREAK SPACE}", " ")
    for text in ("50 of 60", "83.3%", "-50.0", "worse", "60 questions that training never saw", "1,234", "1,000"):
        assert text in page
    assert "nothing to draw" in page


def test_two_kinds_make_no_radar():
    found = comparison()
    chosen = [i for i, q in enumerate(found.questions) if q.kind != "count"]
    fewer = Comparison(
        [found.questions[i] for i in chosen],
        [
            Outcome("base", {}, [found.outcomes[0].answers[i] for i in chosen], ["no"] * len(chosen), 1.0),
        ],
    )
    assert comparison_charts(fewer, {}) == {}


def test_questions_come_from_records_with_answers():
    record = Record.of_question("a", "what color?", "red", [Image.new("RGB", (2, 2))], kind="colour")
    assert ScoredQuestion.of(record) == ScoredQuestion("a", "what color?", "red", "colour")
    with pytest.raises(ValueError, match="record 'b' has no answer"):
        ScoredQuestion.of(Record.of_question("b", "what color?"))
