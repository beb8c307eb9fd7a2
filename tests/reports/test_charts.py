"""Charts: what is drawn, what is refused, and that nothing global is touched."""

import io
import subprocess
import sys

import pytest
from PIL import Image

from crossfuse.reports.curves import cache_bytes, loss_curves, png_bytes
from crossfuse.reports.radar import radar_chart

SCORES = {
    "baseline": {"existence": 0.9, "colour": 0.8, "count": 0.4},
    "anchors": {"existence": 0.7, "colour": 0.9, "count": 0.5},
}


def test_radar_has_one_closed_line_a_model_through_its_scores():
    figure = radar_chart(SCORES)
    (axes,) = figure.axes
    for line, (model, values) in zip(axes.lines, SCORES.items(), strict=True):
        assert line.get_label() == model
        assert list(line.get_ydata()) == [*values.values(), next(iter(values.values()))]


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ({}, "at least one model"),
        ({"a": {"x": 0.5, "y": 0.5}}, r"at least 3 metrics; got 2 \(x, y\)"),
        ({"a": {"x": 0, "y": 0, "z": 0}, "b": {"x": 0, "y": 0, "w": 0}}, "'b' has"),
        ({"a": {"x": 0, "y": 0, "z": 50.0}}, "'a' has z = 50.0"),
        ({"a": {"x": 0, "y": 0, "z": float("nan")}}, "between 0 and 1"),
    ],
)
def test_radar_refuses(scores, message):
    with pytest.raises(ValueError, match=message):
        radar_chart(scores)


def test_loss_curves_show_the_values_given():
    points = [(1, 2.0), (2, 1.5), (3, 1.0)]
    (axes,) = loss_curves({"baseline": points}).axes
    assert list(zip(*axes.lines[0].get_data(), strict=True)) == points
    assert axes.get_ylim()[0] == 0


def test_long_loss_curves_get_a_mean_that_keeps_a_constant():
    (axes,) = loss_curves({"flat": [(step, 1.25) for step in range(50)]}).axes
    assert len(axes.lines) == 2
    assert axes.lines[1].get_ydata() == pytest.approx([1.25] * 50)


@pytest.mark.parametrize(("largest", "unit"), [(100, "bytes"), (5000, "KiB"), (3 * 2**20, "MiB"), (7 * 2**30, "GiB")])
def test_cache_bytes_choose_a_unit(largest, unit):
    (axes,) = cache_bytes({"insertion": [(1, largest / 2), (2, largest)]}).axes
    assert axes.get_ylabel() == unit


def test_empty_curves_are_refused():
    with pytest.raises(ValueError, match="got no curve"):
        loss_curves({})
    with pytest.raises(ValueError, match="none for b"):
        loss_curves({"a": [(1, 1.0)], "b": []})


def test_png_is_a_picture():
    picture = Image.open(io.BytesIO(png_bytes(radar_chart(SCORES))))
    assert picture.format == "PNG"
    assert min(picture.size) > 400


def test_pyplot_is_never_loaded():
    # In a process of its own: other libraries that share this one (torchmetrics among them) may load it.
    code = (
        "import sys; from crossfuse.reports.curves import loss_curves, png_bytes; "
        "from crossfuse.reports.radar import radar_chart; "
        f"png_bytes(radar_chart({SCORES!r})); png_bytes(loss_curves({{'a': [(1, 1.0), (2, 0.5)]}})); "
        "assert 'matplotlib' in sys.modules and 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
