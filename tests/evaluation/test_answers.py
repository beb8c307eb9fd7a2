"""The one reading of yes/no, letters and numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossfuse.evaluation.answers import LETTERS, letter, number, yes_no

OPTIONS = ["a red car", "cat", "dog", "a dark red car"]


@pytest.mark.parametrize(
    ("answer", "read"),
    [
        ("B", "B"),
        ("b", "B"),
        ("(c)", "C"),
        (" **B** ", "B"),
        ("The correct answer is B. Here's why the others fail: A is wrong", "B"),
        ("The answer is A. No, wait: the answer is C.", "C"),
        ("A dog is running", "C"),
        ("A is right", "A"),
        ("The answer is A dog", "C"),
        ("Answer: d", "D"),
        ("I choose B", "B"),
        ("Option C", "C"),
        ("B. cat", "B"),
        ("B) cat, since (A) is no animal", "B"),
        ("it shows a dark red car", "D"),  # "a red car" is not in it, and D's text is the longer one
        ("A cat.", "B"),
        ("Cats", None),
        ("It is either A or B", None),
        ("(A) or (B)", None),
        ("the cat and the dog", None),
        ("E", None),
        ("I think that I cannot tell", None),
        ("", None),
    ],
)
def test_e6_letters(answer, read):
    assert letter(answer, OPTIONS) == read


def test_letters_stop_at_the_number_of_options():
    assert letter("C", ["x", "y"]) is None
    assert letter("C", ["x", "y", "z"]) == "C"


def test_an_option_that_is_a_letter_or_a_number_keeps_its_own_letter():
    assert letter("3", ["2", "3", "4"]) == "B"
    assert letter("There are 3 of them", ["2", "3", "4"]) == "B"
    assert letter("23", ["2", "3", "4"]) is None


@given(st.integers(2, 8), st.data())
def test_marked_letters_are_read_in_every_form(count, data):
    options = [f"option text {k}" for k in range(count)]
    name = data.draw(st.sampled_from(LETTERS[:count]))
    form = data.draw(
        st.sampled_from(
            [
                "{}",
                "{}.",
                "({})",
                "{})",
                "Answer: {}",
                "The answer is {}.",
                "The correct option is ({}).",
                "I choose {}",
            ]
        )
    )
    assert letter(form.format(name), options) == name


@given(st.text(max_size=40), st.lists(st.text(max_size=10), max_size=6))
def test_any_text_gives_an_offered_letter_or_none(answer, options):
    assert letter(answer, options) in (None, *LETTERS[: len(options)])
    assert yes_no(answer) in (None, "yes", "no")
    number(answer)


@pytest.mark.parametrize(
    ("answer", "read"),
    [
        ("1,200", 1200.0),
        ("There are three.", 3.0),
        ("3 (three) cats", 3.0),
        ("2 red and 3 blue", None),
        ("40%", 40.0),
        ("-3.5", -3.5),
        (".5", 0.5),
        ("v2", None),
        ("none", None),
        ("someone", None),
    ],
)
def test_numbers(answer, read):
    assert number(answer) == read
