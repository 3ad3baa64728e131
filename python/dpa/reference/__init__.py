"""The formulas of the ops in plain PyTorch: slow, obvious, and without the compiled library.

Tests measure the ops against these, the demo measures speed against :func:`plain`, and the
documentation quotes them. Everything is built of differentiable PyTorch operations, so gradients of
any order come from autograd. 16-bit inputs are computed in float32 and rounded once, at the end.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpa.nn import Conv1dBlock
from dpa.reference.loop import sample_chunk as sample_chunk
from dpa.reference.optimizer import adamw as adamw
from dpa.reference.optimizer import ema_decay as ema_decay


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that arithmetic on ``dtype`` runs in."""
    return torch.promote_types(dtype, torch.float32)


def _along(channels: Tensor, like: Tensor) -> Tensor:
    """View (B, C), or (B,), so that it broadcasts over the trailing dimensions of ``like``."""
    return channels.reshape(channels.shape + (1,) * (like.dim() - channels.dim()))


def elementwise_mult(a: Tensor, b: Tensor) -> Tensor:
    """Multiply: ``a * b``."""
    return a * b


def fused_relu_add(x: Tensor, y: Tensor, bias: float = 0.0) -> Tensor:
    """Compute ``relu(x) + y + bias``."""
    wide = _wide(x.dtype)
    return (torch.relu(x.to(wide)) + y.to(wide) + bias).to(x.dtype)


def sinusoidal_embedding(timesteps: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Compute sines, then cosines, of the timesteps times frequencies from 1 down to 1e-4."""
    wide = _wide(timesteps.dtype) if timesteps.is_floating_point() else torch.float32
    place = torch.arange(dim // 2, dtype=wide, device=timesteps.device)
    angles = timesteps.to(wide)[..., None] * torch.exp(place * -(math.log(1e4) / (dim // 2 - 1)))
    own = timesteps.dtype if timesteps.is_floating_point() else wide
    return torch.cat([angles.sin(), angles.cos()], -1).to(dtype or own)


def lltm(
    input: Tensor, weights: Tensor, bias: Tensor, old_h: Tensor, old_cell: Tensor
) -> tuple[Tensor, Tensor]:
    """Run one LLTM cell: an LSTM without a forget gate and with an ELU candidate."""
    wide = _wide(input.dtype)
    joined = torch.cat([old_h, input], dim=1).to(wide)
    gates = joined @ weights.to(wide).t() + bias.to(wide).reshape(1, -1)
    input_gate, output_gate, candidate = gates.chunk(3, dim=1)
    new_cell = old_cell.to(wide) + F.elu(candidate) * torch.sigmoid(input_gate)
    new_h = torch.tanh(new_cell) * torch.sigmoid(output_gate)
    return new_h.to(input.dtype), new_cell.to(input.dtype)


def _rows(table: Tensor, index: Tensor, sample: Tensor) -> list[Tensor]:
    """Return the columns of the rows that ``index`` names, each broadcastable over ``sample``.

    An index outside the table raises on the CPU. On a GPU, where raising would need a
    synchronisation, its row is NaN.
    """
    steps = table.shape[0]
    valid = (index >= 0) & (index < steps)
    if index.device.type == "cpu" and not bool(valid.all()):
        raise IndexError(f"index must be in 0..{steps - 1}, got {index.tolist()}")
    index, valid = index.reshape(-1), valid.reshape(-1)
    rows = table.to(_wide(sample.dtype))[index.clamp(0, steps - 1).long()]
    rows = torch.where(valid[:, None], rows, math.nan)
    if index.numel() == 1:
        return list(rows[0].unbind())
    return [_along(column, sample) for column in rows.unbind(1)]


def denoise(
    model_output: Tensor,
    sample: Tensor,
    diffusion_constants: Tensor,
    timestep: Tensor,
    diffusion_noise: Tensor,
) -> Tensor:
    """Take one DDPM step from a prediction of the noise, x0 clamped to [-1, 1].

    Source: Ho et al., Denoising Diffusion Probabilistic Models (2020), equations 7 and 11.
    """
    wide = _wide(sample.dtype)
    c0, c1, c2, c3, c4 = _rows(diffusion_constants.reshape(-1, 5), timestep, sample)
    x, model_output, noise = sample.to(wide), model_output.to(wide), diffusion_noise.to(wide)
    x0 = ((x - c0 * model_output) / c1).clamp(-1, 1)
    first = timestep.reshape(-1) == 0
    first = first[0] if first.numel() == 1 else _along(first, sample)
    out = c3 * x0 + c2 * x + torch.where(first, 0.0, c4 * noise)
    return out.to(sample.dtype)


def scheduler_step(
    model_output: Tensor,
    sample: Tensor,
    table: Tensor,
    index: Tensor,
    noise: Tensor | None = None,
    clip: float = math.inf,
) -> Tensor:
    """Take one step of the linear form that covers DDPM and DDIM."""
    wide = _wide(sample.dtype)
    r0, r1, r2, r3, r4, r5 = _rows(table, index, sample)
    x, model_output = sample.to(wide), model_output.to(wide)
    x0 = (r0 * x + r1 * model_output).clamp(-clip, clip)
    out = r2 * x0 + r3 * x + r4 * model_output
    if noise is not None:
        out = out + r5 * noise.to(wide)
    return out.to(sample.dtype)


def _normalised(x: Tensor, num_groups: int, eps: float) -> Tensor:
    """Normalise (B, C, ...) by groups: each has mean 0 and the biased variance 1."""
    group = x.shape[1] // num_groups * math.prod(x.shape[2:])
    grouped = x.reshape(x.shape[0], num_groups, group)
    centred = grouped - grouped.mean(dim=2, keepdim=True)
    variance = centred.square().mean(dim=2, keepdim=True)
    return (centred * torch.rsqrt(variance + eps)).reshape(x.shape)


def _affine(x: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
    """Scale and shift (B, C, ...) by channels, (B, C) or (C,); None is 1 or 0."""
    for values, join in ((scale, torch.mul), (shift, torch.add)):
        if values is not None:
            wide = values.to(x.dtype)
            x = join(x, _along(wide if wide.dim() > 1 else wide[None], x))
    return x


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
    """Compute ``mish(group_norm(input)) * scale + shift + residual`` on (B, C, ...).

    Sources: Wu and He, Group Normalization (2018); Misra, Mish (2019); Perez et al., FiLM (2018).
    """
    x = _affine(_normalised(input.to(_wide(input.dtype)), num_groups, eps), weight, bias)
    x = _affine(x * torch.tanh(F.softplus(x)), scale, shift)
    if residual is not None:
        x = x + residual.to(x.dtype)
    return x.to(input.dtype)


def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int = 1,
    padding: int = 0,
    transposed: bool = False,
) -> Tensor:
    """Convolve along time with zeros beyond both ends, or take the transposed convolution."""
    wide = _wide(input.dtype)
    convolve = F.conv_transpose1d if transposed else F.conv1d
    bias = None if bias is None else bias.to(wide)
    out = convolve(input.to(wide), weight.to(wide), bias, stride=stride, padding=padding)
    return out.to(input.dtype)


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
    """Compute ``group_norm_mish(conv1d(input, conv_weight, conv_bias, padding=k // 2), ...)``."""
    wide = input.to(_wide(input.dtype))
    x = conv1d(wide, conv_weight, conv_bias, padding=conv_weight.shape[2] // 2)
    x = group_norm_mish(x, num_groups, gn_weight, gn_bias, eps, scale, shift, residual)
    return x.to(input.dtype)


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
    """Compute two of :func:`conv1d_gnm`, FiLM after the first, plus the residual branch.

    The channels of ``skip`` follow the input's. Intermediate results are rounded to the input's
    dtype.
    """
    first = (conv1_weight, conv1_bias, gn1_weight, gn1_bias)
    second = (conv2_weight, conv2_bias, gn2_weight, gn2_bias)
    input = input if skip is None else torch.cat([input, skip], 1)
    x = conv1d_gnm(input, *first, num_groups, eps, scale, shift)
    residual = input if residual_weight is None else conv1d(input, residual_weight, residual_bias)
    return conv1d_gnm(x, *second, num_groups, eps, residual=residual)


def conv2d_norm_act(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    residual: Tensor | None = None,
    num_groups: int = 0,
    eps: float = 1e-5,
    stride: int = 1,
    padding: int = 0,
    relu: bool = True,
) -> Tensor:
    """Compute ``relu(norm(conv2d(input)) * scale + shift + residual)``, GroupNorm or none."""
    wide = _wide(input.dtype)
    given = (None if t is None else t.to(wide) for t in (input, weight, bias))
    y = F.conv2d(*given, stride=stride, padding=padding)
    y = _affine(_normalised(y, num_groups, eps) if num_groups > 0 else y, scale, shift)
    if residual is not None:
        y = y + residual.to(wide)
    return (y.relu() if relu else y).to(input.dtype)


def group_norm_act(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    relu: bool = True,
) -> Tensor:
    """Compute ``relu(group_norm(input) * weight + bias + residual)`` on (B, C, ...)."""
    x = _affine(_normalised(input.to(_wide(input.dtype)), num_groups, eps), weight, bias)
    if residual is not None:
        x = x + residual.to(x.dtype)
    return (x.relu() if relu else x).to(input.dtype)


def batch_norm_act(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    relu: bool = True,
) -> Tensor:
    """Compute ``relu(batch_norm(input) * weight + bias + residual)`` on (B, C, ...)."""
    channels = input.to(_wide(input.dtype)).transpose(0, 1)
    x = _affine(_normalised(channels, 1, eps).transpose(0, 1), weight, bias)
    if residual is not None:
        x = x + residual.to(x.dtype)
    return (x.relu() if relu else x).to(input.dtype)


def conv2d(input: Tensor, weight: Tensor, stride: int = 1, padding: int = 0) -> Tensor:
    """Convolve (B, C_in, H, W) with (C_out, C_in, kh, kw)."""
    wide = _wide(input.dtype)
    y = F.conv2d(input.to(wide), weight.to(wide), stride=stride, padding=padding)
    return y.to(input.dtype)


def max_pool2d(input: Tensor, kernel_size: int, stride: int, padding: int = 0) -> Tensor:
    """Compute the maximum over windows of (B, C, H, W), the first of equal ones."""
    x = F.pad(input, [padding] * 4, value=-math.inf)
    x = x.unfold(2, kernel_size, stride).unfold(3, kernel_size, stride).flatten(4)
    return x.gather(4, x.argmax(4, keepdim=True)).squeeze(4)


def spatial_softmax(input: Tensor, temperature: Tensor | None = None) -> Tensor:
    """Return the mean (x, y) of each feature map's softmax, from -1 to 1 each way."""
    logits = input.to(_wide(input.dtype))
    if temperature is not None:
        logits = logits / temperature.reshape(()).to(logits.dtype)
    weights = logits.flatten(2).softmax(-1)
    height, width = input.shape[2:]
    y, x = torch.meshgrid(
        *(torch.linspace(-1, 1, n, dtype=logits.dtype) for n in (height, width)), indexing="ij"
    )
    grid = torch.stack([x.flatten(), y.flatten()], -1).to(logits.device)
    return (weights @ grid).to(input.dtype)


def resize_crop_normalize(
    image: Tensor,
    size: Sequence[int] | None = None,
    crop: Sequence[int] | None = None,
    mean: Tensor | None = None,
    std: Tensor | None = None,
    antialias: bool = True,
    hwc: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Resize as torchvision does, crop, and compute ``(image - mean) / std``."""
    bytes_ = image.dtype == torch.uint8
    out = dtype or (torch.float32 if bytes_ else image.dtype)
    x = image.permute(0, 3, 1, 2) if hwc else image
    x = x.to(torch.float64 if torch.float64 in (out, image.dtype) else torch.float32)
    x = x / 255 if bytes_ else x
    if size is not None and x.numel() == 0:  # which a GPU does not resize
        x = x.sum((2, 3), keepdim=True).expand(-1, -1, *size)
    elif size is not None and size[1] == 1:  # whose first row PyTorch repeats, if it antialiases
        x = F.interpolate(x.mT, (1, size[0]), mode="bilinear", antialias=antialias).mT
    elif size is not None:
        x = F.interpolate(x, tuple(size), mode="bilinear", antialias=antialias)
    if crop is not None:
        top, left, height, width = crop
        x = x[:, :, top : top + height, left : left + width]
    for values, join in ((mean, torch.sub), (std, torch.div)):
        x = x if values is None else join(x, values.to(x.dtype)[:, None, None])
    return x.to(out)


def joint_linear(
    input: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    rest: Tensor | None = None,
    mish: bool = False,
) -> Tensor:
    """Compute ``input @ w.T + b`` of every layer, side by side: (B, C_in) to (B, sum of C_i).

    The columns of ``rest`` follow the input's. With ``mish`` it is their Mish.
    """
    wide = _wide(input.dtype)
    if rest is not None:
        input = torch.cat([input, rest], dim=1)
    if mish:
        input = F.mish(input.to(wide)).to(input.dtype)
    layers = zip(weights, biases, strict=True)
    outs = [F.linear(input.to(wide), weight.to(wide), bias.to(wide)) for weight, bias in layers]
    return torch.cat(outs, dim=1).to(input.dtype)


class _PlainConv1dBlock(Conv1dBlock):
    """A Conv1dBlock that runs its Sequential: convolution, GroupNorm, Mish, each on its own."""

    forward = Conv1dBlock.layer_by_layer


_PLAIN = {
    Conv1dBlock: _PlainConv1dBlock,
    nn.Conv1d: nn.Conv1d,
    nn.ConvTranspose1d: nn.ConvTranspose1d,
}


def plain(unet: nn.Module) -> nn.Module:
    """Copy a dpa module so that it runs without dpa's ops, on equal weights and state-dict keys.

    Every :class:`dpa.nn.Conv1dBlock` in the copy runs its PyTorch Sequential, and every other
    convolution is PyTorch's. The copy shares no storage with ``unet``, which is left as it is.
    """
    clone = copy.deepcopy(unet)
    for module in clone.modules():
        for kind, plain_kind in _PLAIN.items():
            if isinstance(module, kind):
                module.__class__ = plain_kind
    return clone
