"""The cost table: what is predicted from shapes equals what a real model shows."""

from __future__ import annotations

import io
import re

import pytest
import torch
from rich.console import Console

import crossfuse as xf
from crossfuse.analysis.axes import OTHERS, ROWS, AxisCost, measure, predict
from crossfuse.backbones import backbone_for
from crossfuse.cli.bench_axes import _tables
from crossfuse.cli.main import main
from crossfuse.cli.model_shapes import shape_like
from crossfuse.cli.progress import Stages
from crossfuse.training.shapes import KNOWN_SHAPES, SHORT_NAMES
from tiny import llava

TEXT, IMAGE, COUNTS = 12, 16, [1, 3]
CASES = {
    **ROWS,
    "CA, history 2": xf.CrossAttention(history=2),
    "CA_t+v-feather": xf.CrossAttention.preset("CA_t+v-feather"),
    "CA, gate": xf.CrossAttention(gate="tanh"),
}


@pytest.fixture(scope="module", params=list(CASES))
def row(request):
    model = llava(layers=4) if request.param == "CA-feather (n=4)" else llava()
    with torch.device("meta"):
        shape = type(model)(model.config)
    fusion = CASES[request.param]
    predicted = predict(shape, request.param, fusion, TEXT, IMAGE, COUNTS)
    return model, fusion, measure(model, predicted, fusion, TEXT, COUNTS)


def test_new_weights_are_those_of_a_fused_model(row):
    model, fusion, cost = row
    with xf.fused(model, fusion):
        assert cost.added_parameters == sum(p.numel() for p in xf.fusion_parameters(model).values())


def test_cache_bytes_are_exact(row):
    _, _, cost = row
    assert cost.cache_bytes == cost.measured_cache_bytes


def test_operations_agree_within_a_twentieth(row):
    _, _, cost = row
    assert cost.prefill == pytest.approx(cost.measured_prefill, rel=0.05)
    assert cost.decode == pytest.approx(cost.measured_decode, rel=0.05)


def test_a_training_step_takes_three_forwards(row):
    _, _, cost = row
    assert cost.training == pytest.approx(cost.measured_training, rel=0.05)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("measured", [None, 123_456_789])
def test_names_and_numbers_are_whole_in_a_narrow_terminal(width, measured):
    counts = [1, 8, 64]
    sizes = dict.fromkeys(counts, 987_654_321)
    rows = [
        AxisCost(
            name, 339_904_512, 10**9, 10**9, 10**9, sizes, measured, measured, measured, measured and sizes, measured
        )
        for name in ROWS | OTHERS
    ]
    console = Console(width=width, record=True, file=io.StringIO())
    for table in _tables(rows, counts, "SmolLM2-135M"):
        console.print(table)
    shown = console.export_text()
    assert "…" not in shown
    for name in ROWS | OTHERS:
        assert len(re.findall(rf"│ {re.escape(name)} *│", shown)) == 2
    assert shown.count("339,904,512") == len(rows)
    assert shown.count("988 MB") == len(rows) * len(counts) * (1 if measured is None else 2)


def test_who_waits_sees_a_bar_and_a_pipe_sees_none(monkeypatch, capsys):
    bars = []

    class Watched(Stages):
        def stage(self, description, total):
            bars.append((description, total))
            return super().stage(description, total)

    monkeypatch.setattr("crossfuse.cli.progress.Stages", Watched)
    monkeypatch.setattr("crossfuse.analysis.axes.ROWS", {"insertion": xf.Insertion(), "CA": xf.CrossAttention()})
    with pytest.raises(SystemExit):
        main(["bench", "axes", "--images", "1", "--text-tokens", "4"])
    assert bars == [("counting and measuring", 2)]
    printed = capsys.readouterr()
    assert "counting" not in printed.out + printed.err


def test_a_known_shape_is_predicted_without_weights(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "axes", "--like", "SmolLM2-135M", "--images", "1,4"])
    assert stopped.value.code == 0
    assert "CA-link" in capsys.readouterr().out


def test_an_unknown_shape_names_the_nearest(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "axes", "--like", "SmolLM2-135"])
    assert stopped.value.code == 2
    assert "did you mean 'SmolLM2-135M'" in capsys.readouterr().err


def test_published_shapes_stand_in_one_place():
    for name, full in SHORT_NAMES.items():
        assert full in KNOWN_SHAPES, name
    assert set(SHORT_NAMES.values()) == set(KNOWN_SHAPES)
    qwen = shape_like("Qwen2.5-VL-3B")
    assert backbone_for(qwen).mrope
    assert qwen.config.get_text_config().num_hidden_layers == 36
    assert shape_like("HuggingFaceTB/SmolLM2-135M-Instruct").config.text_config.hidden_size == 576
