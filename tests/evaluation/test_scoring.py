"""Scores of short answers against values worked out by hand and against other formulas."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossfuse.evaluation.scoring import (
    Score,
    exact_match,
    is_right,
    other_images,
    paired_difference,
    score,
    wilson_interval,
    yes_no,
)


@pytest.mark.parametrize(
    ("answer", "reference", "same"),
    [
        ("Red.", "red", True),
        ("  light   blue ", "Light blue", True),
        ('"two"', "two", True),
        ("reddish", "red", False),
        ("", "red", False),
    ],
)
def test_exact_match(answer, reference, same):
    assert exact_match(answer, reference) is same


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("yes", "yes"),
        ("Yes, there is.", "yes"),
        ("no", "no"),
        ("There is no dog.", "no"),
        ("NO", "no"),
        ("Notice the yesterday", None),
        ("nothing", None),
        ("maybe", None),
        ("", None),
    ],
)
def test_yes_no_are_whole_words(answer, said):
    assert yes_no(answer) == said


def test_unparsed_answers_count_as_wrong_and_are_counted():
    result = score(["yes", "no", "maybe", "", "red"], ["yes", "yes", "no", "no", "red"])
    assert result == Score(right=2, total=5, unparsed=2)
    assert result.share == 0.4


def test_yes_is_no_exact_match_question():
    assert is_right("yes, it is", "yes") is True
    assert is_right("yes", "red") is False
    assert is_right("perhaps", "no") is None


def test_different_lengths_are_refused():
    with pytest.raises(ValueError, match="2 answers and 1 references"):
        score(["a", "b"], ["a"])


def test_wilson_by_hand():
    # Wilson's example of 8 of 10 at 95 %, as scipy.stats.binomtest(8, 10).proportion_ci(method="wilson") gives it.
    assert wilson_interval(8, 10) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)
    assert wilson_interval(0, 0) == (0.0, 1.0)


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_ends_solve_its_equation(case):
    right, total = case
    share, z = right / total, 1.959963984540054
    for end in wilson_interval(right, total):
        assert 0 <= end <= 1
        # Wilson's ends are where the normal test of the share just does not reject.
        assert abs(share - end) == pytest.approx(z * math.sqrt(end * (1 - end) / total), abs=1e-9)


@pytest.mark.parametrize(("right", "total"), [(-1, 5), (6, 5)])
def test_impossible_counts_are_refused(right, total):
    with pytest.raises(ValueError, match=f"got {right} of {total}"):
        wilson_interval(right, total)


def test_paired_difference_knows_more_than_two_shares():
    baseline = [i % 2 == 0 for i in range(200)]
    better = [b or i % 10 == 1 for i, b in enumerate(baseline)]
    difference = paired_difference(better, baseline)
    assert difference.value == pytest.approx(0.1)
    assert difference.low < 0.1 < difference.high
    assert difference.verdict == "better"
    assert paired_difference(baseline, better).verdict == "worse"
    # The two shares alone would not tell: their intervals overlap.
    assert wilson_interval(sum(better), 200)[0] < wilson_interval(sum(baseline), 200)[1]


def test_paired_difference_matches_a_plain_bootstrap():
    rng = np.random.default_rng(1)
    right, baseline = rng.random(300) < 0.7, rng.random(300) < 0.6
    steps = right.astype(float) - baseline.astype(float)
    means = [steps[rng.integers(0, 300, 300)].mean() for _ in range(4000)]
    ours = paired_difference(list(right), list(baseline))
    assert ours.value == pytest.approx(steps.mean())
    assert (ours.low, ours.high) == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])), abs=0.01)


@pytest.mark.parametrize("shared", [True, False])
def test_two_models_that_never_disagree_are_not_known_to_be_equal(shared):
    difference = paired_difference([shared] * 40, [shared] * 40)
    assert difference.value == 0
    assert difference.low < 0 < difference.high
    assert difference.verdict == "not distinguishable"


def test_pairs_must_match():
    with pytest.raises(ValueError, match="got 1 and 2"):
        paired_difference([True], [True, False])


@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.integers(0, 5))
def test_shuffled_control_gives_every_question_another_image(images, seed):
    largest = max(images.count(image) for image in set(images))
    if 2 * largest > len(images):
        with pytest.raises(ValueError, match=f"one image has {largest} of the {len(images)}"):
            other_images(images, seed=seed)
        return
    chosen = other_images(images, seed=seed)
    assert sorted(chosen) == list(range(len(images)))
    assert all(images[other] != own for own, other in zip(images, chosen, strict=True))
