"""Convolutions over few places as GEMMs, for a trace: what is taken apart into what.

A loop's sample has 4 to 64 places. There cuDNN's 16-bit convolution is six small kernels, which
bring tensors and weights into another order and back and add the bias. As a GEMM it is three: the
places with zeros around them, the rows that a kernel sees of them, and the GEMM with its bias.
Results have the channels of a place side by side in memory, which the next convolution reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dpa.nn.blocks1d import join

_MOST = 256  # rows of a GEMM; cuDNN's convolutions are as fast beyond
_VECTOR = 8  # channels a group from which on norms take (B, C, T) in that order
_aten, _ours = torch.ops.aten, torch.ops.dpa


def parts() -> dict[Any, Callable[..., Any]]:
    """Return what computes an op of a trace, by the op; NotImplemented leaves it as it is."""
    return {
        _aten.convolution.default: _convolution,
        _ours.conv1d.default: _conv1d,
        _ours.conv1d_gnm.default: _conv1d_gnm,
        _ours.residual_block1d.default: _residual_block1d,
    }


def _is_short(x: Tensor) -> bool:
    return x.dim() == 3 and x.shape[0] * x.shape[2] <= _MOST


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    plain = groups == 1 and list(dilation) == [1] and not any(output_padding)
    step, edge, taps = stride[0], padding[0], weight.shape[2]
    if not _is_short(x) or not plain or (transposed and taps % step):
        return NotImplemented
    if not transposed:
        out = _gemm(_seen(x, edge, taps, step), weight.permute(2, 1, 0), bias)
    else:  # a row sees what gives ``step`` results beside one another
        seen = taps // step
        matrix = weight.unflatten(2, (seen, step)).flip(2).permute(2, 0, 3, 1)
        bias = None if bias is None else bias.repeat(step)
        out = _gemm(_seen(x, seen - 1, seen, 1), matrix.flatten(2), bias)
        out = out.reshape(len(x), -1, weight.shape[1])
        out = out[:, edge : out.shape[1] - edge]
    return out.transpose(1, 2)


def _seen(x: Tensor, edge: int, taps: int, step: int) -> Tensor:
    """Return what a kernel sees of (B, C, T) at each of its places: (B, T', K, C)."""
    rows = x.transpose(1, 2)
    if edge:
        zeros = torch.zeros((len(x), edge, x.shape[1]), dtype=x.dtype, device=x.device)
        rows = torch.cat([zeros, rows, zeros], dim=1)
    return rows.unfold(1, taps, step).transpose(2, 3)


def _gemm(seen: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return (B, T', N) of (B, T', K, C) and (K, C, N)."""
    flat, matrix = seen.flatten(2).flatten(0, 1), weight.flatten(0, 1)
    out = flat @ matrix if bias is None else torch.addmm(bias, flat, matrix)
    return out.unflatten(0, seen.shape[:2])


def _conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int = 1,
    padding: int = 0,
    transposed: bool = False,
) -> Any:
    if not _is_short(x):
        return NotImplemented
    return _aten.convolution(x, weight, bias, [stride], [padding], [1], transposed, [0], 1)


def _conv1d_gnm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gn_weight: Tensor | None,
    gn_bias: Tensor | None,
    num_groups: int,
    eps: float = 1e-5,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    residual: Tensor | None = None,
) -> Any:
    if not _is_short(x):
        return NotImplemented
    out = _conv1d(x, weight, bias, 1, weight.shape[2] // 2)
    norm = num_groups, gn_weight, gn_bias, eps, scale, shift
    if len(weight) >= _VECTOR * num_groups:
        return _ours.group_norm_mish(out, *norm, residual)
    out = _ours.group_norm_mish(out.contiguous(), *norm)
    return out if residual is None else out + residual


def _residual_block1d(
    x: Tensor,
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
) -> Any:
    if not _is_short(x):
        return NotImplemented
    if skip is not None:
        x = join(x, skip)
    norm, film = (gn1_weight, gn1_bias, num_groups, eps), (scale, shift)
    out = _conv1d_gnm(x, conv1_weight, conv1_bias, *norm, *film)
    residual = x if residual_weight is None else _conv1d(x, residual_weight, residual_bias)
    norm = gn2_weight, gn2_bias, num_groups, eps
    return _conv1d_gnm(out, conv2_weight, conv2_bias, *norm, None, None, residual)
