"""A held-out share: disjoint, of each set, the same for the same seed."""

import pytest

from crossfuse.training.batches import Joined
from crossfuse.training.held_out import hold_out


def test_the_share_is_taken_of_each_set_and_nothing_is_in_both():
    data = Joined([[("a", i) for i in range(100)], [("b", i) for i in range(50)]], [0.5, 0.5])
    train, validation = hold_out(data, 0.1, seed=3)
    trained, held = [[part[i] for i in range(len(part))] for part in (train, validation)]
    assert [name for name, _ in held] == ["a"] * 10 + ["b"] * 5
    assert sorted(trained + held) == [data[i] for i in range(150)]
    assert train.weights == [0.5, 0.5]
    again = hold_out(data, 0.1, seed=3)[1]
    other = hold_out(data, 0.1, seed=4)[1]
    assert [again[i] for i in range(15)] == held != [other[i] for i in range(15)]


def test_a_share_that_leaves_nothing_is_refused():
    with pytest.raises(ValueError, match=r"validation_share=0.01 of 8 records leaves 8 to train on and 0"):
        hold_out(Joined([list(range(8))], [None]), 0.01, seed=0)
