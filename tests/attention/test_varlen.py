"""The varlen backend without a GPU: its index tensors, with the flash call emulated by a loop over windows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossfuse.attention import Windows, varlen, windowed_attention
from crossfuse.attention.reference import reference_attention


def looped_flash(q, k, v, cu_q, cu_k, max_q, max_k, scale, causal):
    """What flash attention computes by its documentation: window by window, causal aligned at the bottom right."""
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert cu_q[-1] == len(q)
    assert cu_k[-1] == len(k) == len(v)
    lengths_q, lengths_k = cu_q.diff(), cu_k.diff()
    assert (lengths_q > 0).all()
    assert (lengths_k > 0).all()
    assert (lengths_q.max(), lengths_k.max()) == (max_q, max_k)
    group = q.shape[1] // k.shape[1]
    outputs = []
    for queries, keys, values in zip(
        q.split(lengths_q.tolist()), k.split(lengths_k.tolist()), v.split(lengths_k.tolist()), strict=True
    ):
        mask = None
        if causal:
            mask = torch.ones(len(queries), len(keys), dtype=torch.bool).tril(len(keys) - len(queries))
        heads_first = (queries, keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1))
        out = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1) for x in heads_first), attn_mask=mask, scale=scale
        )
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_varlen_equals_reference(data, layouts, tensors):
    layout = data.draw(layouts)
    leaves = tensors(layout)
    expected = reference_attention(*leaves[:3], layout.windows, *leaves[3:])
    actual = varlen.attend(looped_flash, *leaves[:3], layout.windows, *leaves[3:])
    upstream = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    gradients = [torch.autograd.grad(output, leaves, upstream) for output in (actual, expected)]
    for a, b in zip((actual, *gradients[0]), (expected, *gradients[1]), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_images_that_lie_side_by_side_are_not_gathered():
    plan = varlen.make_plan(Windows.from_lengths([3, 2, 4], [5, 6, 7]), 18, torch.device("cpu"))
    assert plan.key_rows is None
    assert plan.query_rows is None
    assert plan.query_offsets.tolist() == [0, 3, 5, 9]
    assert plan.key_offsets.tolist() == [0, 5, 11, 18]


def test_joint_keys_are_image_then_text_of_each_window():
    plan = varlen.make_plan(Windows.from_lengths([2, 1], [3, 2], joint_text=True), 5, torch.device("cpu"))
    assert plan.key_rows.tolist() == [0, 1, 2, 5, 6, 3, 4, 7]
    assert plan.key_offsets.tolist() == [0, 5, 8]
    assert (plan.max_queries, plan.max_keys) == (2, 5)


def test_windows_without_keys_are_left_out_of_the_call():
    plan = varlen.make_plan(Windows.from_lengths([2, 3, 1], [4, 0, 5]), 9, torch.device("cpu"))
    assert plan.query_rows.tolist() == [0, 1, 5]
    assert plan.query_offsets.tolist() == [0, 2, 3]


def test_a_cpu_is_refused_with_the_remedy():
    windows = Windows.from_lengths([2], [3])
    q, k, v = torch.zeros(2, 1, 8), torch.zeros(3, 1, 8), torch.zeros(3, 1, 8)
    with pytest.raises(RuntimeError, match=r"needs CUDA tensors; got cpu \(use backend='bucketed'\)"):
        windowed_attention(q, k, v, windows, backend="varlen")


def test_torch_flash_takes_the_arguments_that_are_passed():
    """The installed torch's function is found and accepts our keywords (shapes only: its kernels need a GPU)."""
    flash = varlen._torch_flash()
    if flash is None:
        pytest.skip("this torch has no torch.nn.attention.varlen with grouped heads")
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32, device="meta")
    for heads, causal in ((4, False), (2, True)):
        q, k = torch.empty(5, heads, 64, device="meta"), torch.empty(5, 2, 64, device="meta")
        assert flash(q, k, k, offsets, offsets, 3, 3, 0.125, causal).shape == q.shape


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("joint_text", [False, True])
def test_varlen_on_a_gpu_equals_reference(joint_text):
    windows = Windows.from_lengths([30, 1, 7, 5, 200], [256, 0, 64, 9, 300], joint_text, history=2)
    shapes = [(windows.query_count, 4)] + [(windows.image_count, 2)] * 2 + [(windows.text_count, 2)] * 2 * joint_text
    leaves = [torch.randn(*shape, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    wide = [leaf.detach().float().requires_grad_() for leaf in leaves]
    expected = reference_attention(*wide[:3], windows, *wide[3:])
    actual = windowed_attention(*leaves[:3], windows, *leaves[3:], backend="varlen")
    upstream = torch.randn_like(expected)
    gradients = torch.autograd.grad(actual, leaves, upstream.bfloat16()), torch.autograd.grad(expected, wide, upstream)
    for a, b in zip((actual, *gradients[0]), (expected, *gradients[1]), strict=True):
        torch.testing.assert_close(a.float(), b, atol=0.03, rtol=0.03)
