import pytest
import torch
from hypothesis import strategies as st
from proofs import ConvolutionProofs, Sample
from strategies import SIZES, magnified, roundoff
from tolerances import tolerance
from torch.testing import assert_close

import dpa


def _sample(device, dtype, batch, c_in, c_out, height, width, k, groups=0, stride=1, **options):
    new = lambda *size: torch.randn(size, device=device, dtype=dtype)  # noqa: E731
    x, weight = new(batch, c_in, height, width), new(c_out, c_in, k, k) / 3
    padding = k // 2
    if options.get("bare"):
        return Sample((x, weight, None, None, None, None, groups, 1e-5, stride, padding, False))
    after = [(n + 2 * padding - k) // stride + 1 for n in (height, width)]
    residual = new(batch, c_out, *after) if options.get("residual") else None
    # ReLU is smooth where gradients are checked: few of these are near 0.
    given = (x, weight, new(c_out), new(c_out), new(c_out), residual)
    return Sample((*given, groups, 1e-5, stride, padding, options.get("relu", True)))


def _before_relu(sample):
    return dpa.reference.conv2d_norm_act(*sample.args[:10], False)


class TestConv2dNormAct(ConvolutionProofs):
    op = torch.ops.dpa.conv2d_norm_act
    reference = dpa.reference.conv2d_norm_act
    normalised = True

    @staticmethod
    def samples(device, dtype):
        yield _sample(device, dtype, 2, 3, 8, 5, 4, 3, 4, relu=False, residual=True)
        yield _sample(device, dtype, 1, 2, 6, 7, 6, 3, 0, 2, relu=False)
        yield _sample(device, dtype, 1, 2, 6, 5, 5, 1, 0, 2, bare=True)
        yield _sample(device, dtype, 2, 3, 4, 4, 5, 3, 2)

    @staticmethod
    def rejected(device):
        new = lambda *size: torch.randn(size, device=device)  # noqa: E731
        x, w, c = new(2, 3, 5, 6), new(8, 3, 3, 3), new(8)
        head = r"^dpa::conv2d_norm_act: "
        sized = lambda *sizes: Sample((x, w, None, None, None, None, 0, 1e-5, *sizes))  # noqa: E731
        yield from ConvolutionProofs.rejected_images(head, x, w, sized)
        # Channels last in the shape.
        yield head + r"weight must have shape .* with C_in = 5", Sample((x.permute(0, 2, 3, 1), w))
        yield head + r"bias must have shape \(C_out\) = \[8\], got \[3\]", Sample((x, w, c[:3]))
        yield head + r"scale must have shape", Sample((x, w, None, c[:3]))
        yield head + r"shift must have the dtype", Sample((x, w, None, None, c.double()))
        yield (
            head + r"residual must have shape \(B, C_out, H_out, W_out\) = \[2, 8, 3, 4\]",
            Sample((x, w, None, None, None, new(2, 8, 5, 6))),
        )
        at = lambda *rest: Sample((x, w, None, None, None, None, *rest))  # noqa: E731
        yield head + r"num_groups must be 0, or .*8 output channels, got 3", at(3)
        yield head + r"num_groups .* got -1", at(-1)
        yield head + r"eps must be at least 0", at(4, -1.0)

    @staticmethod
    def batches(device):
        for batch, height in [(2, 5), (3, 8), (5, 16), (7, 11)]:
            yield _sample(device, torch.float32, batch, 3, 8, height, 6, 3, 4, residual=True)

    @staticmethod
    def drawn(d):
        batch, height, width = d(SIZES), d(st.integers(1, 9)), d(st.integers(1, 9))
        groups, size, inputs = (d(st.integers(1, 4)) for _ in range(3))
        channels, taps = groups * size, d(st.sampled_from([1, 3]))
        stride, padding = d(st.integers(1, 2)), d(st.integers(taps // 2, taps))
        maybe = lambda *shape: d.tensor(*shape) if d(st.booleans()) else None  # noqa: E731
        factor = d.tensor(channels, low=-2.0, high=2.0) if d(st.booleans()) else None
        # Whether an infinite weight meets the padding, and so gives NaN, differs by convolution.
        x = d.convolved(batch, inputs, height, width, low=-2.0, high=2.0)
        weight = d.tensor(channels, inputs, taps, taps, low=-2.0, high=2.0)
        after = [(n + 2 * padding - taps) // stride + 1 for n in (height, width)]
        bias = d.tensor(channels, low=-2.0, high=2.0) if d(st.booleans()) else None
        args = (x, weight, bias, factor, maybe(channels), maybe(batch, channels, *after))
        norm = groups if d(st.booleans()) else 0
        return Sample((*args, norm, 1e-5, stride, padding, d(st.booleans())))

    @staticmethod
    def rounding(sample, finite):
        """On a GPU the convolution is kept in the dtype of its input."""
        args = finite.args
        gains = [t.abs().max().item() for t in finite.floating()[1:] if t.numel()]
        y = dpa.reference.conv2d_norm_act(*args[:3], stride=args[8], padding=args[9], relu=False)
        size = magnified(y, args[6]) if args[6] else y.abs().max().item()
        return 8 * roundoff(sample) * max(1.0, size) * max([1.0, *gains]) ** 2

    @staticmethod
    def clamped(exact):
        """ReLU's kink, in terms as large as those that make its input."""
        if not exact.args[10] or not exact.args[0].numel():
            return None
        y = _before_relu(exact)
        finite = exact.map(lambda x: x.abs())
        terms = _before_relu(Sample((*finite.args[:6], 0, *finite.args[7:])))
        if exact.args[6]:
            terms = terms * magnified(terms, exact.args[6]) + 10
        return (y + 100 * terms, -100 * terms), 0.0


@pytest.mark.parametrize("groups", [0, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_channels_last(device, groups, dtype):
    sample = _sample(device, dtype, 2, 3, 8, 9, 7, 3, groups, 2, residual=True)
    last = sample.map(
        lambda t: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t
    )
    got = torch.ops.dpa.conv2d_norm_act(*last.args)
    assert got.is_contiguous(memory_format=torch.channels_last)
    assert not got.is_contiguous()
    assert_close(got, torch.ops.dpa.conv2d_norm_act(*sample.args), **tolerance(dtype))


def test_it_is_a_folded_batch_norm(device):
    conv = torch.nn.Conv2d(3, 8, 3, 2, 1, bias=False, dtype=torch.float64, device=device)
    norm = torch.nn.BatchNorm2d(8, dtype=torch.float64, device=device).eval()
    for tensor in (norm.weight.data, norm.bias.data, norm.running_mean, norm.running_var):
        tensor.uniform_(0.5, 1.5)
    x = torch.randn(2, 3, 9, 7, dtype=torch.float64, device=device)
    scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
    shift = norm.bias - norm.running_mean * scale
    got = dpa.ops.conv2d_norm_act(x, conv.weight, None, scale, shift, stride=2, padding=1)
    assert_close(got, norm(conv(x)).relu())


@pytest.mark.parametrize("groups", [0, 4])
@pytest.mark.parametrize("given", ["bias", "shift", "scale", "all", "none"])
@pytest.mark.parametrize("residual", [False, True])
def test_a_weight_in_onednns_order(groups, given, residual):
    """One that is packed gives what the same weight gives as it is."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    sample = _sample(
        torch.device("cpu"), torch.float32, 2, 16, 32, 9, 7, 3, groups, 2, residual=residual
    )
    x, weight, bias, scale, shift, *rest = sample.args
    chosen = {
        "bias": (bias, None, None),
        "shift": (None, None, shift),
        "scale": (None, scale, None),
    }
    chosen.update(all=(bias, scale, shift), none=(None, None, None))
    want = torch.ops.dpa.conv2d_norm_act(x, weight, *chosen[given], *rest)
    packed = torch.ops.mkldnn._reorder_convolution_weight(
        weight, [1, 1], [2, 2], [1, 1], 1, list(x.shape)
    )
    for order in (torch.contiguous_format, torch.channels_last):
        got = torch.ops.dpa.conv2d_norm_act(
            x.contiguous(memory_format=order), packed, *chosen[given], *rest
        )
        assert got.is_contiguous(memory_format=order)
        assert_close(got, want, **tolerance(torch.float32))
    x[0, 0, 0, 0], x[1, 1, 4, 4] = torch.nan, torch.inf
    want = torch.ops.dpa.conv2d_norm_act(x, weight, *chosen[given], *rest)
    got = torch.ops.dpa.conv2d_norm_act(x, packed, *chosen[given], *rest)
    assert_close(got, want, equal_nan=True, **tolerance(torch.float32))
    with pytest.raises(RuntimeError, match=r"in oneDNN's order must come with .* Double"):
        torch.ops.dpa.conv2d_norm_act(x.double(), packed)


def test_empty_batch(device):
    for groups in (0, 4):
        sample = _sample(device, torch.float32, 0, 3, 8, 5, 4, 3, groups, residual=True)
        assert torch.ops.dpa.conv2d_norm_act(*sample.args).shape == (0, 8, 5, 4)


def test_autocast(device):
    sample = _sample(device, torch.float32, 2, 3, 8, 5, 4, 3, 4, residual=True)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        got = torch.ops.dpa.conv2d_norm_act(*sample.args)
    assert got.dtype == torch.bfloat16
    x, *parameters, residual = sample.args[:6]
    expected = torch.ops.dpa.conv2d_norm_act(
        x.bfloat16(), *parameters, residual.bfloat16(), *sample.args[6:]
    )
    assert_close(got, expected, rtol=0, atol=0)
