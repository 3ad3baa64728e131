"""Channels-last inside, the network's own results outside."""

import copy

import pytest
import torch
from proofs import Calls
from torch import nn
from torch.testing import assert_close

from dpa.training.channels_last import ChannelsLast, in_order_of, value_of

torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed")


def _group_norm(channels):
    return nn.GroupNorm(channels // 16, channels)


class _Block(nn.Module):
    """What follows a norm here is none of what torchvision's blocks do."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.conv, self.norm = nn.Conv2d(16, 32, 3, bias=False), nn.GroupNorm(2, 32)

    def forward(self, x):
        y = self.conv(x)
        z = self.norm(y)
        if self.kind == "twice":
            return torch.relu(z) + z.sigmoid()
        if self.kind == "relu, then itself":
            return nn.functional.relu(z) * z
        if self.kind == "in place, then itself":
            return nn.functional.relu(z, inplace=True) - z
        if self.kind == "its input is written":
            y.mul_(2)
            return z + y
        if self.kind == "a sum, seen by another name":
            same = z
            z += y
            return nn.functional.relu(z, inplace=True) * same
        if self.kind == "a sum that broadcasts":
            z += y.mean((2, 3), keepdim=True)
            return nn.functional.relu(z)
        if self.kind == "in a list":
            return torch.cat([z, y], 1)
        return z.flatten(2).cumsum(2)


_BLOCKS = [
    *("twice", "relu, then itself", "in place, then itself"),
    *("a sum, seen by another name", "a sum that broadcasts", "in a list", "a method"),
]


def _run(module, x, mode):
    module.zero_grad()
    x = x.clone().requires_grad_()
    if mode:
        with ChannelsLast():
            out = value_of(module(x))
        out = in_order_of(out, x.dtype)
    else:
        out = module(x)
    generator = torch.Generator().manual_seed(3)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    out.backward(grad.to(out))
    return out.detach(), x.grad, *(p.grad for p in module.parameters())


def _compare(module, x):
    want = _run(copy.deepcopy(module), x, mode=False)
    got = _run(module, x, mode=True)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, rtol=1e-6, atol=1e-6)
        assert a.stride() == b.stride()
    return got


@pytest.mark.parametrize("kind", _BLOCKS)
def test_whatever_follows_a_norm(device, kind):
    """The norm answers as if it had run where it was called."""
    torch.manual_seed(0)
    module = _Block(kind).to(device, torch.float64)
    _compare(module, torch.randn(2, 16, 9, 7, device=device, dtype=torch.float64))


def test_an_input_that_is_written_later(device):
    module = _Block("its input is written").to(device, torch.float64)
    x = torch.randn(2, 16, 9, 7, device=device, dtype=torch.float64)
    with torch.no_grad():
        want = module(x)
        with ChannelsLast():
            got = value_of(module(x))
    assert_close(got, want)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, _group_norm])
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_resnets(device, name, norm):
    """Results, gradients in their parameters' order, and statistics are the plain network's."""
    torch.manual_seed(0)
    module = getattr(torchvision.models, name)(norm_layer=norm).to(device, torch.float64)
    x = torch.randn(3, 3, 32, 40, device=device, dtype=torch.float64)
    plain = copy.deepcopy(module)
    _run(plain, x, mode=False)
    _compare(module, x)
    for a, b in zip(module.buffers(), plain.buffers(), strict=True):
        assert_close(a, b)


def test_norm_sum_and_relu_are_one_op(device):
    torch.manual_seed(0)
    module = torchvision.models.resnet18(norm_layer=_group_norm).to(device)
    with Calls() as calls, ChannelsLast():
        module(torch.randn(2, 3, 32, 40, device=device))
    norms = [name for name in calls.names if "group_norm" in name]
    assert norms == ["dpa.group_norm_act.default"] * 20
    # The pooling's alone is left: the stem's and the blocks' are in the norms.
    assert not [name for name in calls.names if "relu" in name or "aten.add_" in name]


def test_second_derivatives(device):
    torch.manual_seed(0)
    module = _Block("twice").to(device, torch.float64)
    x = torch.randn(1, 16, 4, 4, device=device, dtype=torch.float64, requires_grad=True)

    def run(x):
        with ChannelsLast():
            return in_order_of(value_of(module(x)), x.dtype)

    (first,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
    (want,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    got, want = (torch.autograd.grad(g.square().sum(), x)[0] for g in (first, want))
    assert_close(got, want)
