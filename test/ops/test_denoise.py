import math

import pytest
import torch
from hypothesis import strategies as st
from proofs import OpProofs, Sample

import dpa


def _sample(device, dtype, shape, rows, timestep, flat=False):
    new = lambda *size: torch.randn(size, device=device, dtype=dtype)  # noqa: E731
    constants = torch.rand(rows, 5, device=device, dtype=dtype) / 2 + 0.5
    constants = constants.reshape(-1) if flat else constants
    timestep = torch.tensor(timestep, device=device)
    return Sample((new(*shape), new(*shape), constants, timestep, new(*shape)))


class TestDenoise(OpProofs):
    op = torch.ops.dpa.denoise
    reference = dpa.reference.denoise

    @staticmethod
    def samples(device, dtype):
        yield _sample(device, dtype, (2, 5, 3), 7, 3)
        yield _sample(device, dtype, (3, 4), 5, [4, 0, 4], flat=True)
        yield _sample(device, dtype, (4, 3, 2), 3, [0])
        yield _sample(device, dtype, (7,), 2, 1, flat=True)
        yield _sample(device, dtype, (0, 4), 2, 1)

    @staticmethod
    def rejected(device):
        new = lambda *size: torch.randn(size, device=device)  # noqa: E731
        x, c = new(2, 3), new(4, 5)
        one = torch.tensor(1, device=device)
        head = r"^dpa::denoise: "
        yield (
            head + r"sample must be float64, float32, float16 or bfloat16, got Int",
            Sample((x, x.int(), c, one, x)),
        )
        yield (
            head + r"model_output must have the shape of sample \[2, 3\], got \[3\]",
            Sample((x[0], x, c, one, x)),
        )
        yield (
            head + r"diffusion_noise must have the dtype of sample",
            Sample((x, x, c, one, x.double())),
        )
        yield (
            head + r"diffusion_constants must have shape \(N, 5\) or \(N \* 5\), got \[4, 6\]",
            Sample((x, x, new(4, 6), one, x)),
        )
        yield (
            head + r"diffusion_constants must have shape.*got \[19\]",
            Sample((x, x, new(19), one, x)),
        )
        yield head + r"timestep must be an integer tensor", Sample((x, x, c, one.float(), x))
        yield (
            head + r"timestep must have one element, or one for each",
            Sample((x, x, c, one.expand(3), x)),
        )
        if device.type == "cuda":
            yield (
                head + r"timestep must be on the device of sample",
                Sample((x, x, c, one.cpu(), x)),
            )
        else:
            yield head + r"timestep must lie in 0..3, got 4", Sample((x, x, c, one + 3, x))

    @staticmethod
    def batches(device):
        for batch, length in [(2, 5), (3, 8), (5, 16), (7, 11)]:
            yield _sample(device, torch.float32, (batch, length, 2), 9, 3)

    @staticmethod
    def drawn(d):
        shape, rows = d.shape(least=1), d(st.integers(1, 9))
        # A division by less would magnify the rounding of what it divides.
        constants = d.tensor(rows, 5, low=0.2, high=1.0)
        x = [d.tensor(*shape) for _ in range(3)]
        return Sample((x[0], x[1], constants, d.index(shape[0], rows), x[2]))

    @staticmethod
    def clamped(exact):
        model_output, sample, constants, timestep = exact.args[:4]
        c0, c1 = dpa.reference._rows(constants.reshape(-1, 5), timestep, sample)[:2]
        return (sample / c1, -c0 / c1 * model_output), 1.0

    @staticmethod
    def takes(sample, argument, how):
        return how == "rank" and argument.dim() == 0


def test_matches_diffusers(device):
    """Every timestep of diffusers' DDPM scheduler, with the constants worked out from its betas."""
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.DDPMScheduler(
        num_train_timesteps=20, beta_schedule="squaredcos_cap_v2", clip_sample=True
    )
    bars = scheduler.alphas_cumprod.double()
    previous = torch.cat([torch.ones(1, dtype=torch.float64), bars[:-1]])
    alphas = bars / previous
    variance = ((1 - previous) / (1 - bars) * (1 - alphas)).clamp(min=1e-20)
    columns = [
        (1 - bars).sqrt(),
        bars.sqrt(),
        alphas.sqrt() * (1 - previous) / (1 - bars),
        previous.sqrt() * (1 - alphas) / (1 - bars),
        variance.sqrt(),
    ]
    constants = torch.stack(columns, 1).float()
    scheduler.set_timesteps(20)
    for t in scheduler.timesteps:
        output, sample = torch.randn(2, 2, 16, 2).unbind()
        noise = torch.randn(2, 16, 2, generator=torch.Generator().manual_seed(int(t)))
        same = torch.Generator().manual_seed(int(t))  # diffusers gets our numbers again
        expected = scheduler.step(output, t, sample, generator=same).prev_sample
        tensors = (x.to(device) for x in (output, sample, constants, t, noise))
        got = torch.ops.dpa.denoise(*tensors)
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-5, atol=1e-5)


def test_timestep_zero_ignores_the_noise(device):
    sample = _sample(device, torch.float32, (2, 3), 4, 0)
    sample.args[4].fill_(math.nan)
    assert not torch.ops.dpa.denoise(*sample.args).isnan().any()


def test_timestep_outside_the_table_gives_nan_on_the_gpu(device):
    if device.type == "cpu":
        pytest.skip("the CPU raises")
    sample = _sample(device, torch.float32, (2, 3), 5, [7, 1])
    got = torch.ops.dpa.denoise(*sample.args)
    assert got[0].isnan().all() and not got[1].isnan().any()


def test_autocast(device):
    sample = _sample(device, torch.float32, (2, 3), 5, 2)
    args = (sample.args[0].bfloat16(), *sample.args[1:])
    with torch.autocast(device.type, dtype=torch.bfloat16):
        got = torch.ops.dpa.denoise(*args)
    assert torch.equal(got, torch.ops.dpa.denoise(args[0].float(), *args[1:]))
