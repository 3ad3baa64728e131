import pytest
import torch
from hypothesis import strategies as st
from proofs import Calls, OpProofs, Sample, layouts

import dpa


def _sample(device, dtype, *shape, bias=0.25):
    # Away from zero, where relu has no derivative to compare with.
    x, y = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    return Sample((torch.where(x.abs() < 0.05, torch.ones_like(x), x), y, bias))


class TestFusedReluAdd(OpProofs):
    op = torch.ops.dpa.fused_relu_add
    reference = dpa.reference.fused_relu_add
    contiguous_output = False

    @staticmethod
    def samples(device, dtype):
        for shape in [(), (7,), (3, 5), (2, 3, 4), (0, 2), (1031,)]:
            yield _sample(device, dtype, *shape)

    @staticmethod
    def rejected(device):
        x = torch.randn(3, 4, device=device)
        head = r"^dpa::fused_relu_add: "
        yield (
            head + r"x must be float64, float32, float16 or bfloat16, got Int",
            Sample((x.int(), x)),
        )
        yield head + r"y must have the dtype of x \(Float\), got Double", Sample((x, x.double()))
        yield head + r"y must have the shape of x \[3, 4\], got \[4\]", Sample((x, x[0]))
        if device.type == "cuda":
            yield head + r"y must be on the device of x", Sample((x, x.cpu()))

    @staticmethod
    def batches(device):
        for batch, length in [(2, 5), (3, 8), (5, 16), (7, 11)]:
            yield _sample(device, torch.float32, batch, length)

    @staticmethod
    def drawn(d):
        shape = d.shape()
        return Sample((d.tensor(*shape), d.tensor(*shape), d(st.floats(-2, 2))))


def test_layouts(device):
    for x, y in layouts(device):
        got = torch.ops.dpa.fused_relu_add(x, y, -0.5)
        torch.testing.assert_close(got, torch.relu(x) + y - 0.5, rtol=1e-6, atol=1e-6)


def test_default_bias_and_special_values(device):
    values = torch.tensor(
        [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, -3.0, 3e38], device=device
    )
    x, y = values.repeat(7), values.repeat_interleave(7)
    got = torch.ops.dpa.fused_relu_add(x, y)
    torch.testing.assert_close(got, torch.relu(x) + y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("which", [(True, False), (False, True), (True, True)])
def test_a_gradient_that_nobody_asks_for_is_not_computed(device, which):
    """That of y is the output's own: nothing is computed at all."""
    x, y = torch.randn(2, 6, device=device).unbind()
    out = torch.ops.dpa.fused_relu_add(x.requires_grad_(which[0]), y.requires_grad_(which[1]))
    with Calls() as calls:
        out.backward(torch.ones_like(out))
    assert calls.names.count("aten.threshold_backward.default") == which[0]


def test_gradient_at_zero_is_pytorchs(device):
    x = torch.tensor([0.0, -0.0, 1.0, -1.0, float("nan")], device=device, requires_grad=True)
    torch.ops.dpa.fused_relu_add(x, torch.zeros_like(x)).sum().backward()
    ours, x.grad = x.grad, None
    torch.relu(x).sum().backward()
    torch.testing.assert_close(ours, x.grad, rtol=0, atol=0, equal_nan=True)
