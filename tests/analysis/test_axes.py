"""The cost table: what is predicted from shapes equals what a real model shows."""

from __future__ import annotations

import pytest
import torch

import crossfuse as xf
from crossfuse.analysis.axes import ROWS, measure, predict
from crossfuse.cli.main import main
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
