import pytest
import torch
from hypothesis import strategies as st
from proofs import OpProofs, Sample
from strategies import SIZES, magnified, roundoff
from tolerances import gradient_tolerance, tolerance
from torch.testing import assert_close

import dpa

_LAST = torch.channels_last


def _sample(device, dtype, shape, groups, affine=True, residual=False, relu=True, offset=1.0):
    new = lambda *size: torch.randn(size, device=device, dtype=dtype)  # noqa: E731
    weight, bias = (new(shape[1]), new(shape[1])) if affine else (None, None)
    added = new(*shape) if residual else None
    return Sample((new(*shape) * 2 + offset, groups, weight, bias, 1e-5, added, relu))


def _images_last(sample):
    return sample.map(lambda x: x.contiguous(memory_format=_LAST) if x.dim() == 4 else x)


def _before_relu(sample):
    return dpa.reference.group_norm_act(*sample.args[:6], False)


class TestGroupNormAct(OpProofs):
    op = torch.ops.dpa.group_norm_act
    reference = dpa.reference.group_norm_act
    normalised = True

    @staticmethod
    def samples(device, dtype):
        # ReLU is smooth where gradients are checked: few of these are near 0.
        yield _sample(device, dtype, (2, 8, 5, 3), 4, residual=True)
        yield _sample(device, dtype, (3, 6, 16), 3)
        yield _sample(device, dtype, (2, 4, 3, 7), 1, affine=False)
        yield _sample(device, dtype, (3, 12), 2, residual=True, relu=False)
        yield _sample(device, dtype, (1, 2, 70), 2, relu=False)
        yield _sample(device, dtype, (0, 4, 3, 2), 2, residual=True)
        yield _sample(device, dtype, (2, 4, 0, 2), 2)

    @staticmethod
    def rejected(device):
        x, c = torch.randn(2, 8, 5, 3, device=device), torch.randn(8, device=device)
        head = r"^dpa::group_norm_act: "
        yield head + r"input must have at least 2 dimensions.*got shape \[8\]", Sample((c, 2))
        yield head + r"input must be float64, float32.*got Int", Sample((x.int(), 2))
        yield head + r"num_groups must be positive and divide the 8 channels, got 3", Sample((x, 3))
        yield head + r"weight must have shape \(C\) = \[8\], got \[7\]", Sample((x, 2, c[:7]))
        yield head + r"bias must have the dtype of input", Sample((x, 2, c, c.double()))
        yield head + r"eps must be at least 0, got -1", Sample((x, 2, c, c, -1.0))
        yield head + r"residual must have the shape of input", Sample((x, 2), {"residual": x[:1]})
        if device.type == "cuda":
            yield head + r"weight must be on the device of input", Sample((x, 2, c.cpu()))

    @staticmethod
    def batches(device):
        for batch, height in [(2, 5), (3, 8), (5, 16), (7, 11)]:
            yield _sample(device, torch.float32, (batch, 8, height, 6), 4, residual=True)

    @staticmethod
    def drawn(d):
        batch, groups = d(SIZES), d(st.integers(1, 5))
        channels = groups * d(st.sampled_from([1, 2, 3, 5, 8, 16]))
        shape = (batch, channels, *d.shape(most=2))
        weight = d.tensor(channels, low=-2.0, high=2.0) if d(st.booleans()) else None
        bias = d.tensor(channels) if d(st.booleans()) else None
        residual = d.tensor(*shape) if d(st.booleans()) else None
        return Sample((d.tensor(*shape), groups, weight, bias, 1e-5, residual, d(st.booleans())))

    @staticmethod
    def rounding(sample, finite):
        gains = [t.abs().max().item() for t in finite.floating()[1:] if t.numel()]
        eps = roundoff(sample, accumulated=True)
        return 8 * eps * magnified(*finite.args[:2]) * max([1.0, *gains]) ** 2

    @staticmethod
    def clamped(exact):
        """ReLU's kink, in terms as large as those that make its input."""
        if not exact.args[6] or not exact.args[0].numel():
            return None
        y = _before_relu(exact)
        terms = torch.full_like(y, magnified(*exact.args[:2]) + 10)
        for added in (exact.args[3], exact.args[5]):
            terms = terms if added is None else terms + added.abs().max()
        return (y + 100 * terms, -100 * terms), 0.0

    @staticmethod
    def takes(sample, argument, how):
        return how == "rank" and argument is sample.args[0]


class TestChannelsLast(OpProofs):
    """The same on channels-last images, whose order the output keeps."""

    op = torch.ops.dpa.group_norm_act
    reference = dpa.reference.group_norm_act
    contiguous_output = False
    rejected = staticmethod(TestGroupNormAct.rejected)

    @staticmethod
    def samples(device, dtype):
        for sample in (
            _sample(device, dtype, (3, 64, 5, 7), 4, residual=True),
            _sample(device, dtype, (2, 64, 21, 23), 4),  # a cluster of blocks a sample
            _sample(device, dtype, (1, 96, 3, 3), 3, residual=True, relu=False),
            _sample(device, dtype, (2, 24, 4, 3), 3, affine=False),  # one vector a group
            _sample(device, dtype, (2, 6, 4, 2), 2),  # no whole vectors
            _sample(device, dtype, (0, 16, 3, 2), 2),
        ):
            yield _images_last(sample)

    @staticmethod
    def batches(device):
        for sample in TestGroupNormAct.batches(device):
            yield _images_last(sample)

    def test_order(self, device):
        """Output and gradients are in the order of the input; Meta says so too."""
        for sample in self.samples(device, torch.float32):
            ours = sample.requiring_grad()
            out = torch.ops.dpa.group_norm_act(*ours.args)
            out.backward(torch.randn(out.shape, device=device))
            meta = sample.map(lambda x: x.to("meta"))
            expected = sample.args[0].stride()
            assert torch.ops.dpa.group_norm_act(*meta.args).stride() == expected
            assert out.stride() == ours.args[0].grad.stride() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_random_channels_last(device, dtype):
    """Values and all gradients against float64, at random sizes of any plan, parameters float32."""
    random = torch.Generator().manual_seed(7)
    draw = lambda low, high: int(torch.randint(low, high, (), generator=random))  # noqa: E731
    on_gpu = device.type == "cuda"
    for _ in range(60 if on_gpu else 4):
        groups, width = 2 ** draw(0, 4), 2 ** draw(2, 9 if on_gpu else 5)
        shape = draw(1, 40 if on_gpu else 3), groups * width, draw(1, 50), draw(1, 20)
        residual, relu = draw(0, 2) > 0, draw(0, 3) > 0
        sample = _images_last(_sample(device, dtype, shape, groups, True, residual, relu, 10.0))
        x, _, weight, bias, eps, added, _ = sample.requiring_grad().args
        weight, bias = (t.detach().float().requires_grad_() for t in (weight, bias))
        leaves = [t for t in (x, weight, bias, added) if t is not None]
        out = torch.ops.dpa.group_norm_act(x, groups, weight, bias, eps, added, relu)
        grad = torch.randn_like(out)
        got = torch.autograd.grad(out, leaves, grad)
        wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
        more = wide[3] if residual else None
        exact = dpa.reference.group_norm_act(wide[0], groups, *wide[1:3], eps, more, relu)
        assert_close(out, exact.to(dtype), **tolerance(dtype))
        if relu:  # at its kink rounding decides
            off = (out > 0) != (exact > 0)
            assert off.sum() <= 1e-5 * off.numel() + 2
            grad = torch.where(off, 0, grad)
            got = torch.autograd.grad(
                torch.ops.dpa.group_norm_act(x, groups, weight, bias, eps, added, relu),
                leaves,
                grad,
            )
        expected = torch.autograd.grad(exact, wide, grad.double())
        for g, e, leaf in zip(got, expected, leaves, strict=True):
            assert g.dtype == leaf.dtype and g.shape == leaf.shape
            limits = gradient_tolerance(g.dtype)
            size = e.abs().max().item() if g.dim() == 1 else 1.0  # sums over batch and image
            limits["atol"] *= max(1.0, size)
            assert_close(g, e.to(g.dtype), **limits)


def test_repeats_bit_for_bit(device):
    """The gradients of the parameters are sums over batch and image, taken in one order."""
    x = torch.randn(70, 64, 11, 11, device=device).contiguous(memory_format=_LAST)
    weight, grad = torch.randn(64, device=device), torch.randn_like(x)
    run = lambda: torch.ops.dpa.group_norm_act_backward(  # noqa: E731
        grad, x, 4, weight, weight, 1e-5, grad, True, [True] * 4
    )
    for a, b in zip(run(), run(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_mean_far_from_zero(device, dtype):
    """Statistics are of the values as they are stored, with nothing lost to their mean."""
    x = (torch.randn(2, 64, 42, 42, device=device) + 1000).to(dtype)
    x = x.contiguous(memory_format=_LAST)
    got = torch.ops.dpa.group_norm_act(x, 4, relu=False)
    expected = dpa.reference.group_norm_act(x.double(), 4, relu=False)
    if dtype == torch.float32:  # one rounding of a mean near 1000, over a deviation of 1
        assert_close(got.double(), expected, rtol=1e-4, atol=2e-4)
    else:
        assert_close(got, expected.to(dtype), **tolerance(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nan_and_infinity_stay_in_their_group(device, dtype):
    for bad in (float("nan"), float("inf")):
        x = torch.randn(2, 64, 9, 5, device=device, dtype=dtype).contiguous(memory_format=_LAST)
        x[1, 18, 3, 2] = bad
        got = torch.ops.dpa.group_norm_act(x, 4)
        assert torch.equal(got.isnan(), dpa.reference.group_norm_act(x, 4).isnan())
        assert got[1, 16:32].isnan().all() and got.isnan().sum() == 16 * 45


def test_it_is_pytorchs_modules(device):
    """At the sizes of ResNet-18 on 84 x 84 images, PyTorch's own ops."""
    for channels, side in [(64, 42), (64, 21), (128, 11), (256, 6), (512, 3)]:
        x, added = (torch.randn(2, channels, side, side, device=device) for _ in "xr")
        weight, bias = (torch.randn(channels, device=device) for _ in "wb")
        groups = channels // 16
        expected = torch.nn.functional.group_norm(x, groups, weight, bias) + added
        last = [t.contiguous(memory_format=_LAST) for t in (x, added)]
        got = dpa.ops.group_norm_act(last[0], groups, weight, bias, residual=last[1])
        assert_close(got, expected.relu(), rtol=1e-5, atol=1e-5)


def test_autocast(device):
    x, added = torch.randn(2, 8, 5, 3, device=device), torch.randn(2, 8, 5, 3, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        got = torch.ops.dpa.group_norm_act(x, 4, torch.ones(8, device=device), residual=added)
    assert got.dtype == torch.bfloat16
    expected = torch.ops.dpa.group_norm_act(x.bfloat16(), 4, residual=added.bfloat16())
    assert_close(got, expected, rtol=0, atol=0)
