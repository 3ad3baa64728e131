import torch
from hypothesis import strategies as st
from proofs import OpProofs, Sample
from strategies import SIZES, magnified, roundoff

import dpa


def _sample(device, dtype, batch, c_in, c_out, length, k, groups, **options):
    new = lambda *size: torch.randn(size, device=device, dtype=dtype)  # noqa: E731
    if options.get("bare"):
        return Sample((new(batch, c_in, length), new(c_out, c_in, k), None, None, None, groups))
    args = (new(batch, c_in, length), new(c_out, c_in, k) / 3, new(c_out), new(c_out), new(c_out))
    return Sample((*args, groups, 1e-5, new(batch, c_out), new(batch, c_out)))


class TestConv1dGnm(OpProofs):
    op = torch.ops.dpa.conv1d_gnm
    reference = dpa.reference.conv1d_gnm
    normalised = True

    @staticmethod
    def samples(device, dtype):
        yield _sample(device, dtype, 2, 3, 8, 5, 3, 4)
        yield _sample(device, dtype, 1, 2, 6, 7, 5, 3, bare=True)
        yield _sample(device, dtype, 3, 4, 4, 2, 1, 2)

    @staticmethod
    def rejected(device):
        new = lambda *size: torch.randn(size, device=device)  # noqa: E731
        x, w, c = new(2, 3, 5), new(8, 3, 3), new(8)
        head = r"^dpa::conv1d_gnm: "
        yield head + r"input must have 3 dimensions", Sample((x[0], w, None, None, None, 4))
        yield (
            head + r"conv_weight must have shape \(C_out, C_in, k\) with C_in = 3, got \[8, 2, 3\]",
            Sample((x, new(8, 2, 3), None, None, None, 4)),
        )
        yield (
            head + r"conv_weight must have an odd kernel size.*got 4",
            Sample((x, new(8, 3, 4), None, None, None, 4)),
        )
        yield head + r"num_groups .*8 output channels, got 3", Sample((x, w, None, None, None, 3))
        yield head + r"conv_bias must have shape", Sample((x, w, c[:3], None, None, 4))
        yield head + r"gn_weight must have shape", Sample((x, w, None, c[:3], None, 4))
        yield head + r"gn_bias must have the dtype", Sample((x, w, None, None, c.double(), 4))
        yield (
            head + r"scale must have shape \(B, C_out\) = \[2, 8\]",
            Sample((x, w, None, None, None, 4), {"scale": new(3, 8)}),
        )
        yield head + r"conv_weight must have the dtype", Sample((x, w.half(), None, None, None, 4))
        if device.type == "cuda":
            yield (
                head + r"conv_weight must be on the device",
                Sample((x, w.cpu(), None, None, None, 4)),
            )

    @staticmethod
    def batches(device):
        for batch, length in [(2, 5), (3, 8), (5, 16), (7, 11)]:
            yield _sample(device, torch.float32, batch, 3, 8, length, 3, 4)

    @staticmethod
    def drawn(d):
        batch, length = d(SIZES), d(st.integers(1, 17))
        groups, width, inputs = (d(st.integers(1, 5)) for _ in range(3))
        channels, taps = groups * width, d(st.sampled_from([1, 3, 5]))
        n = d.normalisation(batch, channels)
        bias = d.tensor(channels) if d(st.booleans()) else None
        # Whether an infinite weight meets the padding, and so gives NaN, differs by convolution.
        weight = d.tensor(channels, inputs, taps, low=-2.0, high=2.0)
        args = (d.convolved(batch, inputs, length), weight, bias, n["weight"], n["bias"], groups)
        return Sample(args, {"scale": n["scale"], "shift": n["shift"]})

    @staticmethod
    def rounding(sample, finite):
        """The convolution is kept in the dtype of its input, as two ops in a row would."""
        args = finite.args
        x = dpa.reference.conv1d(*args[:3], 1, args[1].shape[2] // 2)
        gains = [t.abs().max().item() for t in finite.floating()[1:] if t.numel()]
        return 8 * roundoff(sample) * magnified(x, args[5]) * max([1.0, *gains]) ** 2

    @staticmethod
    def cancelling(exact, grads):
        """The gradients of a normalisation's input add up to zero over each group.

        With them cancels what a convolution before it makes of equal weights.
        """
        normalisation = (exact.args[5], *exact.args[3:5], 1e-5, *exact.kwargs.values())
        padding = exact.args[1].shape[2] // 2
        out = dpa.reference.conv1d(*exact.args[:3], 1, padding).requires_grad_()
        made = dpa.reference.group_norm_mish(out, *normalisation)
        (grad,) = torch.autograd.grad(made, out, grads[0].double())
        sizes = Sample(tuple(None if x is None else x.abs() for x in exact.args[:3]))
        sizes = sizes.requiring_grad()
        dpa.reference.conv1d(*sizes.args, 1, padding).backward(grad.abs())
        return [x.grad.max().item() if x.numel() else 0.0 for x in sizes.floating()]


def test_empty_batch(device):
    sample = _sample(device, torch.float32, 0, 3, 8, 5, 3, 4)
    assert torch.ops.dpa.conv1d_gnm(*sample.args).shape == (0, 8, 5)


def test_autocast(device):
    sample = _sample(device, torch.float32, 2, 3, 8, 5, 3, 4)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        got = torch.ops.dpa.conv1d_gnm(*sample.args)
    assert got.dtype == torch.bfloat16
    x, *parameters_and_options, scale, shift = sample.args
    expected = torch.ops.dpa.conv1d_gnm(
        x.bfloat16(), *parameters_and_options, scale.bfloat16(), shift.bfloat16()
    )
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
