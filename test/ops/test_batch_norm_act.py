import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from proofs import OpProofs, Sample
from strategies import SIZES, magnified, roundoff
from tolerances import gradient_tolerance, tolerance
from torch.testing import assert_close

import dpa

_LAST = torch.channels_last


def _sample(device, dtype, shape, affine=True, residual=False, relu=True, offset=1.0):
    new = lambda *size: torch.randn(size, device=device, dtype=dtype)  # noqa: E731
    weight, bias = (new(shape[1]), new(shape[1])) if affine else (None, None)
    added = new(*shape) if residual else None
    return Sample((new(*shape) * 2 + offset, weight, bias, 1e-5, added, relu))


def _images_last(sample):
    return sample.map(lambda x: x.contiguous(memory_format=_LAST) if x.dim() == 4 else x)


def _before_relu(sample):
    return dpa.reference.batch_norm_act(*sample.args[:5], False)


def _over_batch(x):
    """The statistics' rows side by side, as one group."""
    return x.movedim(1, 0).flatten(1).unsqueeze(0)


class TestBatchNormAct(OpProofs):
    op = torch.ops.dpa.batch_norm_act
    reference = dpa.reference.batch_norm_act
    normalised = True

    @staticmethod
    def samples(device, dtype):
        # ReLU is smooth where gradients are checked: few of these are near 0.
        yield _sample(device, dtype, (2, 8, 5, 3), residual=True)
        yield _sample(device, dtype, (3, 6, 16))
        yield _sample(device, dtype, (2, 4, 3, 7), affine=False)
        yield _sample(device, dtype, (9, 12), residual=True, relu=False)
        yield _sample(device, dtype, (1, 2, 70), relu=False)
        yield _sample(device, dtype, (0, 4, 3, 2), residual=True)
        yield _sample(device, dtype, (2, 4, 0, 2))

    @staticmethod
    def rejected(device):
        x, c = torch.randn(2, 8, 5, 3, device=device), torch.randn(8, device=device)
        head = r"^dpa::batch_norm_act: "
        yield head + r"input must have at least 2 dimensions.*got shape \[8\]", Sample((c,))
        yield head + r"input must be float64, float32.*got Int", Sample((x.int(),))
        yield head + r"weight must have shape \(C\) = \[8\], got \[7\]", Sample((x, c[:7]))
        yield head + r"bias must have the dtype of input", Sample((x, c, c.double()))
        yield head + r"eps must be at least 0, got -1", Sample((x, c, c, -1.0))
        yield head + r"residual must have the shape of input", Sample((x,), {"residual": x[:1]})
        if device.type == "cuda":
            yield head + r"weight must be on the device of input", Sample((x, c.cpu()))

    @staticmethod
    def batches(device):
        for batch, height in [(2, 5), (3, 8), (5, 16), (7, 11)]:
            yield _sample(device, torch.float32, (batch, 8, height, 6), residual=True)

    @staticmethod
    def drawn(d):
        channels = d(st.sampled_from([1, 2, 3, 5, 8, 16]))
        shape = (d(SIZES), channels, *d.shape(most=2))
        weight = d.tensor(channels, low=-2.0, high=2.0) if d(st.booleans()) else None
        bias = d.tensor(channels) if d(st.booleans()) else None
        residual = d.tensor(*shape) if d(st.booleans()) else None
        return Sample((d.tensor(*shape), weight, bias, 1e-5, residual, d(st.booleans())))

    @staticmethod
    def rounding(sample, finite):
        gains = [t.abs().max().item() for t in finite.floating()[1:] if t.numel()]
        eps, rows = roundoff(sample, accumulated=True), _over_batch(finite.args[0])
        return 8 * eps * magnified(rows, rows.shape[1] or 1) * max([1.0, *gains]) ** 2

    @staticmethod
    def clamped(exact):
        """ReLU's kink, in terms as large as those that make its input."""
        if not exact.args[5] or not exact.args[0].numel():
            return None
        y, rows = _before_relu(exact), _over_batch(exact.args[0])
        terms = torch.full_like(y, magnified(rows, rows.shape[1] or 1) + 10)
        for added in (exact.args[2], exact.args[4]):
            terms = terms if added is None else terms + added.abs().max()
        return (y + 100 * terms, -100 * terms), 0.0

    @staticmethod
    def takes(sample, argument, how):
        return how == "rank" and argument is sample.args[0]


class TestChannelsLast(OpProofs):
    """The same on channels-last images, whose order the output keeps."""

    op = torch.ops.dpa.batch_norm_act
    reference = dpa.reference.batch_norm_act
    contiguous_output = False
    rejected = staticmethod(TestBatchNormAct.rejected)

    @staticmethod
    def samples(device, dtype):
        for sample in (
            _sample(device, dtype, (3, 64, 5, 7), residual=True),
            _sample(device, dtype, (2, 64, 21, 23)),  # a cluster of blocks a slice
            _sample(device, dtype, (5, 96, 3, 3), residual=True, relu=False),
            _sample(device, dtype, (2, 24, 4, 3), affine=False),  # columns of one vector
            _sample(device, dtype, (2, 6, 4, 2)),  # no whole vectors
            _sample(device, dtype, (0, 16, 3, 2)),
        ):
            yield _images_last(sample)

    @staticmethod
    def batches(device):
        for sample in TestBatchNormAct.batches(device):
            yield _images_last(sample)

    def test_order(self, device):
        """Output and gradients are in the order of the input; Meta says so too."""
        for sample in self.samples(device, torch.float32):
            ours = sample.requiring_grad()
            out = torch.ops.dpa.batch_norm_act(*ours.args)
            out.backward(torch.randn(out.shape, device=device))
            meta = sample.map(lambda x: x.to("meta"))
            expected = sample.args[0].stride()
            assert torch.ops.dpa.batch_norm_act(*meta.args).stride() == expected
            assert out.stride() == ours.args[0].grad.stride() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_random_channels_last(device, dtype):
    """Values, statistics and all gradients against float64, at random sizes of any plan."""
    random = torch.Generator().manual_seed(7)
    draw = lambda low, high: int(torch.randint(low, high, (), generator=random))  # noqa: E731
    on_gpu = device.type == "cuda"
    for _ in range(60 if on_gpu else 4):
        channels = 8 * draw(1, 80 if on_gpu else 5)
        shape = draw(2, 40 if on_gpu else 4), channels, draw(1, 50), draw(1, 20)
        residual, relu = draw(0, 2) > 0, draw(0, 3) > 0
        sample = _images_last(_sample(device, dtype, shape, True, residual, relu, 10.0))
        x, weight, bias, eps, added, _ = sample.requiring_grad().args
        weight, bias = (t.detach().float().requires_grad_() for t in (weight, bias))
        leaves = [t for t in (x, weight, bias, added) if t is not None]
        out, *found = torch.ops.dpa.batch_norm_act_forward(x, weight, bias, eps, added, relu)
        wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
        more = wide[3] if residual else None
        exact = dpa.reference.batch_norm_act(*wide[:3], eps, more, relu)
        assert_close(out, exact.to(dtype), **tolerance(dtype))
        var, mean = torch.var_mean(wide[0], (0, 2, 3), correction=0)
        assert_close(found, [mean.float(), var.float()], rtol=1e-5, atol=1e-5)
        grad = torch.randn_like(out)
        if relu:  # at its kink rounding decides
            off = (out > 0) != (exact > 0)
            assert off.sum() <= 1e-5 * off.numel() + 2
            grad = torch.where(off, 0, grad)
        got = torch.autograd.grad(out, leaves, grad)
        expected = torch.autograd.grad(exact, wide, grad.double())
        for g, e, leaf in zip(got, expected, leaves, strict=True):
            assert g.dtype == leaf.dtype and g.shape == leaf.shape
            limits = gradient_tolerance(g.dtype)
            size = e.abs().max().item() if g.dim() == 1 else 1.0  # sums over batch and image
            limits["atol"] *= max(1.0, size)
            assert_close(g, e.to(g.dtype), **limits)


def test_repeats_bit_for_bit(device):
    """Sums over batch and image are taken in one order."""
    x = torch.randn(70, 64, 11, 11, device=device).contiguous(memory_format=_LAST)
    weight, grad = torch.randn(64, device=device), torch.randn_like(x)

    def run():
        out = torch.ops.dpa.batch_norm_act_forward(x, weight, weight, 1e-5, x, True)
        backward = torch.ops.dpa.batch_norm_act_backward
        return *out, *backward(grad, x, *out[1:], weight, weight, 1e-5, x, True, [True] * 4)

    for a, b in zip(run(), run(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_mean_far_from_zero(device, dtype):
    """Statistics are of the values as they are stored, with nothing lost to their mean."""
    x = (torch.randn(2, 64, 42, 42, device=device) + 1000).to(dtype)
    x = x.contiguous(memory_format=_LAST)
    got = torch.ops.dpa.batch_norm_act(x, relu=False)
    expected = dpa.reference.batch_norm_act(x.double(), relu=False)
    if dtype == torch.float32:  # one rounding of a mean near 1000, over a deviation of 1
        assert_close(got.double(), expected, rtol=1e-4, atol=2e-4)
    else:
        assert_close(got, expected.to(dtype), **tolerance(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nan_and_infinity_stay_in_their_channel(device, dtype):
    for bad in (float("nan"), float("inf")):
        x = torch.randn(2, 64, 9, 5, device=device, dtype=dtype).contiguous(memory_format=_LAST)
        x[1, 18, 3, 2] = bad
        got = torch.ops.dpa.batch_norm_act(x)
        assert torch.equal(got.isnan(), dpa.reference.batch_norm_act(x).isnan())
        assert got[:, 18].isnan().all() and got.isnan().sum() == 2 * 45


def test_it_is_pytorchs_module(device):
    """At the sizes of ResNet-18 on 64 x 96 images, PyTorch's own ops."""
    for channels, height in [(64, 32), (64, 16), (128, 8), (256, 4), (512, 2)]:
        x, added = (torch.randn(3, channels, height, height + 1, device=device) for _ in "xr")
        weight, bias = (torch.randn(channels, device=device) for _ in "wb")
        expected = F.batch_norm(x, None, None, weight, bias, training=True) + added
        last = [t.contiguous(memory_format=_LAST) for t in (x, added)]
        got = dpa.ops.batch_norm_act(last[0], weight, bias, residual=last[1])
        assert_close(got, expected.relu(), rtol=1e-5, atol=1e-5)


def test_autocast(device):
    x, added = torch.randn(2, 8, 5, 3, device=device), torch.randn(2, 8, 5, 3, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        got = torch.ops.dpa.batch_norm_act(x, torch.ones(8, device=device), residual=added)
    assert got.dtype == torch.bfloat16
    expected = torch.ops.dpa.batch_norm_act(x.bfloat16(), residual=added.bfloat16())
    assert_close(got, expected, rtol=0, atol=0)
