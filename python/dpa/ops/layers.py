"""Layers: the recurrent cell, and what the U-Net is made of."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "conv1d",
    "conv1d_gnm",
    "group_norm_mish",
    "joint_linear",
    "lltm",
    "residual_block1d",
    "sinusoidal_embedding",
]


def lltm(
    input: Tensor, weights: Tensor, bias: Tensor, old_h: Tensor, old_cell: Tensor
) -> tuple[Tensor, Tensor]:
    """Run one step of an LSTM cell without a forget gate and with an ELU candidate.

    With ``gates = cat(old_h, input) @ weights^T + bias``, in thirds ``i``, ``o`` and ``g``::

        new_cell = old_cell + elu(g) * sigmoid(i)
        new_h    = tanh(new_cell) * sigmoid(o)

    Args:
        input: (B, I).
        weights: (3 S, S + I).
        bias: (3 S) or (1, 3 S).
        old_h: (B, S).
        old_cell: (B, S).

    Returns:
        ``(new_h, new_cell)``, each (B, S). Differentiable in every argument to any order.

    Source: the PyTorch tutorial "Custom C++ and CUDA Extensions".

    """
    return torch.ops.dpa.lltm(input, weights, bias, old_h, old_cell)


def group_norm_mish(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Normalise by groups, apply Mish, then FiLM, in one pass.

    ``mish(group_norm(input)) * scale + shift + residual`` with
    ``mish(x) = x * tanh(log(1 + exp(x)))``. A group is ``C / num_groups`` neighbouring channels
    with all their trailing elements; its variance is the biased one.

    Args:
        input: (B, C, ...), of any rank from 2.
        num_groups: a positive divisor of C.
        weight: (C,) scale of the normalisation, or None for 1; of the dtype of ``input``, or
            float32 where that has 16 bits.
        bias: (C,) shift of the normalisation, or None for 0; the same.
        eps: added to the variance, at least 0.
        scale: (B, C) FiLM scale, or None for 1.
        shift: (B, C) FiLM shift, or None for 0.
        residual: added at the end, of the shape and dtype of ``input``, or None.

    Returns:
        A tensor in the shape and dtype of ``input``, contiguous, or channels-last (strides
        (C T, 1, C)) where ``input`` is. On the GPU a 16-bit channels-last group of up to
        8192 elements, in multiples of 8 channels (2304 or more in other even numbers), is read
        once and written once.
        Differentiable in every floating tensor.

    Sources: Wu and He, Group Normalization (2018); Misra, Mish: A Self Regularized Non-Monotonic
    Activation Function (2019); Perez et al., FiLM (2018).

    """
    return torch.ops.dpa.group_norm_mish(
        input, num_groups, weight, bias, eps, scale, shift, residual
    )


def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int = 1,
    padding: int = 0,
    transposed: bool = False,
) -> Tensor:
    """Convolve along time, or transposed, in whichever order the input has in memory.

    ``torch.nn.functional.conv1d(input, weight, bias, stride, padding)``, or ``conv_transpose1d``. A
    channels-last input, (B, T, C) in memory, gives a channels-last output; 16-bit ones run on
    tensor cores without a copy, on a GPU of compute capability 8.0 or later.

    Args:
        input: (B, C_in, T).
        weight: (C_out, C_in, k), or (C_in, C_out, k) where ``transposed``; in the input's dtype, or
            float32 beside a 16-bit input; the GEMMs then run in the input's dtype.
        bias: (C_out,) or None; likewise.
        stride: at least 1.
        padding: zeros at both ends, or, where ``transposed``, elements left out at both ends.
        transposed: whether the convolution is the transposed one.

    Returns:
        (B, C_out, T_out), in the dtype and order of ``input``; T_out is
        ``(T + 2 padding - k) // stride + 1``, or ``(T - 1) stride - 2 padding + k``. Differentiable
        in every tensor, each gradient in its tensor's dtype. Under autocast the input alone is
        cast.

    """
    return torch.ops.dpa.conv1d(input, weight, bias, stride, padding, transposed)


def conv1d_gnm(
    input: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    gn_weight: Tensor | None,
    gn_bias: Tensor | None,
    num_groups: int,
    eps: float = 1e-5,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Convolve, normalise by groups, apply Mish, then FiLM: the block of Diffusion Policy's U-Net.

    ``group_norm_mish(conv1d(input, conv_weight, conv_bias, padding=k // 2), num_groups, gn_weight,
    gn_bias, eps, scale, shift, residual)``, with stride 1.

    Args:
        input: (B, C_in, T).
        conv_weight: (C_out, C_in, k) with k odd, so that the length stays T.
        conv_bias: (C_out,) or None.
        gn_weight: (C_out,) scale of the normalisation, or None for 1.
        gn_bias: (C_out,) shift of the normalisation, or None for 0.
        num_groups: a positive divisor of C_out.
        eps: added to the variance, at least 0.
        scale: (B, C_out) FiLM scale, or None for 1.
        shift: (B, C_out) FiLM shift, or None for 0.
        residual: (B, C_out, T) added at the end, or None for 0.

    The four parameters are in the input's dtype, or float32 beside a 16-bit input.

    Returns:
        (B, C_out, T), in the dtype of ``input``. Differentiable in every floating tensor. Under
        autocast the activations are cast to the lower precision.

    Source: Chi et al., Diffusion Policy: Visuomotor Policy Learning via Action Diffusion (2023).

    """
    return torch.ops.dpa.conv1d_gnm(
        input, conv_weight, conv_bias, gn_weight, gn_bias, num_groups, eps, scale, shift, residual
    )


def residual_block1d(
    input: Tensor,
    conv1_weight: Tensor,
    conv1_bias: Tensor,
    gn1_weight: Tensor,
    gn1_bias: Tensor,
    conv2_weight: Tensor,
    conv2_bias: Tensor,
    gn2_weight: Tensor,
    gn2_bias: Tensor,
    residual_weight: Tensor | None,
    residual_bias: Tensor | None,
    num_groups: int,
    eps: float = 1e-5,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    skip: Tensor | None = None,
) -> Tensor:
    """Run a residual block of Diffusion Policy's U-Net as one op, forward and backward.

    ``x = group_norm_mish(conv1d(input, conv1), gn1) * scale + shift`` and
    ``group_norm_mish(conv1d(x, conv2), gn2) + conv1d(input, residual)``, or ``+ input``. The
    convolutions have stride 1 and padding ``k // 2``. Called as one op it costs the host little,
    which is what limits a training step at these sizes.

    Args:
        input: (B, C_in, T), or its first channels where there is a ``skip``.
        conv1_weight: (C_out, C_in, k) with k odd.
        conv1_bias: (C_out,).
        gn1_weight: (C_out,) scale of the first normalisation.
        gn1_bias: (C_out,) shift of the first normalisation.
        conv2_weight: (C_out, C_out, k) with k odd.
        conv2_bias: (C_out,).
        gn2_weight: (C_out,) scale of the second normalisation.
        gn2_bias: (C_out,) shift of the second normalisation.
        residual_weight: (C_out, C_in, 1), or None where C_in is C_out: the input itself is added.
        residual_bias: (C_out,) or None.
        num_groups: a positive divisor of C_out.
        eps: added to the variances, at least 0.
        scale: (B, C_out) FiLM scale, or None for 1.
        shift: (B, C_out) FiLM shift, or None for 0.
        skip: (B, C_skip, T), channels of the input behind those of ``input``, or None: the same as
            ``torch.cat([input, skip], 1)`` for ``input``, without the copy on tensor cores.

    The parameters are in the input's dtype, or float32 beside a 16-bit input.

    Returns:
        (B, C_out, T), in the dtype and order of ``input``. Differentiable in every tensor, each
        gradient in its tensor's dtype. Under autocast the activations alone are cast. 16-bit
        channels-last inputs run on tensor cores, from compute capability 8.0 on.

    Source: Chi et al., Diffusion Policy: Visuomotor Policy Learning via Action Diffusion (2023).

    """
    first = conv1_weight, conv1_bias, gn1_weight, gn1_bias
    second = conv2_weight, conv2_bias, gn2_weight, gn2_bias
    beside = residual_weight, residual_bias
    given = *first, *second, *beside, num_groups, eps, scale, shift, skip
    return torch.ops.dpa.residual_block1d(input, *given)


def joint_linear(
    input: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    rest: Tensor | None = None,
    mish: bool = False,
) -> Tensor:
    """Run linear layers of one input as one GEMM, their outputs side by side.

    ``cat([input @ w.T + b for w, b in zip(weights, biases)], dim=1)``: the FiLM of all blocks of a
    U-Net, say, without a copy of the weights in one piece. The backward keeps nothing but the
    arguments; the weights' gradients are parts of one tensor. An input whose first columns alone
    want a gradient comes in two parts, so that the backward need not make the others': with
    ``rest`` the input is ``cat([input, rest], dim=1)``. With ``mish`` the layers read its Mish.

    Args:
        input: (B, C_in), or its first columns.
        weights: at least one, each (C_i, C_in), all of one dtype.
        biases: as many, each (C_i,), in the weights' dtype.
        rest: the other columns of the input, in its dtype, or None.
        mish: whether the layers read ``F.mish`` of the input, rounded to its dtype.

    The parameters are in the input's dtype, or float32 beside a 16-bit input.

    Returns:
        (B, sum of C_i), in the dtype of ``input``. Differentiable in every tensor, each gradient in
        its tensor's dtype. Under autocast the input is cast, ``rest`` too, and no parameter.

    """
    return torch.ops.dpa.joint_linear(input, weights, biases, rest, mish)


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
