"""Several fusions on the same questions: what was measured of each, and how they differ from the baseline."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from crossfuse.data.records import Record
from crossfuse.evaluation.generation import prompt_text
from crossfuse.evaluation.scoring import Difference, Score, is_right, paired_difference, score
from crossfuse.training.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class ScoredQuestion:
    """One question of the comparison with its right answer. `kind` groups questions in the tables."""

    sample_id: str
    prompt: str
    answer: str
    kind: str

    @classmethod
    def of(cls, record: Record) -> ScoredQuestion:
        """From a record with an answer and, among its meta values, a "kind"."""
        if record.answer is None:
            raise ValueError(f"record {record.id!r} has no answer to score against")
        return cls(record.id, prompt_text(record), record.answer, str(record.meta.get("kind", "question")))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one fusion did. `answers` and `shuffled_answers` are in the order of the questions."""

    name: str
    fusion: dict[str, Any]
    answers: Sequence[str]
    shuffled_answers: Sequence[str]
    answer_seconds: float
    recipe: Recipe | None = None
    losses: Sequence[tuple[int, float]] = ()
    train_seconds: float = 0.0
    trained_parameters: int = 0


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Outcomes over one list of questions; the first outcome is the baseline of every difference."""

    questions: Sequence[ScoredQuestion]
    outcomes: Sequence[Outcome]

    @property
    def kinds(self) -> list[str]:
        """Question kinds in the order of their first question."""
        return list(dict.fromkeys(question.kind for question in self.questions))

    def score(self, outcome: Outcome, kind: str | None = None, *, shuffled: bool = False) -> Score:
        """Score over all questions or those of one kind, with their own images or with shuffled ones."""
        answers = outcome.shuffled_answers if shuffled else outcome.answers
        chosen = [i for i, q in enumerate(self.questions) if kind is None or q.kind == kind]
        return score([answers[i] for i in chosen], [self.questions[i].answer for i in chosen])

    def difference(self, outcome: Outcome, baseline: Outcome | None = None) -> Difference:
        """Share of right answers minus the baseline's, paired by question."""
        other = self.outcomes[0] if baseline is None else baseline
        return paired_difference(self._right(outcome), self._right(other))

    def verdict(self, outcome: Outcome) -> str:
        """One sentence that says whether the fusion beats the baseline on these questions, and by how much."""
        baseline = self.outcomes[0]
        found = self.difference(outcome)
        points = f"{100 * found.value:+.1f} points, 95 % interval {100 * found.low:+.1f} to {100 * found.high:+.1f}"
        how = {
            "better": "is better than",
            "worse": "is worse than",
            "not distinguishable": "cannot be told apart from",
        }[found.verdict]
        return f"{outcome.name} {how} {baseline.name} on these {len(self.questions)} questions ({points})."

    def to_json(self) -> dict[str, Any]:
        """Everything measured, as JSON values."""
        return {
            "questions": len(self.questions),
            "outcomes": [self._outcome_json(outcome) for outcome in self.outcomes],
            "answers": [
                dataclasses.asdict(question)
                | {"answers": {outcome.name: outcome.answers[i] for outcome in self.outcomes}}
                for i, question in enumerate(self.questions)
            ],
        }

    def _right(self, outcome: Outcome) -> list[bool]:
        return [bool(is_right(a, q.answer)) for a, q in zip(outcome.answers, self.questions, strict=True)]

    def _outcome_json(self, outcome: Outcome) -> dict[str, Any]:
        scores = {"all": self.score(outcome)} | {kind: self.score(outcome, kind) for kind in self.kinds}
        return {
            "name": outcome.name,
            "fusion": outcome.fusion,
            "recipe": None if outcome.recipe is None else outcome.recipe.model_dump(mode="json"),
            "trained_parameters": outcome.trained_parameters,
            "train_seconds": round(outcome.train_seconds, 2),
            "answer_seconds": round(outcome.answer_seconds, 2),
            "scores": {name: _score_json(value) for name, value in scores.items()},
            "shuffled_images": _score_json(self.score(outcome, shuffled=True)),
            "difference_to_baseline": dataclasses.asdict(self.difference(outcome)),
            "losses": [[step, value] for step, value in outcome.losses],
        }


def _score_json(value: Score) -> dict[str, Any]:
    low, high = value.interval
    return dataclasses.asdict(value) | {"share": value.share, "interval_95": [low, high]}
