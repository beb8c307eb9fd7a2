"""Every backend equals the dense-mask reference: outputs and the gradients of q, k and v (invariant 5)."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crossfuse.attention import Windows, windowed_attention
from crossfuse.attention.reference import reference_attention

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
BACKENDS = ["bucketed", "flex"]
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}
NAMES = ["output", "q", "k_image", "v_image", "k_text", "v_text"]
QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}


def outcome(function, windows, leaves, **options):
    """The output and the gradient of every leaf, for one fixed upstream gradient."""
    output = function(*leaves[:3], windows, *leaves[3:], **options)
    upstream = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream)]


def assert_equal(windows, leaves, backend, **options):
    expected = outcome(reference_attention, windows, leaves, **options)
    actual = outcome(windowed_attention, windows, leaves, backend=backend, **options)
    with torch.no_grad():
        inference = windowed_attention(*leaves[:3], windows, *leaves[3:], backend=backend, **options)
    torch.testing.assert_close(inference, expected[0], **TOLERANCE)
    for name, a, b in zip(NAMES, actual, expected, strict=False):
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}\n{windows}", **TOLERANCE)


@settings(max_examples=200, **QUIET)
@given(data=st.data())
def test_bucketed_equals_reference(data, layouts, tensors):
    layout = data.draw(layouts)
    assert_equal(layout.windows, tensors(layout), "bucketed")


@settings(max_examples=40, **QUIET)
@given(data=st.data())
def test_flex_equals_reference(data, layouts, tensors):
    layout = data.draw(layouts)
    assert_equal(layout.windows, tensors(layout, width=16), "flex")


def random_case(windows, heads=(4, 2), width=16, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(windows.query_count, heads[0])] + [(windows.image_count, heads[1])] * 2
    shapes += [(windows.text_count, heads[1])] * (2 if windows.joint_text else 0)
    return [torch.randn(*shape, width, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("joint_text", [False, True])
class TestLayouts:
    def check(self, backend, joint_text, texts, images, **options):
        windows = Windows.from_lengths(texts, images, joint_text, **options)
        assert_equal(windows, random_case(windows), backend)

    def test_large_images_beside_small_windows(self, backend, joint_text):
        self.check(backend, joint_text, [40, 1, 3, 7, 64], [3000, 4, 9, 0, 576])

    def test_equal_windows(self, backend, joint_text):
        self.check(backend, joint_text, [6] * 5, [32] * 5)

    def test_every_window_of_one_query(self, backend, joint_text):
        self.check(backend, joint_text, [1] * 6, [16, 16, 16, 7, 0, 16])

    def test_no_image_at_all(self, backend, joint_text):
        self.check(backend, joint_text, [3, 5], [0, 0])

    def test_no_queries(self, backend, joint_text):
        self.check(backend, joint_text, [0, 0], [4, 5])

    def test_no_windows(self, backend, joint_text):
        self.check(backend, joint_text, [], [])

    def test_history_over_samples(self, backend, joint_text):
        self.check(backend, joint_text, [2, 3, 4, 2], [8, 0, 5, 6], history=None, samples=[0, 0, 1, 1])

    def test_x2_keyless_rows_are_zero_and_finite(self, backend, joint_text):
        windows = Windows.from_lengths([5, 4], [0, 6], joint_text)
        leaves = random_case(windows)
        output, *gradients = outcome(windowed_attention, windows, leaves, backend=backend)
        assert all(tensor.isfinite().all() for tensor in (output, *gradients))
        if not joint_text:
            assert not output[:5].any()
            assert not gradients[0][:5].any()
        alone = outcome(lambda *a, **k: windowed_attention(*a, **k)[5:], windows, leaves, backend=backend)
        dropped = Windows.from_lengths([4], [6], joint_text)
        rest = [leaves[0][5:], *leaves[1:3], *(leaf[5:] for leaf in leaves[3:])]
        rest = [leaf.detach().requires_grad_() for leaf in rest]
        expected = outcome(windowed_attention, dropped, rest, backend=backend)
        torch.testing.assert_close(alone[2], expected[2], **TOLERANCE)
        torch.testing.assert_close(alone[3], expected[3], **TOLERANCE)

    def test_windows_do_not_touch_each_other(self, backend, joint_text):
        """Changing one window's tokens leaves the others bit-equal; bucketed keeps non-finite values apart too."""
        windows = Windows.from_lengths([3, 2, 5, 0, 4], [4, 0, 7, 3, 9], joint_text)
        leaves = [leaf.detach() for leaf in random_case(windows)]
        before = windowed_attention(*leaves[:3], windows, *leaves[3:], backend=backend)
        leaves[1][:4], leaves[2][:4] = (float("inf"), float("nan")) if backend == "bucketed" else (9.0, -8.0)
        after = windowed_attention(*leaves[:3], windows, *leaves[3:], backend=backend)
        assert torch.equal(before[3:], after[3:])
        assert not torch.equal(before[:3], after[:3])

    def test_gradcheck(self, backend, joint_text):
        windows = Windows.from_lengths([2, 1, 0, 3], [3, 2, 1, 0], joint_text, history=2)
        leaves = random_case(windows, heads=(2, 1), width=3, dtype=torch.float64)
        torch.autograd.gradcheck(
            lambda *x: windowed_attention(*x[:3], windows, *x[3:], backend=backend), leaves, fast_mode=False
        )

    def test_scale_is_used(self, backend, joint_text):
        windows = Windows.from_lengths([2, 3], [4, 5], joint_text)
        assert_equal(windows, random_case(windows), backend, scale=0.05)

    def test_one_layout_serves_many_layers(self, backend, joint_text):
        """The plan that a layout keeps holds no data of the call that made it."""
        windows = Windows.from_lengths([2, 1, 3], [4, 0, 60], joint_text)
        for seed, heads in enumerate([(4, 2), (4, 2), (2, 2), (6, 1)]):
            assert_equal(windows, random_case(windows, heads, seed=seed), backend)

    def test_half_precision(self, backend, joint_text):
        windows = Windows.from_lengths([2, 1, 3, 20], [4, 0, 60, 300], joint_text)
        leaves = [leaf.detach() for leaf in random_case(windows)]
        expected = reference_attention(*leaves[:3], windows, *leaves[3:])
        for dtype in (torch.bfloat16, torch.float16):
            half = [leaf.to(dtype) for leaf in leaves]
            output = windowed_attention(*half[:3], windows, *half[3:], backend=backend)
            assert output.dtype == dtype
            torch.testing.assert_close(output.float(), expected, atol=0.03, rtol=0.03)


def test_gradients_flow_only_where_they_are_asked_for():
    windows = Windows.from_lengths([2, 9, 3], [40, 3, 7])
    leaves = [leaf.detach() for leaf in random_case(windows)]
    leaves[2].requires_grad_()
    output = windowed_attention(*leaves, windows)
    expected = reference_attention(*leaves, windows)
    (actual,), (wanted,) = (torch.autograd.grad(x.square().sum(), leaves[2]) for x in (output, expected))
    torch.testing.assert_close(actual, wanted, **TOLERANCE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "buckted"}, "did you mean 'bucketed'"),
        ({"q": torch.zeros(4, 4, 8)}, "windows partition 5 queries; got q with 4 rows"),
        ({"q": torch.zeros(5, 3, 8)}, "multiple of the key heads"),
        ({"q": torch.zeros(5, 4, 6)}, "one head width; got 6 and 8"),
        ({"q": torch.zeros(1, 5, 4, 8)}, "flat"),
        ({"k_image": torch.zeros(6, 2, 8), "v_image": torch.zeros(6, 2, 8)}, "reach image token 6"),
        ({"v_image": torch.zeros(6, 2, 8)}, "v_image must have the shape"),
        ({"k_text": torch.zeros(5, 2, 8), "v_text": torch.zeros(5, 2, 8)}, "windows have no text ranges"),
        ({"windows": Windows.from_lengths([2, 3], [3, 4], True)}, "pass k_text and v_text"),
    ],
)
def test_errors_name_the_value(change, message):
    call = {
        "q": torch.zeros(5, 4, 8),
        "k_image": torch.zeros(7, 2, 8),
        "v_image": torch.zeros(7, 2, 8),
        "windows": Windows.from_lengths([2, 3], [3, 4]),
    }
    with pytest.raises(ValueError, match=message):
        windowed_attention(**(call | change))
