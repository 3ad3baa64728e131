import pytest
import torch
from hypothesis import strategies as st
from proofs import OneTensorProofs, Sample
from strategies import roundoff

import dpa


def _sample(device, dtype, *shape, dim=6):
    return Sample((torch.randn(shape, device=device, dtype=dtype) * 3, dim))


class TestSinusoidalEmbedding(OneTensorProofs):
    op = torch.ops.dpa.sinusoidal_embedding
    reference = dpa.reference.sinusoidal_embedding

    @staticmethod
    def samples(device, dtype):
        for shape, dim in [((), 4), ((7,), 6), ((3, 5), 4), ((0, 2), 8), ((131,), 34)]:
            yield _sample(device, dtype, *shape, dim=dim)
        yield Sample((*_sample(device, dtype, 5).args, dtype))

    @staticmethod
    def rejected(device):
        t = torch.randn(3, device=device)
        head = r"^dpa::sinusoidal_embedding: "
        yield head + r"timesteps must be integers or floating numbers, got Bool", Sample((t > 0, 4))
        yield head + r"dim must be even and at least 4, got 5", Sample((t, 5))
        yield head + r"dim must be even and at least 4, got 2", Sample((t, 2))
        yield head + r"dtype must be a floating type, got Int", Sample((t, 4, torch.int32))

    @staticmethod
    def batches(device):
        for batch in (2, 3, 5, 7):
            yield _sample(device, torch.float32, batch)

    @staticmethod
    def drawn(d):
        shape = d.shape()
        return Sample((d.tensor(*shape, low=-1000.0, high=1000.0), 2 * d(st.integers(2, 20))))

    @staticmethod
    def rounding(sample, finite):
        """An angle is rounded, and so is its frequency."""
        return 4 * roundoff(sample) * (1 + finite.args[0].abs().max().item())

    @staticmethod
    def takes(sample, argument, how):
        return how == "rank"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [64, 256])
def test_it_is_the_network_s(dtype, dim, device):
    """Whole steps, and any others, to the bit in float32; rounded once below."""
    encoder = dpa.nn.blocks1d.SinusoidalPosEmb(dim)
    whole = torch.arange(0, 1000, 7, device=device)
    for timesteps in (whole, whole.int(), torch.rand(5, device=device) * 1e3):
        got = torch.ops.dpa.sinusoidal_embedding(timesteps, dim, dtype)
        torch.testing.assert_close(got, encoder(timesteps).to(dtype), rtol=0, atol=0)
        mapped = torch.vmap(lambda t: torch.ops.dpa.sinusoidal_embedding(t, dim, dtype))(timesteps)
        torch.testing.assert_close(mapped, got, rtol=0, atol=0)


def test_autocast_changes_nothing(device):
    timesteps = torch.arange(3, device=device) * 300.5
    with torch.autocast(device.type, dtype=torch.bfloat16):
        got = torch.ops.dpa.sinusoidal_embedding(timesteps, 8)
    torch.testing.assert_close(got, dpa.reference.sinusoidal_embedding(timesteps, 8))
