import pytest
import torch
from hypothesis import strategies as st
from proofs import OpProofs, Sample
from strategies import SIZES, roundoff
from tolerances import gradient_tolerance, tolerance

import dpa


def _sample(device, dtype, batch, c_in, c_out, length, k, *rest, bias=True):
    new = lambda *size: torch.randn(size, device=device, dtype=dtype)  # noqa: E731
    transposed = len(rest) == 3 and rest[2]
    weight = new(c_in, c_out, k) if transposed else new(c_out, c_in, k)
    return Sample((new(batch, c_in, length), weight / 3, new(c_out) if bias else None, *rest))


class TestConv1d(OpProofs):
    op = torch.ops.dpa.conv1d
    reference = dpa.reference.conv1d

    @staticmethod
    def samples(device, dtype):
        yield _sample(device, dtype, 2, 3, 4, 7, 3, 1, 1)
        yield _sample(device, dtype, 1, 2, 6, 8, 3, 2, 1)
        yield _sample(device, dtype, 2, 4, 3, 4, 4, 2, 1, True, bias=False)
        yield _sample(device, dtype, 3, 1, 2, 5, 5, 1, 2, bias=False)
        yield _sample(device, dtype, 2, 3, 2, 3, 2, 3, 0, True)

    @staticmethod
    def rejected(device):
        new = lambda *size: torch.randn(size, device=device)  # noqa: E731
        x, w, c = new(2, 3, 5), new(8, 3, 3), new(8)
        head = r"^dpa::conv1d: "
        yield head + r"input must have 3 dimensions", Sample((x[0], w))
        yield (
            head + r"weight must have shape \(C_out, C_in, k\) with C_in = 3, got \[8, 2, 3\]",
            Sample((x, new(8, 2, 3))),
        )
        yield (
            head + r"weight must have shape \(C_in, C_out, k\) with C_in = 3, got \[8, 3, 3\]",
            Sample((x, w, None, 1, 0, True)),
        )
        yield head + r"weight must have at least one tap, got 0", Sample((x, new(8, 3, 0)))
        yield head + r"weight must have the dtype of input.*got Half", Sample((x, w.half()))
        yield head + r"bias must have shape \(C_out\) = \[8\], got \[3\]", Sample((x, w, c[:3]))
        yield head + r"bias must have the dtype of input", Sample((x, w, c.double()))
        yield head + r"stride must be at least 1, got 0", Sample((x, w, c, 0))
        yield head + r"padding must be at least 0, got -1", Sample((x, w, c, 1, -1))
        yield head + r"input must be long enough .*got length 2", Sample((x[..., :2], w))
        if device.type == "cuda":
            yield head + r"weight must be on the device of input", Sample((x, w.cpu()))

    @staticmethod
    def batches(device):
        for batch, length in [(2, 5), (3, 8), (5, 16), (7, 11)]:
            yield _sample(device, torch.float32, batch, 3, 8, length, 3, 1, 1)

    @staticmethod
    def drawn(d):
        """Every stride and padding; inputs long enough for one output."""
        batch, inputs, outputs = d(SIZES), d(st.integers(1, 9)), d(st.integers(1, 9))
        taps, stride, padding = d(st.integers(1, 5)), d(st.integers(1, 3)), d(st.integers(0, 2))
        transposed = d(st.booleans(), "transposed")
        least = 1 + max(0, 2 * padding - taps + stride) // stride if transposed else taps
        length = d(st.integers(least, least + 16))
        shape = (inputs, outputs, taps) if transposed else (outputs, inputs, taps)
        weight = d.tensor(*shape, low=-2.0, high=2.0)
        bias = d.tensor(outputs) if d(st.booleans()) else None
        # As with lltm: PyTorch's convolutions in bfloat16 on the CPU make NaN of infinity.
        limits = {"low": -3.0, "high": 3.0} if d.dtype == torch.bfloat16 else {}
        input = d.convolved(batch, inputs, length, **limits)
        return Sample((input, weight, bias, stride, padding, transposed))

    @staticmethod
    def rounding(sample, finite):
        terms = [None if x is None else x.abs() for x in finite.args[:3]]
        largest = dpa.reference.conv1d(*terms, *finite.args[3:]).max().item()
        return roundoff(sample, accumulated=True) * largest


def in_time_order(x):
    """The same values as (B, T, C) in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


# batch, channels in and out, length, taps, stride, padding, transposed
SHAPES = [
    (2, 16, 24, 8, 5, 1, 2, False),
    (3, 5, 7, 16, 3, 2, 1, False),
    (2, 24, 16, 6, 4, 2, 1, True),
    (2, 2, 9, 12, 1, 1, 0, False),
    (1, 7, 1, 3, 5, 1, 2, False),
    (4, 1, 8, 1, 3, 1, 1, False),
    (70, 64, 136, 4, 5, 1, 2, False),
    (2, 9, 5, 300, 3, 1, 1, False),
    (2, 3, 4, 9, 2, 1, 0, False),  # taps that the GEMMs are not compiled for
    (2, 3, 4, 9, 4, 3, 1, True),  # nor this stride
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_channels_last_values_gradients_and_order(device, dtype, shape):
    """Against float64, parameters being float32 beside 16-bit inputs."""
    batch, c_in, c_out, length, k, stride, padding, transposed = shape
    x = in_time_order(torch.randn(batch, c_in, length, device=device, dtype=dtype))
    size = (c_in, c_out, k) if transposed else (c_out, c_in, k)
    # Values that the input's dtype can hold: the GEMMs read the weight in it.
    weight = (torch.randn(size, device=device) / (c_in * k) ** 0.5).to(dtype).float()
    bias = torch.randn(c_out, device=device).to(dtype).float()
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    out = torch.ops.dpa.conv1d(*leaves, stride, padding, transposed)
    grad = torch.randn_like(out)
    out.backward(grad)
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    expected = dpa.reference.conv1d(*exact, stride, padding, transposed)
    expected.backward(grad.double())

    assert out.dtype == dtype and out.stride() == in_time_order(out).stride()
    assert leaves[0].grad.stride() == x.stride()
    torch.testing.assert_close(out, expected.to(dtype), **tolerance(dtype))
    for leaf, reference in zip(leaves, exact, strict=True):
        assert leaf.grad.dtype == leaf.dtype
        torch.testing.assert_close(
            leaf.grad, reference.grad.to(leaf.dtype), **gradient_tolerance(dtype)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_taps_that_meet_nothing_but_padding(device, dtype, mapped, transposed):
    """Their gradients are zero: some of PyTorch's convolutions leave them unwritten."""
    gradient = torch.func.grad(
        lambda weight, x: torch.ops.dpa.conv1d(x, weight, None, 3, 1, transposed).float().sum()
    )
    weight = torch.randn(4, *((16, 8, 3) if transposed else (8, 16, 3)), device=device, dtype=dtype)
    x = torch.randn(4, 5, 1, 16, device=device, dtype=dtype).transpose(2, 3)
    for _ in range(20):
        # What was freed before is found in memory that is taken and not written.
        del [torch.full((2**n,), 14848.0, dtype=dtype, device=device) for n in range(5, 17)][:]
        if mapped:
            got = torch.vmap(gradient)(weight, x)
        else:
            got = torch.stack([gradient(w, each) for w, each in zip(weight, x, strict=True)])
        assert torch.all(got[..., ::2] == 0) and torch.all(got[..., 1] != 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_tensors_may_begin_anywhere(device, dtype, transposed):
    """One element into their storage, aligned to their own size alone."""

    def moved(x):
        storage = x.new_full((x.numel() + 1,), torch.nan)
        return storage[1:].as_strided(x.shape, x.stride(), 1).copy_(x)

    batch, channels, length, k = 3, 16, 8, 4
    x = in_time_order(torch.randn(batch, channels, length, device=device, dtype=dtype))
    weight = torch.randn(channels, channels, k, device=device, dtype=dtype) / (channels * k) ** 0.5
    tensors = [x, weight, torch.randn(channels, device=device, dtype=dtype)]
    assert all(moved(t).data_ptr() % 16 for t in tensors)
    results = []
    for place in (torch.clone, moved):
        leaves = [place(t).requires_grad_() for t in tensors]
        out = torch.ops.dpa.conv1d(*leaves, 1, 1, transposed)
        results.append([out, *torch.autograd.grad(out, leaves, place(torch.ones_like(out)))])
    for here, there in zip(*results, strict=True):
        torch.testing.assert_close(there, here, **gradient_tolerance(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_infinities_and_nan_go_through(hopper, dtype, transposed):
    """GEMMs of channels-last tensors; cuDNN makes 0 of a negative infinity in float16."""
    batch, channels, length, k = 5, 24, 16, 5
    x = in_time_order(torch.randn(batch, channels, length, device=hopper, dtype=dtype))
    for i, value in enumerate((torch.inf, -torch.inf, torch.nan)):
        x[i, 7, 6] = value
    x[3, 2, 5], x[3, 9, 4] = torch.inf, -torch.inf  # NaN where they meet, but for equal signs
    weight = torch.randn(channels, channels, k, device=hopper, dtype=dtype) / (channels * k) ** 0.5
    got = torch.ops.dpa.conv1d(x, weight, None, 1, 2, transposed)
    expected = dpa.reference.conv1d(x.double(), weight.double(), None, 1, 2, transposed).to(dtype)
    for kind in (torch.isposinf, torch.isneginf, torch.isnan):
        assert torch.equal(kind(got), kind(expected)) and kind(got).any()
    torch.testing.assert_close(got, expected, equal_nan=True, **tolerance(dtype))
