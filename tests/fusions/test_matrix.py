"""Every registered fusion has a row in the test matrix."""

from __future__ import annotations

import crossfuse as xf
from crossfuse.fusion import fusion_class
from matrix import MATRIX


def test_every_registered_fusion_has_a_row_of_its_own_class():
    assert set(MATRIX) == set(xf.FUSIONS)
    for name, row in MATRIX.items():
        assert row
        assert {type(fusion) for fusion in row} == {fusion_class(name)}
