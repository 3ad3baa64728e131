import math

import pytest
import torch
from hypothesis import strategies as st
from proofs import OpProofs, Sample

import dpa


def _sample(device, dtype, shape, rows, index, noise=True, **kwargs):
    new = lambda *size: torch.randn(size, device=device, dtype=dtype)  # noqa: E731
    index = torch.tensor(index, device=device)
    if noise:
        kwargs["noise"] = new(*shape)
    return Sample((new(*shape), new(*shape), new(rows, 6), index), kwargs)


class TestSchedulerStep(OpProofs):
    op = torch.ops.dpa.scheduler_step
    reference = dpa.reference.scheduler_step

    @staticmethod
    def samples(device, dtype):
        yield _sample(device, dtype, (2, 5, 3), 7, 3)
        yield _sample(device, dtype, (3, 4), 5, [4, 0, 4], clip=0.7)
        yield _sample(device, dtype, (4, 3, 2), 3, [2], noise=False, clip=1.0)
        yield _sample(device, dtype, (7,), 2, 1, noise=False)
        yield _sample(device, dtype, (0, 4), 2, 1)

    @staticmethod
    def rejected(device):
        new = lambda *size: torch.randn(size, device=device)  # noqa: E731
        x, table = new(2, 3), new(4, 6)
        one = torch.tensor(1, device=device)
        head = r"^dpa::scheduler_step: "
        yield (
            head + r"sample must be float64, float32, float16 or bfloat16, got Int",
            Sample((x, x.int(), table, one)),
        )
        yield (
            head + r"model_output must have the shape of sample \[2, 3\], got \[3\]",
            Sample((x[0], x, table, one)),
        )
        yield (
            head + r"model_output must have the dtype of sample",
            Sample((x.half(), x, table, one)),
        )
        yield head + r"noise must have the shape", Sample((x, x, table, one, x[:1]))
        yield (
            head + r"table must have shape \(N, 6\), got \[4, 5\]",
            Sample((x, x, table[:, :5], one)),
        )
        yield head + r"table must have the dtype of sample", Sample((x, x, table.double(), one))
        yield (
            head + r"index must be an integer tensor, got Float",
            Sample((x, x, table, one.float())),
        )
        yield (
            head + r"index must have one element, or one for each",
            Sample((x, x, table, one.expand(3))),
        )
        yield head + r"clip must be at least 0.*got -1", Sample((x, x, table, one), {"clip": -1.0})
        yield (
            head + r"clip must be at least 0.*got nan",
            Sample((x, x, table, one), {"clip": math.nan}),
        )
        if device.type == "cuda":
            yield head + r"index must be on the device of sample", Sample((x, x, table, one.cpu()))
        else:
            yield head + r"index must lie in 0..3, got 4", Sample((x, x, table, one + 3))
            yield head + r"index must lie in 0..3, got -1", Sample((x, x, table, one - 2))

    @staticmethod
    def batches(device):
        for batch, length in [(2, 5), (3, 8), (5, 16), (7, 11)]:
            yield _sample(device, torch.float32, (batch, length, 2), 9, 3, clip=1.0)

    @staticmethod
    def drawn(d):
        shape, rows = d.shape(least=1), d(st.integers(1, 9))
        table = d.tensor(rows, 6, low=-1.0, high=1.0)
        noise = d.tensor(*shape) if d(st.booleans()) else None
        clip = d(st.sampled_from([0.0, 0.7, 1.0, math.inf]))
        args = (d.tensor(*shape), d.tensor(*shape), table, d.index(shape[0], rows), noise, clip)
        return Sample(args)

    @staticmethod
    def clamped(exact):
        model_output, sample, table, index = exact.args[:4]
        r0, r1 = dpa.reference._rows(table, index, sample)[:2]
        return (r0 * sample, r1 * model_output), exact.args[5]

    @staticmethod
    def takes(sample, argument, how):
        return how == "rank" and argument.dim() == 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_index_dtypes(device, dtype):
    sample = _sample(device, torch.float32, (2, 3), 5, [4, 2])
    expected = torch.ops.dpa.scheduler_step(*sample.args, **sample.kwargs)
    args = (*sample.args[:3], sample.args[3].to(dtype))
    assert torch.equal(torch.ops.dpa.scheduler_step(*args, **sample.kwargs), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_float32_table_beside_16_bit_samples(device, dtype):
    sample = _sample(device, dtype, (2, 3), 5, [4, 2])
    output, x, table, index = sample.args
    table = torch.randn(5, 6, device=device, requires_grad=True)
    got = torch.ops.dpa.scheduler_step(output, x, table, index)
    exact = dpa.reference.scheduler_step(output.double(), x.double(), table.double(), index)
    torch.testing.assert_close(got, exact.to(dtype), rtol=8e-3, atol=8e-3)
    got.sum().backward()
    assert table.grad.dtype == torch.float32 and table.grad[[0, 1, 3]].eq(0).all()


def test_index_outside_the_table_gives_nan_on_the_gpu(device):
    """Nothing is read out of bounds, and nothing plausible is returned."""
    if device.type == "cpu":
        pytest.skip("the CPU raises")
    for index in ([5, 0], [-1, 0], [2**40, 0]):
        sample = _sample(device, torch.float32, (2, 3), 5, index)
        got = torch.ops.dpa.scheduler_step(*sample.args, **sample.kwargs)
        assert got[0].isnan().all() and not got[1].isnan().any()


def test_nan_goes_through_the_clamp(device):
    sample = _sample(device, torch.float32, (1, 3), 5, 2, noise=False, clip=1.0)
    sample.args[0][0, 1] = math.nan
    got = torch.ops.dpa.scheduler_step(*sample.args, **sample.kwargs)
    assert got.isnan().tolist() == [[False, True, False]]


def test_autocast(device):
    """A network's 16-bit output meets a float32 sample: the step is float32."""
    sample = _sample(device, torch.float32, (2, 3), 5, 2)
    args = (sample.args[0].bfloat16(), *sample.args[1:])
    with torch.autocast(device.type, dtype=torch.bfloat16):
        got = torch.ops.dpa.scheduler_step(*args, **sample.kwargs)
    expected = torch.ops.dpa.scheduler_step(args[0].float(), *args[1:], **sample.kwargs)
    assert torch.equal(got, expected)
