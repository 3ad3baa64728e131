import gc

import pytest
import torch
from hypothesis import strategies as st
from proofs import OpProofs, Sample
from strategies import SIZES, magnified, roundoff

import dpa


def _sample(device, dtype, batch, c_in, c_out, length, k, groups, film="both", skip=0):
    new = lambda *size: torch.randn(size, device=device, dtype=dtype)  # noqa: E731
    parameters = []
    # The second normalisation's small weight keeps the rounding of the 16-bit activations before it
    # below that of the result, which is what the tolerances are made for.
    for inputs, unit in ((c_in, 1), (c_out, 0.125)):
        weight = new(c_out, inputs, k) / (inputs * k) ** 0.5
        parameters += [weight, new(c_out), unit * (1 + new(c_out) / 4), new(c_out)]
    residual = (None, None) if c_in == c_out else (new(c_out, c_in, 1) / c_in**0.5, new(c_out))
    args = (new(batch, c_in - skip, length), *parameters, *residual, groups, 1e-5)
    films = {"both": (new(batch, c_out), new(batch, c_out)), "shift": (None, new(batch, c_out))}
    more = new(batch, skip, length) if skip else None
    return Sample((*args, *films.get(film, (None, None)), more))


class TestResidualBlock1d(OpProofs):
    op = torch.ops.dpa.residual_block1d
    reference = dpa.reference.residual_block1d
    normalised = True

    @staticmethod
    def samples(device, dtype):
        yield _sample(device, dtype, 2, 3, 8, 5, 3, 4)
        yield _sample(device, dtype, 3, 6, 6, 4, 5, 3, film="shift")
        yield _sample(device, dtype, 2, 4, 4, 3, 1, 1, film="none")
        yield _sample(device, dtype, 2, 5, 6, 4, 3, 2, skip=2)
        yield _sample(device, dtype, 3, 6, 6, 4, 3, 3, film="shift", skip=3)

    @staticmethod
    def rejected(device):
        new = lambda *size: torch.randn(size, device=device)  # noqa: E731
        good = _sample(device, torch.float32, 2, 3, 8, 5, 3, 4).args
        head = r"^dpa::residual_block1d: "

        def changed(**change):
            args = list(good)
            for place, value in change.items():
                args[int(place[1:])] = value
            return Sample(tuple(args))

        yield head + r"input must have 3 dimensions", changed(_0=new(3, 5))
        yield (
            head
            + r"conv1_weight must have shape \(C_out, C_in, k\) with C_in = 3, got \[8, 2, 3\]",
            changed(_1=new(8, 2, 3)),
        )
        yield head + r"conv1_weight must have an odd kernel size", changed(_1=new(8, 3, 4))
        yield head + r"conv1_weight must have the dtype", changed(_1=new(8, 3, 3).half())
        yield head + r"conv1_bias must have shape \(C_out\) = \[8\], got \[3\]", changed(_2=new(3))
        yield head + r"gn1_weight must have shape", changed(_3=new(3))
        yield head + r"gn2_bias must have the dtype", changed(_8=new(8).double())
        yield head + r"conv2_weight must have as many output channels", changed(_5=new(4, 8, 3))
        yield (
            head + r"residual_weight must be given where the 3 input channels.*got 8",
            changed(_9=None, _10=None),
        )
        yield head + r"residual_weight must have shape \(C_out, C_in, 1\)", changed(_9=new(8, 3, 3))
        yield head + r"num_groups .*8 output channels, got 3", changed(_11=3)
        yield head + r"eps must be at least 0, got -1", changed(_12=-1.0)
        yield head + r"scale must have shape \(B, C_out\) = \[2, 8\]", changed(_13=new(3, 8))
        yield head + r"skip must have 3 dimensions \(B, C_skip, T\), got", changed(_15=new(2, 1))
        yield head + r"skip must have shape .* = \[2, 1, 5\], got", changed(_15=new(2, 1, 4))
        yield head + r"skip must have the dtype", changed(_15=new(2, 1, 5).double())
        yield head + r"conv1_weight must have .* with C_in = 4, got", changed(_15=new(2, 1, 5))
        if device.type == "cuda":
            yield head + r"conv1_weight must be on the device", changed(_1=new(8, 3, 3).cpu())

    @staticmethod
    def batches(device):
        for batch, length in [(2, 5), (3, 7), (5, 16), (6, 11)]:
            yield _sample(device, torch.float32, batch, 3, 8, length, 3, 4, skip=1)

    @staticmethod
    def drawn(d):
        batch, length = d(SIZES), d(st.integers(1, 17))
        groups, width, inputs = (d(st.integers(1, 5)) for _ in range(3))
        channels, taps = groups * width, d(st.sampled_from([1, 3, 5]))
        finite = lambda *shape: d.tensor(*shape, low=-1.0, high=1.0)  # noqa: E731
        parameters = []
        for count in (inputs, channels):
            # The weights' sums stay below 2, the bound that rounding is multiplied by.
            weight = d.tensor(
                channels, count, taps, low=-2 / (count * taps), high=2 / (count * taps)
            )
            parameters += [weight, finite(channels), finite(channels), finite(channels)]
        plain = inputs == channels and d(st.booleans())
        parameters += [None, None] if plain else [finite(channels, inputs, 1), finite(channels)]
        film = [finite(batch, channels) if d(st.booleans()) else None for _ in range(2)]
        own = d(st.integers(1, inputs))
        skip = d.convolved(batch, inputs - own, length) if own < inputs else None
        return Sample((d.convolved(batch, own, length), *parameters, groups, 1e-5, *film, skip))

    @staticmethod
    def rounding(sample, finite):
        """Weights of norms are at most 1, and a row of a convolution's sums to at most 2."""
        args, padding = finite.args, finite.args[1].shape[2] // 2
        x = args[0] if args[15] is None else torch.cat([args[0], args[15]], 1)
        first = dpa.reference.conv1d(x, *args[1:3], 1, padding)
        x = dpa.reference.conv1d_gnm(x, *args[1:5], args[11], 1e-5, *args[13:15])
        second = dpa.reference.conv1d(x, *args[5:7], 1, padding)
        once = 1 + magnified(first, args[11])
        deviation = second.reshape(len(x) * args[11], -1).var(1, correction=0).add(1e-5).sqrt()
        return (
            8 * roundoff(sample) * (magnified(second, args[11]) + 2 * once / deviation.min().item())
        )


def in_time_order(x):
    """The same values as (B, T, C) in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


# batch, channels in and out, length, taps, groups, film, channels of the input that are a skip
SHAPES = [
    (2, 16, 32, 8, 5, 4, "both"),
    (5, 64, 64, 16, 3, 8, "shift"),
    (70, 2, 64, 4, 5, 8, "both"),
    (3, 136, 64, 1, 1, 2, "none"),
    # Groups that a tile of the convolution holds whole, in one, four and eight passes of a warp.
    (5, 128, 64, 16, 3, 8, "both"),
    (17, 32, 128, 8, 3, 2, "both"),
    (9, 128, 128, 4, 5, 1, "shift"),
    (2, 64, 64, 16, 3, 1, "both"),
    # Groups of no whole vectors: the channels-last normalisation reads four channels, two or one.
    (37, 96, 160, 12, 5, 8, "both"),
    (6, 80, 96, 48, 3, 8, "shift"),
    (5, 48, 48, 7, 5, 8, "both"),
    (9, 40, 72, 16, 5, 8, "both"),
    (37, 200, 120, 12, 3, 8, "shift"),
    (2, 64, 1032, 16, 3, 8, "both"),
    (2, 24, 20, 6, 5, 4, "both"),  # rows that it does not take
    # Input and skip: as they are, also where one ends within a chunk; joined for the backward, and
    # for both.
    (5, 128, 64, 16, 3, 8, "both", 64),
    (130, 256, 128, 4, 5, 8, "shift", 128),
    (6, 136, 96, 48, 3, 8, "both", 40),
    (9, 256, 64, 8, 7, 4, "both", 128),
    (9, 80, 48, 8, 9, 8, "both", 40),
    (37, 96, 160, 12, 5, 8, "both", 48),
    (3, 20, 16, 7, 3, 4, "none", 9),
    (4, 64, 64, 8, 5, 8, "both", 32),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_channels_last_values_gradients_and_order(device, dtype, shape):
    """Against float64, parameters being float32 beside 16-bit inputs."""
    sample = _sample(device, torch.float32, *shape)
    # Values that the input's dtype can hold: the GEMMs read the weights in it.
    sample = sample.map(lambda x: x.to(dtype).float())
    args = list(sample.args)
    args[0] = in_time_order(args[0].to(dtype))
    args[13:] = [x if x is None else x.to(dtype) for x in args[13:]]
    args[15] = args[15] if args[15] is None else in_time_order(args[15])
    given = Sample(tuple(args))
    leaf = Sample(
        tuple(x.detach().requires_grad_() if isinstance(x, torch.Tensor) else x for x in given.args)
    )
    out = torch.ops.dpa.residual_block1d(*leaf.args)
    grad = torch.randn_like(out)
    out.backward(grad)
    exact = given.map(lambda x: x.detach().double().requires_grad_())
    expected = dpa.reference.residual_block1d(*exact.args)
    expected.backward(grad.double())

    assert out.dtype == dtype and out.stride() == in_time_order(out).stride()
    # The intermediate activations are rounded too: errors are judged against the largest value.
    unit = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    error = (out.double() - expected).norm() / expected.norm()
    assert error < unit, error
    with torch.no_grad():  # the kernels then keep nothing
        torch.testing.assert_close(torch.ops.dpa.residual_block1d(*given.args), out, rtol=0, atol=0)
    for x in (leaf.args[0], leaf.args[15]):
        assert x is None or x.grad.stride() == in_time_order(x).stride()
    for x, reference in zip(leaf.floating(), exact.floating(), strict=True):
        assert x.grad.dtype == x.dtype
        error = (x.grad.double() - reference.grad).norm() / reference.grad.norm()
        assert error < unit, error


def test_autocast(device):
    sample = _sample(device, torch.float32, 2, 3, 8, 5, 3, 4, skip=1)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        got = torch.ops.dpa.residual_block1d(*sample.args)
    x, *parameters, scale, shift, skip = sample.args
    expected = torch.ops.dpa.residual_block1d(
        x.bfloat16(), *parameters, scale.bfloat16(), shift.bfloat16(), skip.bfloat16()
    )
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU's memory is counted")
def test_packed_weights_go_when_they_have_been_read(device):
    """conv1's gradient lies where conv2's packed weights were, unless the graph is kept."""
    if device.type != "cuda" or torch.cuda.get_device_properties(device).major < 8:
        pytest.skip("weights are packed from compute capability 8.0 on")
    args = list(_sample(device, torch.float32, 64, 512, 1024, 4, 5, 8, "none").args)
    args[0] = in_time_order(args[0].bfloat16())
    leaves = [args[0].requires_grad_(), args[1].requires_grad_(), args[5].requires_grad_()]
    gradients, packed2 = (sum(w.numel() for w in leaves[1:]) * 4, args[5].numel() * 2)

    def run(keep):
        out = torch.ops.dpa.residual_block1d(*args)
        grad = torch.linspace(-1, 1, out.numel(), device=device).to(out.dtype).view_as(out)
        gc.collect()  # or what other tests left is freed meanwhile
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        first = torch.autograd.grad(out, leaves, grad, retain_graph=keep)
        peak = torch.cuda.max_memory_allocated() - before
        if keep:
            again = torch.autograd.grad(out, leaves, grad)
            torch.testing.assert_close(first, again, rtol=0, atol=0)
        return peak, first

    run(False), run(True)
    (peak, once), (kept_peak, kept) = run(False), run(True)
    torch.testing.assert_close(once, kept, rtol=0, atol=0)
    assert kept_peak >= gradients
    assert packed2 * 0.9 < kept_peak - peak < packed2 * 1.1
