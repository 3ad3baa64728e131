import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from proofs import OneTensorProofs, Sample
from torch.testing import assert_close

import dpa

_LAST = torch.channels_last
_WINDOWS = [(3, 2, 1), (2, 2, 0), (3, 1, 1), (5, 3, 2), (1, 1, 0), (16, 7, 8)]


def _sample(device, dtype, shape, *window):
    """Distinct values: a maximum of equal ones has no derivative."""
    count = torch.Size(shape).numel()
    values = (torch.randperm(count, device=device) - count // 2).to(dtype).view(shape)
    return Sample((values / 16, *window))


class TestMaxPool2d(OneTensorProofs):
    op = torch.ops.dpa.max_pool2d
    reference = dpa.reference.max_pool2d

    @staticmethod
    def samples(device, dtype):
        yield _sample(device, dtype, (2, 3, 5, 6), 3, 2, 1)
        yield _sample(device, dtype, (1, 2, 4, 7), 2, 2)
        yield _sample(device, dtype, (1, 1, 6, 3), 3, 1, 1)
        yield _sample(device, dtype, (0, 4, 3, 2), 2, 1)
        yield _sample(device, dtype, (2, 0, 3, 2), 2, 1)

    @staticmethod
    def rejected(device):
        x = torch.randn(2, 8, 5, 3, device=device)
        head = r"^dpa::max_pool2d: "
        yield head + r"input must have 4 dimensions.*got shape \[8, 5, 3\]", Sample((x[0], 3, 2))
        yield head + r"input must be float64, float32.*got Int", Sample((x.int(), 3, 2))
        yield head + r"kernel_size must be 1 to 16, got 17", Sample((x, 17, 2))
        yield head + r"stride must be at least 1, got 0", Sample((x, 3, 0))
        yield head + r"padding must be 0 to half of kernel_size, got 2", Sample((x, 3, 2, 2))
        yield head + r"input must be as large as a window.*\[2, 8, 5, 3\]", Sample((x, 4, 2))

    @staticmethod
    def batches(device):
        for batch, height in [(2, 5), (3, 8), (5, 16), (7, 11)]:
            yield _sample(device, torch.float32, (batch, 8, height, 6), 3, 2, 1)

    @staticmethod
    def drawn(d):
        kernel = d(st.integers(1, 4))
        padding, stride = d(st.integers(0, kernel // 2)), d(st.integers(1, 4))
        sides = [d(st.integers(max(kernel - 2 * padding, 1), 9)) for _ in "hw"]
        shape = d(st.integers(0, 3)), d(st.sampled_from([1, 3, 8])), *sides
        return Sample((d.tensor(*shape), kernel, stride, padding))


class TestChannelsLast(TestMaxPool2d):
    """The same on channels-last images, whose order the output keeps."""

    contiguous_output = False

    @staticmethod
    def samples(device, dtype):
        last = lambda x: x.contiguous(memory_format=_LAST)  # noqa: E731
        for shape in [(2, 8, 5, 6), (1, 24, 7, 4), (2, 6, 4, 4), (0, 8, 3, 3)]:
            yield _sample(device, dtype, shape, 3, 2, 1).map(last)


@pytest.mark.parametrize("window", _WINDOWS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_it_is_pytorchs(device, dtype, window):
    """Values, NaN, ties and gradients to the bit, in both orders."""
    for order in (_LAST, torch.contiguous_format):
        x = torch.randint(-9, 9, (3, 24, 19, 22), device=device).to(dtype)
        x[0, 3, 2, 2], x[1, 4] = float("nan"), float("-inf")
        x = x.contiguous(memory_format=order).requires_grad_()
        out = torch.ops.dpa.max_pool2d(x, *window)
        # Of the CPU: PyTorch's on CUDA gives the gradient of windows of -inf alone to pixel 0.
        on_cpu = x.detach().cpu().requires_grad_()
        expected = F.max_pool2d(on_cpu, *window)
        grad = torch.randint(-9, 9, out.shape, device=device).to(dtype)
        assert_close(out.cpu(), expected, rtol=0, atol=0, equal_nan=True)
        (got,) = torch.autograd.grad(out, x, grad)
        (want,) = torch.autograd.grad(expected, on_cpu, grad.cpu())
        assert_close(got.cpu(), want, rtol=0, atol=0)
        meta = torch.ops.dpa.max_pool2d(x.detach().to("meta"), *window)
        assert got.stride() == x.stride() and out.stride() == meta.stride()


def test_its_input_is_not_kept(device):
    """What it keeps for the backward is a byte a maximum."""
    kept = []
    x = torch.randn(2, 8, 12, 12, device=device, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda _: None):
        torch.ops.dpa.max_pool2d(x, 3, 2, 1)
    assert sum(t.untyped_storage().nbytes() for t in kept) <= 2 * 8 * 36 + x.element_size()


def test_autocast(device):
    x = torch.randn(2, 8, 5, 3, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert torch.equal(torch.ops.dpa.max_pool2d(x, 3, 2, 1), F.max_pool2d(x, 3, 2, 1))
