"""Networks of other than eight groups on packed weights: against float64, by every kernel."""

import copy

import pytest
import torch
from test_packed import ERROR, _rounded_to_e4m3, error
from test_widths import KINDS, _net

from dpa.packed.config import path_of
from dpa.packed.unet import PackedUnet

_CASES = [  # widths, groups, kernel, samples, horizon, the kernel of 16 bits, of float32
    ((256, 512, 1024), 16, 5, 1, 16, "resident", "resident"),
    ((256, 512, 1024), 32, 3, 1, 24, "resident", "resident"),
    ((512, 1024, 2048), 16, 5, 1, 16, "resident", "resident"),
    ((128, 256), 32, 5, 1, 16, "resident", "resident"),  # groups of 4 channels
    ((256, 512, 1024), 8, 5, 1, 36, "resident", "resident"),  # a part of a third pair
    ((256, 512, 1024), 16, 3, 1, 44, "resident", "resident"),
    ((256, 512), 8, 5, 1, 40, "resident", "resident"),
    ((64, 128, 256), 16, 7, 1, 32, None, None),
    ((64, 64, 128), 32, 5, 1, 16, None, None),  # groups of 2
    ((256, 512, 1024), 16, 5, 2, 16, "clusters", None),
    ((256, 512, 1024), 16, 3, 6, 32, "clusters", None),
    ((512, 1024, 2048), 16, 5, 1, 48, "clusters", None),
    ((512, 1024, 2048), 32, 3, 1, 64, "clusters", None),
    ((512, 1024, 2048), 32, 5, 8, 16, "clusters", None),
    ((512, 1024), 32, 7, 3, 24, "clusters", None),
    ((1024, 2048), 32, 5, 1, 40, "clusters", None),
    ((256, 512), 4, 5, 1, 16, None, None),
    ((192, 384), 24, 5, 2, 16, None, None),
    ((256, 512, 1024), 1, 5, 4, 16, None, None),
]


def _with_means_apart(device, dims, groups, kernel):
    """A network whose groups have means far apart, so that no norm may count another's values."""
    unet = _net("cpu", dims, kernel, groups)
    with torch.no_grad():
        for name, bias in unet.named_parameters():
            if name.endswith("block.0.bias"):
                of = 8 if name.startswith("final") else groups
                bias.view(of, -1).add_(torch.linspace(-0.4, 0.4, of)[torch.randperm(of), None])
    return unet.to(device)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize(("dims", "groups", "kernel", "count", "horizon", "narrow", "wide"), _CASES)
def test_against_float64(hopper, dims, groups, kernel, count, horizon, narrow, wide, dtype):
    unet = _with_means_apart(hopper, dims, groups, kernel)
    exact = copy.deepcopy(unet if dtype.itemsize > 1 else _rounded_to_e4m3(unet)).double()
    packed = PackedUnet(unet, dtype)
    path = wide if dtype == torch.float32 else narrow
    if path:
        assert path_of(tuple(packed._layout), packed._kind, count, horizon, hopper) == path
    got, again, expected = [], [], []
    for _ in range(max(1, 64 // (count * horizon))):
        sample = torch.randn(count, horizon, 3, device=hopper)
        cond = torch.randn(count, 4, device=hopper)
        steps = torch.randint(100, (count,), device=hopper)
        for calls in (got, again):
            calls.append(packed(sample, steps, cond))
        with torch.no_grad():
            expected.append(exact(sample.double(), steps, global_cond=cond.double()))
    got, again, expected = map(torch.cat, (got, again, expected))
    kind = torch.float16 if dtype.itemsize == 1 else dtype
    assert error(got, expected) < 2 * ERROR[kind]  # biases this large cost sums some bits
    assert torch.equal(got, again)
