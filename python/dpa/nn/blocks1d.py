"""The layers of the conditional 1D U-Net, on ``dpa::conv1d_gnm`` and ``dpa::residual_block1d``.

Like the network they compile with ``torch.jit.script``, ``torch.export`` and
``torch.compile(fullgraph=True)``, and annotations stay real objects, which TorchScript needs.
"""

import math
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dpa.library.checks import require
from dpa.nn.plain import PlainLayers, is_changed, is_exporting, scriptable, sequential

HALVES = (torch.float16, torch.bfloat16)
# The order of activations that is fastest on tensor cores; for comparisons it can be refused.
_CHANNELS_LAST = os.environ.get("DPA_CHANNELS_LAST", "1") != "0"


def channels_last(sample: Tensor, weight: Tensor) -> bool:
    """Whether activations are (B, T, C) in memory: in 16 bits, or trained in TF32, on a GPU.

    From compute capability 8.0 on that is the order of its fast convolutions, under autocast, in
    16-bit modules, and in float32 where ``torch.backends.cudnn`` allows TF32 and gradients are
    wanted. Modules map (B, C, T) either way; the order is in the strides, and each op answers in
    the order of its input. Exported programs have the usual order, for they may run anywhere.
    ``DPA_CHANNELS_LAST=0`` in the environment refuses it.
    """
    if not (_CHANNELS_LAST and sample.is_cuda and sample.dtype == weight.dtype) or is_exporting():
        return False
    gains = weight.dtype in HALVES
    if weight.dtype == torch.float32:
        gains = torch.is_autocast_enabled("cuda") or _trains_in_tf32()
    return gains and torch.cuda.get_device_properties(sample.device).major >= 8


def _trains_in_tf32() -> bool:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    cudnn = torch.backends.cudnn
    return cudnn.enabled and cudnn.conv.fp32_precision == "tf32"


class Conv1d(nn.Conv1d):
    """``nn.Conv1d`` on ``dpa::conv1d``: any stride and padding of zeros, one group, no dilation."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C_in, T) to (B, C_out, T')."""
        by_name = isinstance(self.padding, str)  # "same" or "valid"
        if by_name or self.padding_mode != "zeros" or self.dilation[0] != 1 or self.groups != 1:
            return self._conv_forward(x, self.weight, self.bias)
        return torch.ops.dpa.conv1d(
            x, self.weight, self.bias, self.stride[0], int(self.padding[0]), False
        )


class ConvTranspose1d(nn.ConvTranspose1d):
    """``nn.ConvTranspose1d`` on ``dpa::conv1d``."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C_in, T) to (B, C_out, T')."""
        if self.output_padding[0] != 0 or self.dilation[0] != 1 or self.groups != 1:
            options = self.stride, self.padding, self.output_padding, self.groups, self.dilation
            return F.conv_transpose1d(x, self.weight, self.bias, *options)
        return torch.ops.dpa.conv1d(
            x, self.weight, self.bias, self.stride[0], int(self.padding[0]), True
        )


class Conv1dBlock(nn.Module):
    """Conv1d, GroupNorm and Mish as one op, with an optional FiLM and a residual on top.

    ``mish(group_norm(conv1d(x))) * scale + shift + residual``, with stride 1 and padding
    ``kernel_size // 2``.

    Args:
        inp_channels: channels of the input.
        out_channels: channels of the output, a multiple of ``n_groups``.
        kernel_size: odd, so that the length stays as it is.
        n_groups: groups of the GroupNorm.

    Raises:
        ValueError: on an even ``kernel_size`` or an indivisible ``out_channels``.

    """

    def __init__(self, inp_channels: int, out_channels: int, kernel_size: int, n_groups: int = 8):
        super().__init__()
        odd = kernel_size > 0 and kernel_size % 2 == 1
        require(odd, "Conv1dBlock: kernel_size", "be odd", kernel_size)
        right, rule = n_groups > 0 and out_channels % n_groups == 0, "be a multiple of the"
        require(right, "Conv1dBlock: out_channels", f"{rule} {n_groups} groups", out_channels)
        # The forward reads the parameters of this Sequential, and calls it where a layer of it has
        # been changed; it is what the state-dict keys name.
        self.block = nn.Sequential(
            nn.Conv1d(inp_channels, out_channels, kernel_size, padding=kernel_size // 2),
            nn.GroupNorm(n_groups, out_channels),
            nn.Mish(),
        )

    def forward(
        self,
        x: Tensor,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Map (B, inp_channels, T) to (B, out_channels, T), FiLM being (B, out_channels)."""
        if not torch.jit.is_scripting() and self.is_changed_inside():
            return self.layer_by_layer(x, scale, shift, residual)
        conv = self.block[0]
        norm = self.block[1]
        groups, eps = norm.num_groups, norm.eps
        return torch.ops.dpa.conv1d_gnm(
            x, conv.weight, conv.bias, norm.weight, norm.bias, groups, eps, scale, shift, residual
        )

    def __prepare_scriptable__(self) -> nn.Module:
        return scriptable(self, "block", self.is_changed_inside())

    @torch.jit.unused
    def is_changed_inside(self) -> bool:
        """Whether a layer is another one than was made, or changed."""
        layers = tuple(self.block._modules.values())
        if type(self.block) is not nn.Sequential or tuple(map(type, layers)) != _BLOCK_KINDS:
            return True
        return any(map(is_changed, (self.block, *layers)))

    @torch.jit.unused
    def layer_by_layer(
        self,
        x: Tensor,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Compute the same by PyTorch's layers."""
        x = _modulated(self.block(x), scale, shift)
        return x if residual is None else x + residual


_BLOCK_KINDS = (nn.Conv1d, nn.GroupNorm, nn.Mish)


def join(x: Tensor, skip: Tensor) -> Tensor:
    """Concatenate the channels of two tensors, in their order in memory."""
    if x.stride(1) == 1:
        return torch.cat([x.transpose(1, 2), skip.transpose(1, 2)], dim=2).transpose(1, 2)
    return torch.cat([x, skip], dim=1)


def _modulated(x: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
    """Apply FiLM to (B, C, T)."""
    if scale is not None:
        x = x * scale.unsqueeze(2)
    return x if shift is None else x + shift.unsqueeze(2)


class ConditionalResidualBlock1D(nn.Module):
    """Two Conv1dBlocks with FiLM between them, and a residual connection around both.

    ``FiLM(cond) = Linear(Mish(cond))`` is a shift a channel and, with ``cond_predict_scale``, a
    scale before it (the first half of the channels).

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output, a multiple of ``n_groups``.
        cond_dim: width of the conditioning vector.
        kernel_size: odd kernel size of both convolutions.
        n_groups: groups of both GroupNorms.
        cond_predict_scale: whether the conditioning gives a scale besides the shift.

    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        cond_dim: int,
        kernel_size: int = 3,
        n_groups: int = 8,
        cond_predict_scale: bool = False,
    ):
        super().__init__()
        self.blocks = nn.ModuleList(
            [
                Conv1dBlock(in_channels, out_channels, kernel_size, n_groups=n_groups),
                Conv1dBlock(out_channels, out_channels, kernel_size, n_groups=n_groups),
            ]
        )
        self.cond_predict_scale = cond_predict_scale
        self.out_channels = out_channels
        film_channels = out_channels * 2 if cond_predict_scale else out_channels
        self.cond_encoder = nn.Sequential(nn.Mish(), nn.Linear(cond_dim, film_channels))
        if in_channels == out_channels:
            self.residual_conv = nn.Identity()
        else:
            self.residual_conv = Conv1d(in_channels, out_channels, 1)

    def forward(
        self,
        x: Tensor,
        cond: Tensor,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> Tensor:
        """Map (B, in_channels, T) under ``cond`` (B, cond_dim) to (B, out_channels, T).

        A caller that has ``cond_encoder(cond)`` already gives it as ``scale`` and ``shift``. With
        ``skip`` the input is its channels behind those of ``x``.
        """
        if shift is None:
            shift = self.cond_encoder(cond)
            if self.cond_predict_scale:
                scale, shift = shift.chunk(2, dim=1)
        if not torch.jit.is_scripting():
            parameters = BLOCK_LAYERS.of(self)
            if parameters is not None:
                norm = self.blocks[0].block[1]
                return torch.ops.dpa.residual_block1d(
                    x, *parameters, norm.num_groups, norm.eps, scale, shift, skip
                )
        if skip is not None:
            x = join(x, skip)
        if not torch.jit.is_scripting() and self._has_other_blocks():
            return self._block_by_block(x, scale, shift)
        out = self.blocks[0](x, scale, shift)
        return self.blocks[1](out, None, None, self.residual_conv(x))

    def __prepare_scriptable__(self) -> nn.Module:
        return scriptable(self, "blocks", self._has_other_blocks())

    @torch.jit.unused
    def _has_other_blocks(self) -> bool:
        return any(type(block) is not Conv1dBlock or is_changed(block) for block in self.blocks)

    @torch.jit.unused
    def _block_by_block(self, x: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
        """Call the blocks as the original calls them, for they may be the user's own."""
        out = _modulated(self.blocks[0](x), scale, shift)
        return self.blocks[1](out) + self.residual_conv(x)


# What a block's one op takes, where its layers need not be called.
BLOCK_LAYERS = PlainLayers(
    {"blocks": (nn.ModuleList,), "residual_conv": (Conv1d, nn.Identity)}
    | {f"blocks.{i}": (Conv1dBlock,) for i in (0, 1)}
    | sequential("blocks.0.block", *_BLOCK_KINDS)
    | sequential("blocks.1.block", *_BLOCK_KINDS),
    [f"blocks.{i}.block.{j}" for i in (0, 1) for j in (0, 1)],
    optional=["residual_conv"],
)


class _Resample1d(nn.Module):
    def __init__(self, conv: nn.Module):
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, dim, T) to (B, dim, T')."""
        return self.conv(x)


class Downsample1d(_Resample1d):
    """Halves the length: a convolution of three taps and stride 2."""

    def __init__(self, dim: int):
        super().__init__(Conv1d(dim, dim, 3, stride=2, padding=1))


class Upsample1d(_Resample1d):
    """Doubles the length: a transposed convolution of four taps and stride 2."""

    def __init__(self, dim: int):
        super().__init__(ConvTranspose1d(dim, dim, 4, stride=2, padding=1))


class InputsAsWeights(TorchFunctionMode):
    """Where it is entered, linear layers take their inputs in the dtype of their weights."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function of PyTorch."""
        if func is F.linear and len(args) > 1:
            args = (args[0].to(args[1].dtype), *args[1:])
        return func(*args, **(kwargs or {}))


class SinusoidalPosEmb(nn.Module):
    """Sines and cosines of the timestep at ``dim / 2`` frequencies from 1 down to 1e-4.

    The angles reach 1000 radians, which 16-bit types cannot resolve: this part is float32 always.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.dim = dim

    def forward(self, timestep: Tensor) -> Tensor:
        """Map (B,) to (B, dim)."""
        half = self.dim // 2
        position = torch.arange(half, dtype=torch.float32, device=timestep.device)
        frequencies = torch.exp(position * (-math.log(10000.0) / (half - 1)))
        angles = timestep.to(torch.float32)[:, None] * frequencies[None, :]
        return torch.cat([angles.sin(), angles.cos()], dim=-1)
