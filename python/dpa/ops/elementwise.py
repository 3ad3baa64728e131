"""Element-wise ops."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "elementwise_mult",
    "fused_relu_add",
    "sinusoidal_embedding",
]


def elementwise_mult(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply two tensors: ``a * b``, element by element, without broadcasting.

    Args:
        a: any shape and strides.
        b: of the shape, dtype and device of ``a``.
        out: receives the result, of the shape, dtype and device of ``a``. It may be ``a`` or
            ``b`` itself, and must not overlap them in part. Then no input may require a gradient.

    Returns:
        ``a * b``, or ``out``. Differentiable to any order, forward and backward.

    """
    if out is None:
        return torch.ops.dpa.elementwise_mult(a, b)
    torch.ops.dpa.elementwise_mult.out(a, b, out=out)
    return out


def fused_relu_add(x: Tensor, y: Tensor, bias: float = 0.0) -> Tensor:
    """Compute ``relu(x) + y + bias`` in one pass.

    Args:
        x: any shape and strides.
        y: of the shape, dtype and device of ``x``.
        bias: a number added to every element.

    Returns:
        The sum, shaped as ``x``. Differentiable in ``x`` and ``y`` to any order, forward and
        backward; the derivative of relu at zero is zero.

    """
    return torch.ops.dpa.fused_relu_add(x, y, bias)


def sinusoidal_embedding(timesteps: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Embed timesteps as sines and cosines, in one kernel on a GPU.

    ``out[..., i] = sin(t * f(i))`` and ``out[..., dim / 2 + i] = cos(t * f(i))`` with frequencies
    ``f(i) = exp(-i * ln(10000) / (dim / 2 - 1))``, from 1 down to 1e-4. Angles are float32, and
    float64 of float64 timesteps, whatever the ``dtype``: they reach 1000 radians, which 16 bits do
    not resolve.

    Args:
        timesteps: any shape, integers or floating numbers.
        dim: even and at least 4.
        dtype: of the result, a floating type; None for that of floating timesteps, and float32 of
            integers.

    Returns:
        The shape of ``timesteps`` and ``dim`` behind it. Differentiable in floating timesteps to
        any order, forward and backward. Autocast changes nothing.

    Source: the ``SinusoidalPosEmb`` of Diffusion Policy; Vaswani et al., Attention Is All You Need
    (2017).

    """
    return torch.ops.dpa.sinusoidal_embedding(timesteps, dim, dtype)
