"""Element-wise ops."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "elementwise_mult",
    "fused_relu_add",
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
