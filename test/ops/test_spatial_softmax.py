import pytest
import torch
from hypothesis import strategies as st
from proofs import OpProofs, Sample
from torch.testing import assert_close

import dpa


class TestSpatialSoftmax(OpProofs):
    op = torch.ops.dpa.spatial_softmax
    reference = dpa.reference.spatial_softmax

    @staticmethod
    def samples(device, dtype):
        new = lambda *size: torch.randn(size, device=device, dtype=dtype)  # noqa: E731
        yield Sample((new(2, 3, 4, 5), new(1).abs() + 0.5))
        yield Sample((new(1, 2, 1, 6),))
        yield Sample((new(3, 1, 3, 1), new().abs() + 0.5))

    @staticmethod
    def rejected(device):
        new = lambda *size: torch.randn(size, device=device)  # noqa: E731
        x, one = new(2, 3, 4, 5), torch.ones(1, device=device)
        head = r"^dpa::spatial_softmax: "
        yield (
            head + r"input must have 4 dimensions \(B, K, H, W\), got shape \[3, 4, 5\]",
            Sample((x[0],)),
        )
        yield head + r"input must be float64", Sample((x.int(),))
        yield (
            head + r"input must have at least one pixel, got shape \[2, 3, 0, 5\]",
            Sample((x[:, :, :0],)),
        )
        yield head + r"temperature must have one element, got shape \[2\]", Sample((x, new(2)))
        yield head + r"temperature must have the dtype of input", Sample((x, one.double()))
        if device.type == "cuda":
            yield head + r"temperature must be on the device of input", Sample((x, one.cpu()))

    @staticmethod
    def batches(device):
        for batch, height in [(2, 5), (3, 8), (5, 16), (7, 11)]:
            yield Sample(
                (torch.randn(batch, 3, height, 4, device=device), torch.ones(1, device=device))
            )

    @staticmethod
    def drawn(d):
        sizes = d.shape(2, 2) + [d(st.integers(1, 9)), d(st.integers(1, 9))]
        temperature = d.tensor(1, low=0.2, high=2.0) if d(st.booleans()) else None
        return Sample((d.tensor(*sizes), temperature))


def test_it_is_lerobots(device):
    modeling = pytest.importorskip(
        "lerobot.policies.diffusion.modeling_diffusion",
        reason="LeRobot is not installed (requirements/lerobot.txt)",
        exc_type=ImportError,
    )
    maps = torch.randn(2, 7, 4, 5, dtype=torch.float64, device=device)
    # Its grid is made in float32.
    want = modeling.SpatialSoftmax((7, 4, 5)).double().to(device)(maps)
    assert_close(dpa.ops.spatial_softmax(maps), want, rtol=1e-6, atol=1e-7)


def test_it_is_robomimics(device):
    nets = pytest.importorskip(
        "robomimic.models.base_nets",
        reason="robomimic is not installed (requirements/robomimic.txt)",
        exc_type=ImportError,
    )
    maps = torch.randn(2, 7, 4, 5, dtype=torch.float64, device=device)
    pool = nets.SpatialSoftmax((7, 4, 5), None, temperature=0.7, learnable_temperature=True)
    pool = pool.double().to(device).eval()
    got = dpa.ops.spatial_softmax(maps, pool.temperature)
    assert_close(got, pool(maps), rtol=1e-6, atol=1e-7)


def test_large_values_do_not_overflow(device):
    maps = torch.tensor([[[[1000.0, 0.0, -1000.0]]]], device=device)
    assert dpa.ops.spatial_softmax(maps).tolist() == [[[-1.0, -1.0]]]
