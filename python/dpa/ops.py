"""Typed wrappers of ``torch.ops.dpa.*``, with their formulas.

Each function calls the registered op of the same name and nothing else; :mod:`dpa.reference` has
the same formulas in plain PyTorch. Where an op does not say otherwise, tensors may have any strides
and any size, empty ones included, and floating tensors may be float64, float32, float16 or
bfloat16, on the CPU or a CUDA device. 16-bit types accumulate in float32. NaN and infinity go
through as they do in PyTorch. An invalid argument raises a ``RuntimeError`` that begins with
``dpa::<op>:`` and names the argument, the rule and the value received.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = [
    "conv1d",
    "conv1d_gnm",
    "denoise",
    "diffusion_sample",
    "elementwise_mult",
    "fused_relu_add",
    "group_norm_mish",
    "joint_linear",
    "lltm",
    "residual_block1d",
    "scheduler_step",
    "unet1d",
]


def elementwise_mult(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply two tensors: ``a * b``, element by element, without broadcasting.

    Args:
        a: any shape and strides.
        b: of the shape, dtype and device of ``a``.
        out: where the product goes, of the shape, dtype and device of ``a``. It may be ``a`` or
            ``b`` itself, and must not overlap them in part. No gradient may be asked for with it.

    Returns:
        The product, or ``out``. Differentiable to any order, forward and backward.

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


def denoise(
    model_output: Tensor,
    sample: Tensor,
    diffusion_constants: Tensor,
    timestep: Tensor,
    diffusion_noise: Tensor,
) -> Tensor:
    """Take one DDPM step from a prediction of the noise, x0 clamped to [-1, 1].

    With ``c = diffusion_constants[timestep]``::

        x0  = clamp((sample - c0 * model_output) / c1, -1, 1)
        out = c3 * x0 + c2 * sample + (c4 * diffusion_noise if timestep != 0 else 0)

    Args:
        model_output: (B, ...), the predicted noise.
        sample: shaped as ``model_output``, the noisy sample at ``timestep``.
        diffusion_constants: (N, 5) or flat (N * 5), a row a timestep: ``sqrt(1 - alpha_bar)``,
            ``sqrt(alpha_bar)``, the coefficient of the sample, the coefficient of x0, and
            ``sqrt(variance)``; in the sample's dtype, or float32 beside 16-bit samples.
        timestep: integers, one element or (B,), on the sample's device, read there: no
            synchronisation. A value outside 0..N-1 raises on the CPU, and gives NaN on a GPU.
        diffusion_noise: shaped as ``sample``, standard normal.

    Returns:
        The sample one timestep earlier, in the shape and dtype of ``sample``. Differentiable in
        every floating argument; the gradient through x0 is zero where the clamp is active.

    Source: Ho et al., Denoising Diffusion Probabilistic Models (2020), equations 7 and 11.

    """
    return torch.ops.dpa.denoise(
        model_output, sample, diffusion_constants, timestep, diffusion_noise
    )


def scheduler_step(
    model_output: Tensor,
    sample: Tensor,
    table: Tensor,
    index: Tensor,
    noise: Tensor | None = None,
    clip: float = math.inf,
) -> Tensor:
    """Take one step of the linear form that covers DDPM and DDIM with every prediction type.

    With ``r = table[index]``::

        x0  = clamp(r0 * sample + r1 * model_output, -clip, clip)
        out = r2 * x0 + r3 * sample + r4 * model_output + r5 * noise

    Args:
        model_output: (B, ...), what the network predicts: noise, sample or velocity.
        sample: shaped as ``model_output``, the noisy sample.
        table: (S, 6), a row a step; :func:`dpa.schedulers.from_diffusers` makes it. In the sample's
            dtype, or float32 beside 16-bit samples.
        index: integers, one element or (B,), the row of the step, on the sample's device, read
            there: no synchronisation. A value outside 0..S-1 raises on the CPU, and gives NaN on a
            GPU.
        noise: shaped as ``sample``, standard normal, or None for a step without noise.
        clip: bound of the predicted x0; infinity turns clipping off.

    Returns:
        The sample after the step, in the shape and dtype of ``sample``. Differentiable in every
        floating tensor; the gradient through x0 is zero where the clamp is active.

    Sources: Ho et al., Denoising Diffusion Probabilistic Models (2020); Song et al., Denoising
    Diffusion Implicit Models (2020), equation 12.

    """
    return torch.ops.dpa.scheduler_step(model_output, sample, table, index, noise, clip)


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
        8192 elements, in multiples of 8 channels, is read once and written once.
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
    channels-last input, (B, T, C) in memory, gives a channels-last output; 16-bit ones run on a
    Hopper GPU's tensor cores without a copy.

    Args:
        input: (B, C_in, T).
        weight: (C_out, C_in, k), or (C_in, C_out, k) where ``transposed``; in the input's dtype, or
            float32 beside a 16-bit input, whose dtype the products then run in.
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
) -> Tensor:
    """Run a residual block of Diffusion Policy's U-Net as one op, forward and backward.

    ``x = group_norm_mish(conv1d(input, conv1), gn1) * scale + shift`` and
    ``group_norm_mish(conv1d(x, conv2), gn2) + conv1d(input, residual)``, or ``+ input``. The
    convolutions have stride 1 and padding ``k // 2``. Called as one op it costs the host little,
    which is what limits a training step at these sizes.

    Args:
        input: (B, C_in, T).
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

    The parameters are in the input's dtype, or float32 beside a 16-bit input.

    Returns:
        (B, C_out, T), in the dtype and order of ``input``. Differentiable in every tensor, each
        gradient in its tensor's dtype. Under autocast the activations alone are cast. 16-bit
        channels-last inputs run on a Hopper GPU's tensor cores.

    Source: Chi et al., Diffusion Policy: Visuomotor Policy Learning via Action Diffusion (2023).

    """
    return torch.ops.dpa.residual_block1d(
        input,
        conv1_weight,
        conv1_bias,
        gn1_weight,
        gn1_bias,
        conv2_weight,
        conv2_bias,
        gn2_weight,
        gn2_bias,
        residual_weight,
        residual_bias,
        num_groups,
        eps,
        scale,
        shift,
    )


def joint_linear(input: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    """Run linear layers of one input as one product, their outputs side by side.

    ``cat([input @ w.T + b for w, b in zip(weights, biases)], dim=1)``: the FiLM of all blocks of a
    U-Net, say, without a copy of the weights in one piece. What is kept for the backward is, in 16
    bits on a Hopper GPU, the weights in that type alone; the weights' gradients are parts of one
    tensor.

    Args:
        input: (B, C_in).
        weights: at least one, each (C_i, C_in), all of one dtype.
        biases: as many, each (C_i,), in the weights' dtype.

    The parameters are in the input's dtype, or float32 beside a 16-bit input.

    Returns:
        (B, sum of C_i), in the dtype of ``input``. Differentiable in every tensor, each gradient in
        its tensor's dtype. Under autocast the input alone is cast.

    """
    return torch.ops.dpa.joint_linear(input, weights, biases)


def unet1d(
    sample: Tensor,
    timesteps: Tensor,
    global_cond: Tensor | None,
    packed: Tensor,
    config: list[int],
    dtype: torch.dtype,
) -> Tensor:
    """Predict the noise: one forward pass of the whole conditional U-Net, on packed weights.

    ``unet(sample, timesteps, global_cond=global_cond)`` of the network that was packed.
    :class:`dpa.PackedUnet` packs a module, follows its weights and calls this op.

    Args:
        sample: (B, T, Da), float32; T a positive multiple of ``2 ** (levels - 1)``.
        timesteps: (B,), float32.
        global_cond: (B, Dg), float32, or None for a network that has no such condition.
        packed: uint8, what ``torch.ops.dpa.unet1d_pack(weights, config, dtype)`` makes on the
            sample's device; its ``weights`` are in the order of
            ``torch.ops.dpa.unet1d_weight_names(config)``.
        config: ``[Da, kernel_size, n_groups, diffusion_step_embed_dim, Dg or 0, cond_predict_scale,
            *down_dims]``, with one to five down_dims.
        dtype: of the packed weights: float32, float16, bfloat16 or float8_e4m3fn (on a GPU).

    Returns:
        (B, T, Da), float32. With 16-bit weights the activations between layers are rounded to their
        type, and on a GPU partial sums too; else sums are float32. Not differentiable: the backward
        raises.

    Source: Chi et al., Diffusion Policy: Visuomotor Policy Learning via Action Diffusion (2023).

    """
    return torch.ops.dpa.unet1d(sample, timesteps, global_cond, packed, config, dtype)


def diffusion_sample(
    sample: Tensor,
    timesteps: Tensor,
    global_cond: Tensor | None,
    packed: Tensor,
    config: list[int],
    dtype: torch.dtype,
    table: Tensor,
    clip: float = math.inf,
    noise: Tensor | None = None,
    known: Tensor | None = None,
    known_mask: Tensor | None = None,
) -> Tensor:
    """Denoise a sample: the whole loop of a scheduler's steps over the U-Net, on packed weights.

    For each step ``s``::

        output = unet1d(sample, timesteps[s], global_cond, packed, config, dtype)
        sample = scheduler_step(output, sample, table, s, noise[s], clip)

    Where ``known`` is given, ``sample = where(known_mask, known, sample)`` comes before each step
    and after the last.

    :class:`dpa.DiffusionSampler` with ``fused=True`` makes the arguments and calls this op.

    Args:
        sample: (B, T, Da), float32, standard normal: what the loop starts from.
        timesteps: (S,), float32, one a step.
        global_cond: as in :func:`unet1d`.
        packed: as in :func:`unet1d`.
        config: as in :func:`unet1d`.
        dtype: as in :func:`unet1d`.
        table: (S, 6), float32, a row a step, as in :func:`scheduler_step`.
        clip: bound of the predicted x0; infinity turns clipping off.
        noise: (S, B, T, Da), float32, standard normal, or None for a loop without noise.
        known: (B, T, Da), float32: actions to inpaint, or None.
        known_mask: (B, T, Da), bool: where ``known`` holds; given with it.

    Returns:
        (B, T, Da), float32. Not differentiable: the backward raises.

    Sources: Ho et al., Denoising Diffusion Probabilistic Models (2020); Song et al., Denoising
    Diffusion Implicit Models (2020); Chi et al., Diffusion Policy (2023).

    """
    return torch.ops.dpa.diffusion_sample(
        sample,
        timesteps,
        global_cond,
        packed,
        config,
        dtype,
        table,
        clip,
        noise,
        known,
        known_mask,
    )
