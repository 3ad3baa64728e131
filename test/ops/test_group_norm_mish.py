import pytest
import torch
from hypothesis import strategies as st
from proofs import OpProofs, Sample
from strategies import SIZES, magnified, roundoff
from tolerances import gradient_tolerance, tolerance

import dpa


def _sample(device, dtype, shape, groups, affine=True, film=True, **kwargs):
    new = lambda *size: torch.randn(size, device=device, dtype=dtype)  # noqa: E731
    batch, channels = shape[:2]
    weight, bias = (new(channels), new(channels)) if affine else (None, None)
    scale, shift = (new(batch, channels), new(batch, channels)) if film else (None, None)
    return Sample((new(*shape) * 2 + 1, groups, weight, bias, 1e-5, scale, shift), kwargs)


class TestGroupNormMish(OpProofs):
    op = torch.ops.dpa.group_norm_mish
    reference = dpa.reference.group_norm_mish
    normalised = True

    @staticmethod
    def samples(device, dtype):
        yield _sample(device, dtype, (2, 8, 5), 4)
        yield _sample(device, dtype, (3, 6, 16), 3, film=False)
        yield _sample(device, dtype, (2, 4, 3, 7), 1, affine=False)
        yield _sample(device, dtype, (3, 12), 2, affine=False, film=False)
        yield _sample(device, dtype, (1, 2, 70), 2)
        yield _sample(device, dtype, (0, 4, 3), 2)
        yield _sample(device, dtype, (2, 4, 0), 2)
        x = torch.randn(2, 4, 9, device=device, dtype=dtype)
        only = torch.randn(2, 4, device=device, dtype=dtype)
        yield Sample((x, 2), {"shift": only})
        yield Sample((x, 2), {"scale": only, "bias": only[0].clone()})
        yield Sample((x, 2), {"residual": torch.randn_like(x)})

    @staticmethod
    def rejected(device):
        x = torch.randn(2, 8, 5, device=device)
        c, film = torch.randn(8, device=device), torch.randn(2, 8, device=device)
        head = r"^dpa::group_norm_mish: "
        yield head + r"input must have at least 2 dimensions.*got shape \[8\]", Sample((c, 2))
        yield head + r"input must be float64, float32.*got Int", Sample((x.int(), 2))
        yield head + r"num_groups must be positive and divide the 8 channels, got 3", Sample((x, 3))
        yield head + r"num_groups .*got 0", Sample((x, 0))
        yield head + r"weight must have shape \(C\) = \[8\], got \[7\]", Sample((x, 2, c[:7]))
        yield head + r"bias must have the dtype of input", Sample((x, 2, c, c.double()))
        yield head + r"eps must be at least 0, got -1", Sample((x, 2, c, c, -1.0))
        yield (
            head + r"scale must have shape \(B, C\) = \[2, 8\]",
            Sample((x, 2), {"scale": film[:1]}),
        )
        yield head + r"shift must have shape", Sample((x, 2), {"shift": film[:, :4]})
        yield (
            head + r"bias must have the dtype of input .* or Float, got Half",
            Sample((x.bfloat16(), 2, None, c.half())),
        )
        yield head + r"residual must have the shape of input", Sample((x, 2), {"residual": x[:1]})
        if device.type == "cuda":
            yield head + r"weight must be on the device of input", Sample((x, 2, c.cpu()))

    @staticmethod
    def batches(device):
        for batch, length in [(2, 5), (3, 8), (5, 16), (7, 11)]:
            yield _sample(device, torch.float32, (batch, 8, length), 4)

    @staticmethod
    def drawn(d):
        batch, groups, width = (
            d(SIZES),
            d(st.integers(1, 5)),
            d(st.sampled_from([1, 2, 3, 5, 8, 24])),
        )
        channels = groups * width
        shape = (batch, channels, *d.shape(most=2))
        input = d.tensor(*shape)
        options = d.normalisation(batch, channels)
        options["residual"] = d.tensor(*shape) if d(st.booleans()) else None
        return Sample((input, groups), options)

    @staticmethod
    def rounding(sample, finite):
        gains = [t.abs().max().item() for t in finite.floating()[1:] if t.numel()]
        eps = roundoff(sample, accumulated=True)
        return 8 * eps * magnified(*finite.args[:2]) * max([1.0, *gains]) ** 2

    @staticmethod
    def takes(sample, argument, how):
        return how == "rank" and argument is sample.args[0]


def _channels_last(x):
    """The values of (B, C, T) in memory as (B, T, C)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


class TestChannelsLast(OpProofs):
    """The same on channels-last tensors, whose order the output keeps."""

    op = torch.ops.dpa.group_norm_mish
    reference = dpa.reference.group_norm_mish
    contiguous_output = False

    @staticmethod
    def _sample(device, dtype, shape, groups, residual=False, **options):
        sample = _sample(device, dtype, shape, groups, **options)
        x = _channels_last(sample.args[0])
        extra = {"residual": _channels_last(torch.randn_like(x))} if residual else {}
        return Sample((x, *sample.args[1:]), extra)

    @classmethod
    def samples(cls, device, dtype):
        yield cls._sample(device, dtype, (3, 32, 5), 4)  # one vector a row, several groups a warp
        yield cls._sample(
            device, dtype, (5, 48, 7), 2, residual=True
        )  # three vectors: an idle thread
        yield cls._sample(
            device, dtype, (2, 64, 33), 1, film=False
        )  # a group longer than a warp holds
        yield cls._sample(device, dtype, (1, 16, 3), 2, affine=False)
        yield cls._sample(device, dtype, (2, 6, 4), 2)  # no whole vectors
        yield cls._sample(device, dtype, (0, 16, 3), 2)

    rejected = staticmethod(TestGroupNormMish.rejected)

    @classmethod
    def batches(cls, device):
        for batch, length in [(2, 5), (3, 8), (5, 16), (7, 11)]:
            yield cls._sample(device, torch.float32, (batch, 32, length), 4)

    def test_order(self, device):
        """Output and gradient are in the order of the input; Meta says so too."""
        for sample in self.samples(device, torch.float32):
            ours = sample.requiring_grad()
            out = torch.ops.dpa.group_norm_mish(*ours.args, **ours.kwargs)
            out.backward(torch.randn(out.shape, device=device))
            meta = sample.map(lambda x: x.to("meta"))
            expected = sample.args[0].stride()
            assert torch.ops.dpa.group_norm_mish(*meta.args, **meta.kwargs).stride() == expected
            assert out.stride() == ours.args[0].grad.stride() == expected


@pytest.mark.parametrize("large", [False, True], ids=["", "large"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_random_channels_last(device, dtype, large):
    """Values and all gradients against float64, at random sizes of any plan, parameters float32.

    Large groups are those that blocks of a GPU share.
    """
    random = torch.Generator().manual_seed(7)
    draw = lambda low, high: int(torch.randint(low, high, (), generator=random))  # noqa: E731
    for _ in range(60 if device.type == "cuda" else 6):
        groups, width, length = 2 ** draw(0, 4), 2 ** draw(0, 4) * draw(1, 20), draw(1, 40)
        batch = draw(1, 300 if device.type == "cuda" else 4)
        if large:
            groups, batch, length = 2 ** draw(0, 3), draw(1, 24), draw(8, 12000) // width + 1
            batch = batch if device.type == "cuda" else 1
        channels = groups * width
        new = lambda *size: torch.randn(size, device=device, dtype=dtype)  # noqa: E731
        film = new(batch, 2 * channels).requires_grad_()
        x = _channels_last(new(batch, channels, length) + 0.5).requires_grad_()
        residual = new(batch, channels, length).requires_grad_()
        weight, bias = (torch.randn(channels, device=device, requires_grad=True) for _ in "wb")
        leaves = (x, weight, bias, film, residual)

        def run(op, x, weight, bias, film, residual, groups=groups):
            return op(x, groups, weight, bias, 1e-5, *film.chunk(2, dim=1), residual)

        out = run(torch.ops.dpa.group_norm_mish, *leaves)
        grad = new(*out.shape)
        got = torch.autograd.grad(out, leaves, grad)
        wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
        exact = run(dpa.reference.group_norm_mish, *wide)
        expected = torch.autograd.grad(exact, wide, grad.double())
        torch.testing.assert_close(out, exact.to(dtype), **tolerance(dtype))
        for g, e, leaf in zip(got, expected, leaves, strict=True):
            assert g.dtype == leaf.dtype and g.shape == leaf.shape
            torch.testing.assert_close(g, e.to(g.dtype), **gradient_tolerance(g.dtype))


@pytest.mark.parametrize("batch, length", [(70, 16), (9, 1500)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_repeats_bit_for_bit(device, dtype, batch, length):
    """The gradients of the parameters are sums over the batch, taken in one order."""
    x = _channels_last(torch.randn(batch, 64, length, device=device, dtype=dtype))
    weight, grad = torch.randn(64, device=device), torch.randn_like(x)
    run = lambda: torch.ops.dpa.group_norm_mish_backward(  # noqa: E731
        grad, x, 8, weight, weight, 1e-5, None, None, [True, True, True, False, False]
    )
    for a, b in zip(run()[:3], run()[:3], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("length", [3, 701])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_leaks_from_idle_threads(device, dtype, length):
    """With eps 0 a constant group gives NaN; groups and samples beside it must not notice."""
    x = _channels_last(torch.randn(5, 48, length, device=device, dtype=dtype))
    x[2, :24] = 1.0
    weight = torch.full((48,), 2.0, device=device, dtype=dtype)
    scale = torch.full((5, 48), 3.0, device=device, dtype=dtype)
    grads = torch.ops.dpa.group_norm_mish_backward(
        torch.ones_like(x), x, 2, weight, None, 0.0, scale, None, [True, True, False, True, False]
    )
    for grad, bad in (
        (grads[0], (2, slice(24))),
        (grads[1], slice(24)),
        (grads[3], (2, slice(24))),
    ):
        expected = torch.zeros_like(grad, dtype=torch.bool)
        expected[bad] = True
        assert torch.equal(grad.isnan(), expected)


def test_matches_torch_modules(device):
    """Against libtorch's own group_norm and mish, at the sizes of real networks."""
    for shape in [(1, 256, 16), (4, 512, 8), (2, 1024, 4), (1, 64, 1000)]:
        x, weight, bias = (torch.randn(*s, device=device) for s in (shape, shape[1:2], shape[1:2]))
        expected = torch.nn.functional.mish(torch.nn.functional.group_norm(x, 8, weight, bias))
        got = torch.ops.dpa.group_norm_mish(x, 8, weight, bias)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_large_group(device):
    """A group far longer than a block, with a mean far from zero."""
    x = torch.randn(1, 4, 100_003, device=device) + 100
    expected = dpa.reference.group_norm_mish(x.double(), 2).float()
    # Values near 100 are stored to 2^-17 * 100 / 2: that, over a deviation of 1, is what is left.
    torch.testing.assert_close(torch.ops.dpa.group_norm_mish(x, 2), expected, rtol=1e-4, atol=1e-4)


def test_the_gradients_of_a_large_group_are_summed_in_float64():
    """Sequential sums in float32 stop at 2^24 ones."""
    n = 2**24 + 2**20
    x, shift = torch.randn(1, 1, n), torch.zeros(1, 1, requires_grad=True)
    torch.ops.dpa.group_norm_mish(x, 1, None, None, 1e-5, None, shift).sum().backward()
    assert shift.grad.item() == n


def test_nan_and_infinity_stay_in_their_group(device):
    for bad in (float("nan"), float("inf")):
        x = torch.randn(2, 8, 5, device=device)
        x[1, 2, 3] = bad
        got = torch.ops.dpa.group_norm_mish(x, 4)
        reference = dpa.reference.group_norm_mish(x, 4)
        assert torch.equal(got.isnan(), reference.isnan())
        assert got[1, 2:4].isnan().all() and got.isnan().sum() == 10


def test_extreme_activations(device):
    """mish far out on both sides, where exp overflows or vanishes."""
    x = torch.tensor([-1e4, -100, -20, -1, 0, 1, 19, 20, 21, 100, 1e4], device=device)
    shift = x.expand(1, -1).contiguous()
    bias = x.clone()
    zero = torch.zeros(1, x.numel(), 3, device=device)  # normalises to zero: only bias reaches mish
    got = torch.ops.dpa.group_norm_mish(zero, 1, None, bias, 1e-5, None, shift)
    expected = torch.nn.functional.mish(x.double()) + x.double()
    torch.testing.assert_close(got[0, :, 0].double(), expected, rtol=1e-6, atol=1e-6)


def test_autocast(device):
    x = torch.randn(2, 8, 5, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        got = torch.ops.dpa.group_norm_mish(x, 4, torch.ones(8, device=device))
    assert got.dtype == torch.bfloat16
    expected = torch.ops.dpa.group_norm_mish(x.bfloat16(), 4)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
