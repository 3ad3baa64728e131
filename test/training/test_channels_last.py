"""Channels-last inside, the network's own results outside."""

import copy

import pytest
import torch
from proofs import Calls
from torch import nn
from torch.testing import assert_close

from dpa.training.channels_last import ChannelsLast, value_of

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
        out = out.to(x.dtype).contiguous()
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
@pytest.mark.parametrize(
    ("name", "in_place"), [("resnet18", True), ("resnet18", False), ("resnet50", True)]
)
def test_resnets(device, name, in_place, norm):
    """Results, gradients in their parameters' order, and statistics are the plain network's."""
    torch.manual_seed(0)
    module = getattr(torchvision.models, name)(norm_layer=norm).to(device, torch.float64)
    for layer in module.modules():
        if isinstance(layer, nn.ReLU):
            layer.inplace = in_place
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


@pytest.mark.parametrize("grouped", [False, True])
def test_pooling_and_batch_norm_are_ops_and_weights_one_copy(device, grouped):
    torch.manual_seed(0)
    norm = _group_norm if grouped else nn.BatchNorm2d
    module = torchvision.models.resnet18(norm_layer=norm).to(device)
    weights = [m.weight for m in module.modules() if isinstance(m, nn.Conv2d)]
    with Calls() as calls:
        with ChannelsLast(weights):
            out = value_of(module(torch.randn(2, 3, 32, 40, device=device)))
        out.sum().backward()
    count = lambda name: sum(name in called for called in calls.names)  # noqa: E731
    assert (
        count("dpa.batch_norm_act_forward")
        == count("dpa.batch_norm_act_back")
        == 20 * (not grouped)
    )
    assert count("dpa.max_pool2d_forward") == count("dpa.max_pool2d_back") == 1
    assert count("dpa.weights_in_order") == 2
    assert count("relu") == 0 and count("foreach_lerp") == (not grouped)


@pytest.mark.parametrize("momentum", [0.1, 0.7])
def test_running_statistics_of_a_norm_that_is_called_twice(device, momentum):
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8, momentum=momentum).to(device)
    plain, last = copy.deepcopy(norm), torch.channels_last
    images = [torch.randn(2, 8, 5, 7, device=device).to(memory_format=last) for _ in range(2)]
    for x in images:
        plain(x)
    with ChannelsLast():
        for x in images:
            value_of(norm(x))
    for a, b in zip(norm.buffers(), plain.buffers(), strict=True):
        assert_close(a, b)


def test_evaluation_and_one_value_a_channel_are_pytorchs(device):
    norm, last = nn.BatchNorm2d(8).to(device), torch.channels_last
    x = torch.randn(2, 8, 5, 7, device=device).to(memory_format=last)
    want = norm.eval()(x)
    with ChannelsLast():
        assert_close(value_of(norm(x)), want)
    norm.train()
    with pytest.raises(ValueError, match="more than 1 value per channel"), ChannelsLast():
        norm(torch.randn(1, 8, 1, 1, device=device).to(memory_format=last))
    assert norm.running_mean.eq(0).all()


@pytest.mark.parametrize(
    "options", [{"ceil_mode": True}, {"dilation": 2}, {"return_indices": True}]
)
def test_other_pooling_is_pytorchs(device, options):
    x = torch.randn(2, 8, 9, 9, device=device).to(memory_format=torch.channels_last)
    want = nn.functional.max_pool2d(x, 3, 2, 1, **options)
    with ChannelsLast():
        assert_close(nn.functional.max_pool2d(x, 3, 2, 1, **options), want)


def test_second_derivatives(device):
    torch.manual_seed(0)
    module = _Block("twice").to(device, torch.float64)
    x = torch.randn(1, 16, 4, 4, device=device, dtype=torch.float64, requires_grad=True)

    def run(x):
        with ChannelsLast():
            return value_of(module(x)).to(x.dtype).contiguous()

    (first,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
    (want,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    got, want = (torch.autograd.grad(g.square().sum(), x)[0] for g in (first, want))
    assert_close(got, want)
