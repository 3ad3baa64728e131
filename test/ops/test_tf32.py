"""Float32 convolutions where PyTorch may multiply in TF32: the library's own kernels.

PyTorch's convolutions take TF32 or float32 as their heuristics say, so the reference is what TF32
gives at best: float64 convolutions of operands that are rounded to TF32, forward and backward;
but for weights of few elements, of which the library's kernels multiply two parts, and for small
convolutions, which they multiply to float32's accuracy.
"""

from __future__ import annotations

import pytest
import torch
from launched import launched
from torch.nn import functional as F

import dpa

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 8,
        reason="TF32 begins at compute capability 8.0",
    ),
]

_MORE = 1.1  # times the error of TF32 in float64 arithmetic


@pytest.fixture(params=[True, False], ids=["tf32", "float32"])
def tf32(request):
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=request.param):
        yield request.param


def _channels_last(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _error(got, exact):
    return ((got.double() - exact).norm() / exact.norm()).item()


def _gradients(function, tensors, grad):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))


def _in_own_tf32(ran):
    """Whether the weight gradient is the library's: Hopper's kernel, or that of other GPUs."""
    return "wgrad_tf32" in ran or "mma_wgrad_kernel<float" in ran


def _rounded(x):
    """To the nearest TF32, ties to even: ten bits of fraction."""
    bits = x.float().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32).to(x.dtype)


_IN_TWO_PARTS = 2**18  # elements of a weight, at most
_IN_FULL = 2**14, 2**25  # elements of the weight, and multiplications, at most


def _is_full(rows, weight):
    weights, multiplications = _IN_FULL
    return weight.numel() <= weights and rows * weight.numel() <= multiplications


class _InTf32(torch.autograd.Function):
    """``convolve`` of rounded operands, and its gradients from rounded operands."""

    @staticmethod
    def forward(ctx, x, weight, convolve):
        ctx.convolve = convolve
        out = convolve(x, weight)
        ctx.full = _is_full(len(x) * min(x.shape[2], out.shape[2]), weight)
        if not ctx.full:
            x = _rounded(x)
            weight = _rounded(weight) if weight.numel() > _IN_TWO_PARTS else weight
            out = convolve(x, weight)
        ctx.save_for_backward(x, weight)
        return out

    @staticmethod
    def backward(ctx, grad):
        leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.convolve(*leaves)
        return *torch.autograd.grad(out, leaves, grad if ctx.full else _rounded(grad)), None


def _in_tf32(module):
    """A plain module whose convolutions round their operands."""

    def convolution(layer, function):
        settings = {"stride": layer.stride, "padding": layer.padding}
        convolve = lambda x, weight: function(x, weight, **settings)  # noqa: E731
        return lambda x: _InTf32.apply(x, layer.weight, convolve) + layer.bias[:, None]

    for layer in module.modules():
        if isinstance(layer, torch.nn.Conv1d):
            layer.forward = convolution(layer, F.conv1d)
        elif isinstance(layer, torch.nn.ConvTranspose1d):
            layer.forward = convolution(layer, F.conv_transpose1d)
    return module


_SHAPES = {
    "k5": (40, 16, 64, 96, 5, 1, 2, False),
    "wide": (40, 16, 224, 232, 5, 1, 2, False),
    "wider": (40, 16, 232, 232, 5, 1, 2, False),
    "tap": (24, 16, 200, 72, 1, 1, 0, False),
    "narrow": (24, 16, 96, 2, 5, 1, 2, False),
    "final": (24, 16, 2, 96, 1, 1, 0, False),
    "down": (40, 16, 64, 64, 3, 2, 1, False),
    "up": (40, 8, 64, 64, 4, 2, 1, True),
    "in place": (24, 16, 512, 512, 5, 1, 2, False),
    "in place, transposed": (24, 16, 520, 512, 5, 1, 2, True),
    "large": (300, 32, 104, 96, 7, 1, 3, False),
    "long": (3, 100, 72, 40, 3, 1, 1, False),
}


@pytest.mark.parametrize("shape", _SHAPES.values(), ids=_SHAPES.keys())
def test_convolutions(shape, tf32):
    batch, length, outputs, inputs, taps, stride, padding, transposed = shape
    torch.manual_seed(0)
    new = lambda *size: torch.randn(size, device="cuda")  # noqa: E731
    sizes = (inputs, outputs) if transposed else (outputs, inputs)
    tensors = _channels_last(new(batch, inputs, length)), new(*sizes, taps) / 20, new(outputs)
    ours = lambda x, w, b: torch.ops.dpa.conv1d(  # noqa: E731
        x if x.dtype == torch.float64 else _channels_last(x), w, b, stride, padding, transposed
    )
    function = F.conv_transpose1d if transposed else F.conv1d
    convolve = lambda x, w: function(x, w, stride=stride, padding=padding)  # noqa: E731
    grad = torch.randn_like(convolve(*tensors[:2]))
    exactly = lambda x, w, b: convolve(x, w) + b[:, None]  # noqa: E731
    rounding = lambda x, w, b: _InTf32.apply(x, w, convolve) + b[:, None]  # noqa: E731
    double = [t.double() for t in tensors]
    exact = _gradients(rounding if tf32 else exactly, double, grad.double())
    got = _gradients(ours, tensors, grad)
    full = not tf32 or _is_full(batch * min(length, grad.shape[2]), tensors[1])
    for name, a, b in zip(("out", "x", "weight", "bias"), got, exact, strict=True):
        assert _error(a, b) < (2e-6 if full else 1e-5), name
    ran = launched(lambda: _gradients(ours, tensors, grad))
    assert _in_own_tf32(ran) == tf32


@pytest.mark.parametrize(
    ("c_in", "c_out", "groups"),
    # Then groups of 6 and 10 channels; the last one's rows are no whole number of 32 bytes.
    [
        *[(64, 64, 8), (48, 64, 8), (2, 64, 8), (80, 48, 8), (24, 20, 2), (192, 64, 8)],
        *[(136, 64, 8), (512, 512, 8), (192, 1096, 8), (1024, 512, 8)],
    ],
)
def test_residual_block(c_in, c_out, groups, tf32):
    """The wide inputs as two tensors: of one width, and of which the second is no whole chunk.

    Weights of many elements for few rows are read in place, as they lie in the parameters.
    """
    batch = 40 if c_out < 512 else 30
    torch.manual_seed(0)
    block = dpa.nn.ConditionalResidualBlock1D(
        c_in, c_out, 32, 5, groups, cond_predict_scale=True
    ).cuda()
    double = dpa.reference.plain(block).double()
    x = _channels_last(torch.randn(batch, c_in, 16, device="cuda"))
    cond, grad = torch.randn(batch, 32).cuda(), torch.randn(batch, c_out, 16, device="cuda")

    def run(module, dtype):
        module.zero_grad()
        leaf = x.to(dtype).requires_grad_()
        inputs = [leaf]
        if c_in > 100 and module is block:
            first = c_in // 2 if c_out == 512 else 96
            inputs = map(_channels_last, leaf.split([first, c_in - first], dim=1))
        own, *skip = inputs
        out = module(own, cond.to(dtype), None, None, *skip)
        out.backward(grad.to(dtype))
        of_parameters = (p.grad.flatten() for p in module.parameters())
        return out.detach(), torch.cat([leaf.grad.flatten(), *of_parameters])

    exact = run(double, torch.float64)
    at_best = run(_in_tf32(double), torch.float64)
    for got, rounded, each in zip(run(block, torch.float32), at_best, exact, strict=True):
        assert _error(got, each) < (_MORE * _error(rounded, each) + 2e-6 if tf32 else 1e-5)
    if c_out % 8 == 0:  # else its layers are called one by one
        ran = launched(lambda: run(block, torch.float32))
        assert _in_own_tf32(ran) == tf32
        if torch.cuda.get_device_capability()[0] == 9 and "wgrad_tf32" in ran:
            assert ("pack_pairs" in ran or "pack<" in ran) == ((c_in, c_out) != (512, 512))


@pytest.mark.parametrize(("batch", "channels"), [(40, 256), (24, 512)])
def test_a_captured_backward_reads_strided_weights(batch, channels):
    """What a branch packs, or a data gradient reads in place, has been copied before."""
    torch.manual_seed(0)
    new = lambda *size: torch.randn(size, device="cuda")  # noqa: E731
    weight = lambda *size: _channels_last(new(*size) / 20)  # noqa: E731
    conv2 = weight(channels, channels, 5), *(new(channels) for _ in range(3))
    tensors = (
        _channels_last(new(batch, channels // 2, 16)),
        weight(channels, channels // 2, 5),
        *(new(channels) for _ in range(3)),
    )
    tensors = *tensors, *conv2, weight(channels, channels // 2, 1), new(channels)
    grad = _channels_last(new(batch, channels, 16))

    def run():
        leaves = [t.detach().requires_grad_() for t in tensors]
        out = torch.ops.dpa.residual_block1d(*leaves, 8, 1e-5)
        return torch.autograd.grad(out, leaves, grad)

    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        expected = run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = run()
        for x in got:
            x.fill_(torch.nan)
        graph.replay()
    for a, b in zip(got, expected, strict=True):
        assert _error(a, b.double()) < 1e-5


@pytest.mark.parametrize("batch, length", [(40, 16), (3, 1400)])
def test_norms(tf32, batch, length):
    torch.manual_seed(0)
    new = lambda *size: torch.randn(size, device="cuda")  # noqa: E731
    x = _channels_last(new(batch, 64, length) + 3)
    film = new(batch, 64), new(batch, 64)
    tensors = x, new(64), new(64), *film, new(batch, 64, length)
    ours = lambda x, w, b, scale, shift, residual: torch.ops.dpa.group_norm_mish(  # noqa: E731
        x if x.dtype == torch.float64 else _channels_last(x), 8, w, b, 1e-5, scale, shift, residual
    )
    theirs = lambda x, w, b, scale, shift, residual: (  # noqa: E731
        F.mish(F.group_norm(x, 8, w, b)) * scale[..., None] + shift[..., None] + residual
    )
    grad = torch.randn_like(x)
    exact = _gradients(theirs, [t.double() for t in tensors], grad)
    for a, b in zip(_gradients(ours, tensors, grad), exact, strict=True):
        assert _error(a, b) < 1e-6


def test_network_trains_channels_last():
    torch.manual_seed(0)
    unet = dpa.nn.ConditionalUnet1D(
        2, global_cond_dim=20, diffusion_step_embed_dim=32, down_dims=(64, 128), kernel_size=5
    ).cuda()
    double = dpa.reference.plain(unet).double()
    new = lambda *size: torch.randn(size, device="cuda")  # noqa: E731
    sample, cond, noise = new(32, 16, 2), new(32, 20), new(32, 16, 2)
    steps = torch.randint(100, (32,), device="cuda")

    def run(module, dtype=torch.float32):
        module.zero_grad()
        out = module(sample.to(dtype), steps, None, cond.to(dtype))
        F.mse_loss(out, noise.to(dtype)).backward()
        return torch.cat([p.grad.flatten() for p in module.parameters()])

    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        exact = run(double, torch.float64)
        at_best = _error(run(_in_tf32(double), torch.float64), exact)
        assert _error(run(unet), exact) < _MORE * at_best + 2e-6
        assert _in_own_tf32(launched(lambda: run(unet)))
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        assert not _in_own_tf32(launched(lambda: run(unet)))
        assert _error(run(unet), exact) < 1e-5
