import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from launched import launched
from proofs import ConvolutionProofs, Sample
from strategies import SIZES, roundoff
from tolerances import gradient_tolerance, tolerance
from torch.testing import assert_close

import dpa

_LAST = torch.channels_last


def _sample(device, dtype, batch, c_in, c_out, height, width, taps, *sizes):
    new = lambda *size: torch.randn(size, device=device, dtype=dtype)  # noqa: E731
    return Sample((new(batch, c_in, height, width), new(c_out, c_in, *taps) / 3, *sizes))


class TestConv2d(ConvolutionProofs):
    op = torch.ops.dpa.conv2d
    reference = dpa.reference.conv2d

    @staticmethod
    def samples(device, dtype):
        yield _sample(device, dtype, 2, 3, 8, 5, 4, (3, 3), 1, 1)
        yield _sample(device, dtype, 1, 2, 6, 7, 6, (3, 2), 2, 1)
        yield _sample(device, dtype, 2, 3, 8, 9, 8, (5, 5), 2, 2)
        yield _sample(device, dtype, 1, 4, 3, 5, 5, (1, 1))

    @staticmethod
    def rejected(device):
        new = lambda *size: torch.randn(size, device=device)  # noqa: E731
        x, w = new(2, 3, 5, 6), new(8, 3, 3, 3)
        sized = lambda *sizes: Sample((x, w, *sizes))  # noqa: E731
        return ConvolutionProofs.rejected_images(r"^dpa::conv2d: ", x, w, sized)

    @staticmethod
    def batches(device):
        for batch, height in [(2, 5), (3, 8), (5, 16), (7, 11)]:
            yield _sample(device, torch.float32, batch, 3, 8, height, 6, (3, 3), 1, 1)

    @staticmethod
    def drawn(d):
        batch, height, width = d(SIZES), d(st.integers(1, 9)), d(st.integers(1, 9))
        inputs, channels = d(st.integers(1, 5)), d(st.sampled_from([1, 3, 8]))
        taps, stride = d(st.sampled_from([1, 3, 5, 7])), d(st.integers(1, 3))
        padding = d(st.integers(taps // 2, taps))
        # Whether an infinite weight meets the padding, and so gives NaN, differs by convolution.
        x = d.convolved(batch, inputs, height, width, low=-2.0, high=2.0)
        weight = d.tensor(channels, inputs, taps, taps, low=-2.0, high=2.0)
        return Sample((x, weight, stride, padding))

    @staticmethod
    def rounding(sample, finite):
        terms = [x.abs() for x in finite.args[:2]]
        largest = dpa.reference.conv2d(*terms, *finite.args[2:]).max().item()
        return roundoff(sample, accumulated=True) * largest


# batch, channels in and out, height, width, taps, padding; the stride is 2
FEW_CHANNELS = [
    (2, 3, 64, 84, 84, 7, 3),
    (3, 3, 64, 37, 51, 7, 3),
    (1, 1, 32, 20, 9, 7, 3),
    (5, 4, 96, 33, 70, 7, 3),
    (2, 2, 8, 64, 65, 5, 2),
    (2, 3, 136, 40, 44, 8, 0),
    (2, 3, 64, 31, 30, 6, 5),
    (1, 3, 64, 5, 5, 7, 3),
    (40, 3, 64, 9, 200, 7, 3),
    (2, 3, 63, 12, 12, 7, 3),  # not those
    (2, 3, 64, 12, 12, 3, 1),
    (2, 6, 64, 12, 12, 7, 3),
]


# batch, channels in and out, height, width, stride, padding; filters of 3 x 3
WGRADS = [
    (8, 64, 64, 12, 16, 1, 1),
    (3, 32, 64, 7, 9, 1, 1),
    (9, 96, 192, 5, 6, 1, 1),
    (16, 64, 128, 21, 21, 2, 1),
    (5, 128, 128, 11, 11, 1, 1),
    (2, 160, 256, 9, 14, 2, 0),
    (17, 64, 64, 3, 3, 1, 2),
    (1, 64, 320, 10, 13, 1, 0),
    (2, 64, 192, 9, 8, 2, 1),  # not those
    (2, 48, 64, 9, 8, 1, 1),
    (2, 64, 1408, 3, 4, 1, 1),
]


def _in_order(x, last):
    return x.contiguous(memory_format=_LAST if last else torch.contiguous_format)


def _compare(device, dtype, order, shape, weight_shape, *sizes):
    """Values and the weight's gradient against float64, on fresh memory; and their orders."""
    # Values that TF32 holds: ten bits of fraction.
    narrow = lambda t: t.to(torch.bfloat16).to(dtype)  # noqa: E731
    x = narrow(torch.randn(shape, device=device))
    weight = narrow(torch.randn(weight_shape, device=device) / weight_shape[1:].numel() ** 0.5)
    x = _in_order(x, order in ("input", "both"))
    weight = _in_order(weight, order in ("weight", "both")).requires_grad_()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        out = torch.ops.dpa.conv2d(x, weight, *sizes)
        grad = narrow(torch.randn_like(out))
        (got,) = torch.autograd.grad(out, weight, grad)
    exact = weight.detach().double().requires_grad_()
    expected = dpa.reference.conv2d(x.double(), exact, *sizes)
    (want,) = torch.autograd.grad(expected, exact, grad.double())
    assert_close(out.double(), expected, **tolerance(dtype))
    allowed = gradient_tolerance(dtype)
    assert_close(got.double(), want, **allowed | {"atol": allowed["atol"] * want.std().item()})
    meta = torch.ops.dpa.conv2d(x.to("meta"), weight.detach().to("meta"), *sizes)
    assert out.stride() == meta.stride() and got.stride() == weight.stride()


@pytest.mark.parametrize("order", ["weight", "input", "both", "neither"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", FEW_CHANNELS, ids=str)
def test_few_channels(device, dtype, shape, order):
    batch, c_in, c_out, height, width, taps, padding = shape
    weight = torch.Size((c_out, c_in, taps, taps))
    _compare(device, dtype, order, (batch, c_in, height, width), weight, 2, padding)


@pytest.mark.parametrize("order", ["weight", "both", "neither"])
@pytest.mark.parametrize("shape", WGRADS, ids=str)
def test_the_gradient_of_weights_of_3_x_3(device, shape, order):
    batch, c_in, c_out, height, width, *sizes = shape
    weight = torch.Size((c_out, c_in, 3, 3))
    _compare(device, torch.float32, order, (batch, c_in, height, width), weight, *sizes)


def _with_kernel(shapes, tail):
    """Each shape, and whether it is one of those before the last ``tail``, which have a kernel."""
    return [(shape, i < len(shapes) - tail) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape,served", _with_kernel(FEW_CHANNELS, 3), ids=str)
def test_few_channels_have_kernels(cuda, shape, served, dtype, tf32):
    if torch.cuda.get_device_capability() not in ((8, 0), (9, 0)):
        pytest.skip("elsewhere there may be too little shared memory")
    batch, c_in, c_out, height, width, taps, padding = shape
    x = torch.randn(batch, c_in, height, width, device=cuda, dtype=dtype)
    weight = torch.randn(c_out, c_in, taps, taps, device=cuda, dtype=dtype)
    weight = weight.to(memory_format=_LAST)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=tf32):
        out = torch.ops.dpa.conv2d(x, weight, 2, padding)
        grad = torch.randn_like(out)
        forward = lambda: torch.ops.dpa.conv2d(x, weight, 2, padding)  # noqa: E731
        backward = lambda: torch.ops.dpa.conv2d_backward(  # noqa: E731
            grad, x, weight, 2, padding, (False, True)
        )
        for call in (forward, backward):
            expected = served and (tf32 or dtype != torch.float32)
            assert ("FewChannels" in launched(call)) == expected


@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("shape,served", _with_kernel(WGRADS, 3), ids=str)
def test_weights_of_3_x_3_have_a_kernel(cuda, shape, served, tf32):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Hopper's")
    batch, c_in, c_out, height, width, *sizes = shape
    x = torch.randn(batch, c_in, height, width, device=cuda).to(memory_format=_LAST)
    weight = torch.randn(c_out, c_in, 3, 3, device=cuda).to(memory_format=_LAST)
    grad = torch.randn_like(torch.ops.dpa.conv2d(x, weight, *sizes))
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=tf32):
        ran = launched(
            lambda: torch.ops.dpa.conv2d_backward(grad, x, weight, *sizes, (False, True))
        )
    assert ("image_wgrad_kernel" in ran) == (served and tf32)


def test_what_lies_beside_a_window_is_not_read(cuda):
    """Infinity and NaN reach what reads them, and nothing else: neither padded taps nor edges."""
    x = torch.randn(2, 3, 21, 46, device=cuda)
    x[0, 1, 10, 20], x[1, 2, 5, 45], x[1, 0, 20, 0] = float("nan"), float("inf"), float("-inf")
    weight = torch.randn(64, 3, 7, 7, device=cuda).to(memory_format=_LAST)
    grad = torch.randn(2, 64, 11, 23, device=cuda)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        out = torch.ops.dpa.conv2d(x, weight, 2, 3)
        _, got = torch.ops.dpa.conv2d_backward(grad, x, weight, 2, 3, (False, True))
    x, weight, grad = (t.cpu().double() for t in (x, weight, grad))
    expected = F.conv2d(x, weight, None, 2, 3)
    want = torch.nn.grad.conv2d_weight(x, weight.shape, grad, 2, 3)
    for found, right in ((out, expected), (got, want)):
        assert 0 < right.isfinite().sum() < right.numel()
        assert torch.equal(found.isfinite().cpu(), right.isfinite())


@pytest.mark.parametrize("shape", [*FEW_CHANNELS[:4], *WGRADS[:4]], ids=str)
def test_bits_repeat(cuda, shape):
    batch, c_in, c_out, height, width, first, padding = shape
    taps, stride = (first, 2) if c_in <= 4 else (3, first)
    x = torch.randn(batch, c_in, height, width, device=cuda).to(memory_format=_LAST)
    weight = torch.randn(c_out, c_in, taps, taps, device=cuda).to(memory_format=_LAST)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        grad = torch.randn_like(torch.ops.dpa.conv2d(x, weight, stride, padding))
        runs = [
            torch.ops.dpa.conv2d_backward(grad, x, weight, stride, padding, (False, True))[1]
            for _ in range(3)
        ]
    assert all(torch.equal(run, runs[0]) for run in runs)


@pytest.mark.parametrize("last", [False, True])
def test_autocast(device, last):
    x = torch.randn(2, 3, 12, 12, device=device)
    # It is read in bfloat16.
    weight = _in_order(torch.randn(8, 3, 7, 7, device=device).bfloat16().float(), last)
    with torch.autocast(device.type, torch.bfloat16):
        out = torch.ops.dpa.conv2d(x, weight.requires_grad_(), 2, 3)
    (grad,) = torch.autograd.grad(out.float().sum(), weight)
    assert out.dtype == torch.bfloat16 and grad.dtype == torch.float32
    assert grad.stride() == weight.stride()
    expected = dpa.reference.conv2d(x.bfloat16(), weight.detach(), 2, 3)
    assert_close(out, expected, **tolerance(torch.bfloat16))


def test_a_slice_of_a_weight_keeps_its_order(device):
    """The order is asked of the weight as it is given, on Meta and where it runs."""
    x = torch.randn(2, 3, 12, 12, device=device, dtype=torch.bfloat16)
    whole = torch.randn(8, 6, 7, 7, device=device).to(memory_format=_LAST)
    out = torch.ops.dpa.conv2d(x, whole[:, :3], 2, 3)
    meta = torch.ops.dpa.conv2d(x.to("meta"), whole.to("meta")[:, :3], 2, 3)
    assert out.stride() == meta.stride()
