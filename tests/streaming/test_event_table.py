"""The table of `crossfuse bench events` in narrow terminals."""

from __future__ import annotations

import pytest

from crossfuse.evaluation.events import READINGS, EventScore
from crossfuse.streaming.event_training import CONDITIONS, EventRun, print_runs


@pytest.mark.parametrize("columns", ["80", "120"])
def test_names_and_rates_are_whole(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    perfect = dict.fromkeys(READINGS, EventScore(1234, 1234, (2,) * 1234))
    scores = dict.fromkeys(CONDITIONS, perfect)
    names = ["cross-attention", "insertion", "text-anchors-pooled"]
    print_runs([EventRun(name, 10, 1.0, 0.5, scores) for name in names])
    shown = capsys.readouterr().out
    assert "…" not in shown
    for name in names:
        assert shown.count(name) == 1
    for condition in CONDITIONS:
        assert shown.count(condition) == len(names)
    assert shown.count("100 / 100") == len(names) * len(CONDITIONS) * len(READINGS)
    assert max(map(len, shown.splitlines())) <= int(columns)
