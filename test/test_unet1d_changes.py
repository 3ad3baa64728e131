"""The U-Net whose layers are changed, replaced or hooked: the changes count."""

import pytest
import torch

import dpa
from dpa.nn import Conv1dBlock
from test_unet1d import make
from tolerances import tolerance


def test_hooks_and_replaced_layers_are_called():
    net, inputs = make("film_scale")
    expected = net(**inputs)
    block, seen = net.mid_modules[0], []
    handle = block.blocks[1].block[0].register_forward_hook(lambda *_: seen.append("conv"))
    net(**inputs)
    assert seen == ["conv"]
    handle.remove()
    seen.clear()
    handle = block.blocks[1].register_forward_hook(lambda *_: seen.append("block"))
    torch.testing.assert_close(net(**inputs), expected, **tolerance(torch.float32))
    assert seen == ["block"]
    handle.remove()
    first = block.blocks[0]
    block.blocks[0] = torch.nn.Identity()
    block.blocks[0].forward = lambda x, scale, shift: first(x, scale, shift) * 2
    assert not torch.allclose(net(**inputs), expected)
    block.blocks[0] = first
    torch.testing.assert_close(net(**inputs), expected, rtol=0, atol=0)


class _Adapted(torch.nn.Module):
    """As adapters wrap a layer: it still shows the layer's parameters."""

    def __init__(self, conv):
        super().__init__()
        self.conv = conv
        self.weight, self.bias = conv.weight, conv.bias

    def forward(self, x):
        return self.conv(x) + self.conv(x).roll(1, 1)


def _own_forward(block):
    conv = block.blocks[0].block[0]
    conv.forward = lambda x: torch.nn.Conv1d.forward(conv, x).roll(1, 1)


def _own_forward_of_the_shortcut(block):
    block.residual_conv.forward = lambda x: 2 * x


def _activation(block):
    block.blocks[1].block[2] = torch.nn.ReLU()


def _adapter(block):
    block.blocks[1].block[0] = _Adapted(block.blocks[1].block[0])


def _padding(block):
    block.blocks[0].block[0].padding_mode = "circular"


def _eps(block):
    block.blocks[1].block[1].eps = 0.1


def _appended(block):
    block.blocks[0].block.append(torch.nn.Tanh())


def _dilation(block):
    conv = block.blocks[0].block[0]
    conv.dilation, conv.padding = (2,), (2 * conv.padding[0],)


def _paddings(block):
    for i, more in enumerate((1, -1)):
        conv = block.blocks[i].block[0]
        conv.padding = (conv.padding[0] + more,)


def _hook(block):
    block.blocks[0].block[1].register_forward_hook(lambda module, args, out: 2 * out)


CHANGES = [
    _own_forward,
    _own_forward_of_the_shortcut,
    _activation,
    _adapter,
    _padding,
    _eps,
    _appended,
    _dilation,
    _paddings,
    _hook,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__[1:])
def test_changed_layers_count(change):
    """Whatever is done to a layer inside a block, the network is what PyTorch makes of it."""
    net, inputs = make("film_scale")
    before = net(**inputs)
    change(net.mid_modules[0])
    got = net(**inputs)
    torch.testing.assert_close(got, dpa.reference.plain(net)(**inputs), **tolerance(torch.float32))
    assert not torch.allclose(got, before)
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="eager", fullgraph=True)(**inputs)
    torch.testing.assert_close(compiled, got, **tolerance(torch.float32))


def _circular_halving(net):
    net.down_modules[0][2].conv.padding_mode = "circular"


def _dilated_halving(net):
    conv = net.down_modules[0][2].conv
    conv.dilation, conv.padding = (2,), (2,)


def _dilated_doubling(net):
    conv = net.up_modules[0][2].conv
    conv.dilation, conv.padding, conv.output_padding = (2,), (3,), (1,)


def _strided_end(net):
    net.final_conv[1].stride = (2,)


def _padded_end(net):
    net.final_conv[1].padding = (1,)


SETTINGS = [_circular_halving, _dilated_halving, _dilated_doubling, _strided_end, _padded_end]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("change", SETTINGS, ids=lambda change: change.__name__[1:])
def test_settings_of_the_layers_between_the_blocks_count(change, grad):
    net, inputs = make("film_scale")
    with torch.set_grad_enabled(grad):
        before = net(**inputs)
        change(net)
        got, expected = net(**inputs), dpa.reference.plain(net)(**inputs)
    torch.testing.assert_close(got, expected, **tolerance(torch.float32))
    assert got.shape != before.shape or not torch.allclose(got, before)


def test_hooks_on_all_modules_see_the_layers():
    net, inputs = make("film_scale")
    expected, seen = net(**inputs), set()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda m, *_: seen.add(type(m)))
    try:
        torch.testing.assert_close(net(**inputs), expected, **tolerance(torch.float32))
    finally:
        handle.remove()
    assert Conv1dBlock in seen and torch.nn.Linear in seen
