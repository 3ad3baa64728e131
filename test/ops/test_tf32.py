"""Float32 convolutions where PyTorch would multiply in TF32: the library's own kernels, as exact.

Errors are norms of differences from float64, relative to its norm, beside those of PyTorch's own
convolutions in TF32 for the same tensors.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import dpa

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
        reason="the kernels are Hopper's",
    ),
]

_MORE = 1.1  # times PyTorch's own error


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


def _kernels(call):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return " ".join(event.key for event in profile.key_averages())


_SHAPES = {
    "k5": (40, 16, 64, 96, 5, 1, 2, False),
    "narrow": (24, 16, 96, 2, 5, 1, 2, False),
    "final": (24, 16, 2, 96, 1, 1, 0, False),
    "down": (40, 16, 64, 64, 3, 2, 1, False),
    "up": (40, 8, 64, 64, 4, 2, 1, True),
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
    convolve = F.conv_transpose1d if transposed else F.conv1d
    theirs = lambda x, w, b: convolve(x, w, b, stride=stride, padding=padding)  # noqa: E731
    grad = torch.randn_like(theirs(*tensors))
    exact = _gradients(theirs, [t.double() for t in tensors], grad)
    got, other = _gradients(ours, tensors, grad), _gradients(theirs, tensors, grad)
    for name, a, b, c in zip(("out", "x", "weight", "bias"), got, other, exact, strict=True):
        limit = max(_error(b, c) * _MORE, 2e-6)
        assert _error(a, c) < limit, name
        if tf32 and name != "bias" and taps > 1:
            assert _error(a, c) > 5e-5, f"{name} is no TF32 result"
    ran = _kernels(lambda: _gradients(ours, tensors, grad))
    assert ("wgrad_tf32" in ran) == tf32


@pytest.mark.parametrize("c_in", [64, 48, 2])
def test_residual_block(c_in, tf32):
    torch.manual_seed(0)
    block = dpa.nn.ConditionalResidualBlock1D(c_in, 64, 32, 5, 8, cond_predict_scale=True).cuda()
    double = dpa.reference.plain(block).double()
    plain = dpa.reference.plain(block)
    x, cond = _channels_last(torch.randn(40, c_in, 16, device="cuda")), torch.randn(40, 32).cuda()
    grad = torch.randn(40, 64, 16, device="cuda")

    def run(module, dtype):
        module.zero_grad()
        leaf = x.to(dtype).requires_grad_()
        module(leaf, cond.to(dtype)).backward(grad.to(dtype))
        return {"x": leaf.grad} | {name: p.grad for name, p in module.named_parameters()}

    exact, other = run(double, torch.float64), run(plain, torch.float32)
    got = run(block, torch.float32)
    for name, gradient in got.items():
        assert _error(gradient, exact[name]) < max(_error(other[name], exact[name]) * 1.2, 3e-6), (
            name
        )
    assert ("wgrad_tf32" in _kernels(lambda: run(block, torch.float32))) == tf32


def test_norms(tf32):
    torch.manual_seed(0)
    new = lambda *size: torch.randn(size, device="cuda")  # noqa: E731
    x = _channels_last(new(40, 64, 16) + 3)
    tensors = x, new(64), new(64), new(40, 64), new(40, 64), new(40, 64, 16)
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
    plain, double = dpa.reference.plain(unet), dpa.reference.plain(unet).double()
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
        assert _error(run(unet), exact) < _MORE * _error(run(plain), exact)
        assert "wgrad_tf32" in _kernels(lambda: run(unet))
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        assert "wgrad_tf32" not in _kernels(lambda: run(unet))
        assert _error(run(unet), exact) < 1e-5
