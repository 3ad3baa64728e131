"""The U-Net whose layers are changed, replaced or hooked: the changes count."""

import copy

import pytest
import torch
from test_unet1d import CONFIGS, make, make_inputs
from tolerances import tolerance
from torch.utils.flop_counter import FlopCounterMode

import dpa
from dpa.nn import Conv1dBlock, plain, unet1d


def make_one_level():
    """A net without an up path, which compiles in half the time, and arguments for it."""
    options, batch, horizon = CONFIGS["film_scale"]
    torch.manual_seed(0)
    options = {**options, "down_dims": (16,)}
    return dpa.nn.ConditionalUnet1D(**options), make_inputs(options, batch, horizon)


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
    block.blocks[0].forward = lambda x: first(x) * 2
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
    net, inputs = make_one_level()
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


class _Doubled(torch.nn.Module):
    """A block of the user's own, called as the original calls its blocks."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x, cond):
        return 2 * self.block(x, cond)


class _Louder(dpa.nn.ConditionalResidualBlock1D):
    def forward(self, x, cond):
        return super().forward(x, 2 * cond)


def _replaced_block(net):
    net.mid_modules[0] = _Doubled(net.mid_modules[0])
    net.down_modules[0][1] = _Doubled(net.down_modules[0][1])


def _block_of_a_subclass(net):
    net.down_modules[0][1].__class__ = _Louder


def _own_forward_of_a_block(net):
    block = net.mid_modules[1]
    block.forward = lambda x, cond: type(block).forward(block, x, 2 * cond)


def _hook_on_what_a_block_gets(net):
    louder = lambda _, args: (args[0], 2 * args[1], *args[2:])  # noqa: E731
    net.mid_modules[0].register_forward_pre_hook(louder)


class _Twice(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return 2 * self.layer(x)


def _hook_on_what_a_half_of_a_block_gives(net):
    for i in (0, 1):
        net.mid_modules[i].blocks[i].register_forward_hook(lambda module, args, out: 2 * out)


def _wrapped_half_of_a_block(net):
    for i in (0, 1):
        net.mid_modules[i].blocks[i] = _Twice(net.mid_modules[i].blocks[i])


def _plain_half_of_a_block(net):
    block = net.mid_modules[0].blocks[0]
    block.block[0].weight.data *= 2
    net.mid_modules[0].blocks[0] = block.block


def _wrapped_layers_of_half_a_block(net):
    for half in (net.mid_modules[0].blocks[1], net.final_conv[0]):
        half.block = _Twice(half.block)


def _hook_on_the_layers_of_half_a_block(net):
    for half in (net.mid_modules[0].blocks[1], net.final_conv[0]):
        half.block.register_forward_hook(lambda module, args, out: 2 * out)


def _wrapped_ends(net):
    net.final_conv[1] = _Twice(net.final_conv[1])
    net.diffusion_step_encoder[1] = _Twice(net.diffusion_step_encoder[1])


def _longer_end(net):
    net.final_conv.insert(1, torch.nn.Tanh())


def _wrapped_end(net):
    net.final_conv = _Twice(net.final_conv)


def _hook_on_the_encoder(net):
    net.diffusion_step_encoder.register_forward_hook(lambda module, args, out: 2 * out)


def _longer_encoder(net):
    net.diffusion_step_encoder.append(torch.nn.Tanh())


def _own_forward_of_the_encoder(net):
    encoder = net.diffusion_step_encoder
    encoder.forward = lambda steps: type(encoder).forward(encoder, steps + 50)


PARTS = [
    _hook_on_what_a_half_of_a_block_gives,
    _wrapped_half_of_a_block,
    _plain_half_of_a_block,
    _wrapped_layers_of_half_a_block,
    _hook_on_the_layers_of_half_a_block,
    _wrapped_ends,
    _longer_end,
    _wrapped_end,
    _hook_on_the_encoder,
    _longer_encoder,
    _own_forward_of_the_encoder,
    _replaced_block,
    _block_of_a_subclass,
    _own_forward_of_a_block,
    _hook_on_what_a_block_gets,
]


@pytest.mark.parametrize("joint", [False, True], ids=["film_by_block", "joint_film"])
@pytest.mark.parametrize("change", PARTS, ids=lambda change: change.__name__[1:])
def test_changed_parts_count(change, joint, monkeypatch):
    """Also where FiLM of all blocks would be one GEMM."""
    monkeypatch.setattr(unet1d, "channels_last", lambda *_: joint)
    net, inputs = make_one_level()
    before = net(**inputs)
    change(net)
    got = net(**inputs)
    torch.testing.assert_close(got, _as_the_original(net, **inputs), **tolerance(torch.float32))
    assert not torch.allclose(got, before)
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="eager", fullgraph=True)(**inputs)
    torch.testing.assert_close(compiled, got, **tolerance(torch.float32))


def _hook_on_all(net):
    return torch.nn.modules.module.register_module_forward_hook(lambda *_: None)


def _hook_on_the_whole_encoder(net):
    return net.diffusion_step_encoder.register_forward_hook(lambda *_: None)


class _Counted(FlopCounterMode):
    """A FlopCounterMode from when it is made until it is removed."""

    def __init__(self, net):
        super().__init__(display=False)
        self.__enter__()

    def remove(self):
        self.__exit__(None, None, None)
        assert self.get_total_flops() > 0


@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("watch", [_hook_on_all, _hook_on_the_whole_encoder, _Counted])
def test_a_watched_network_of_another_dtype_answers(watch, dtype, accelerated):
    """Values and gradients as the plain network's that nobody watches; the sinusoid is float32."""
    net, inputs = make_one_level()
    plain_net = dpa.reference.plain(net).to(dtype)
    inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
    if accelerated:
        net = dpa.accelerate(copy.deepcopy(plain_net))
        net(**inputs)
    net.to(dtype)

    def passed(net):
        out = net(**inputs)
        return out, *torch.autograd.grad(out.double().square().mean(), list(net.parameters()))

    expected = passed(plain_net)
    handle = watch(net)
    try:
        got = passed(net)
    finally:
        handle.remove()
    for x, y in zip(got, expected, strict=True):
        assert x.dtype == dtype
        assert (x - y).norm() <= {torch.float64: 1e-10}.get(dtype, 0.05) * y.norm()


def _silu(net):
    net.mid_modules[0].blocks[0].block[2] = torch.nn.SiLU()


def _circular(net):
    net.final_conv[0].block[0].padding_mode = "circular"


@pytest.mark.parametrize(
    "change", [_silu, _circular, _longer_encoder, _hook_on_what_a_half_of_a_block_gives]
)
def test_torchscript_leaves_nothing_out(change):
    net, _ = make("film_scale")
    change(net)
    with pytest.raises(ValueError, match=r"must be as it was made where"):
        torch.jit.script(net)


def _as_the_original(net, sample, timestep, global_cond=None):
    """Call the network's modules one by one, as the original calls them."""

    def residual_block(block, x, cond):
        out, film = block.blocks[0](x), block.cond_encoder(cond)[..., None]
        scale, shift = film.chunk(2, dim=1)
        return block.blocks[1](out * scale + shift) + block.residual_conv(x)

    cond = net.diffusion_step_encoder(net._steps(sample, timestep)).expand(len(sample), -1)
    if global_cond is not None:
        cond = torch.cat([cond, global_cond], dim=-1)
    x, skips = sample.transpose(1, 2).contiguous(), []
    for first, second, halve in net.down_modules:
        x = second(first(x, cond), cond)
        skips.append(x)
        x = halve(x)
    for block in net.mid_modules:
        x = block(x, cond)
    for first, second, double in net.up_modules:
        x = double(second(first(torch.cat([x, skips.pop()], 1), cond), cond))
    return net.final_conv(x).transpose(1, 2)


def test_a_layer_without_its_bias_is_called():
    """The op takes all weights and biases, except of a shortcut that there need not be."""
    net, inputs = make("film_scale")
    block = net.mid_modules[0].blocks[0].block
    block[0].bias = None
    layers = plain.FoundLayers(block, {"0": (torch.nn.Conv1d,)}, [("0", "bias")], 1)
    assert layers.parameters() is None
    assert net(**inputs).isfinite().all()
