"""Steps and loops of a diffusion scheduler, and the whole U-Net on packed weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = [
    "denoise",
    "diffusion_sample",
    "scheduler_step",
    "unet1d",
]


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
        The sample one timestep earlier, in the shape and dtype of ``sample``, float32 under
        autocast. Differentiable in every floating argument; the gradient through x0 is zero where
        the clamp is active.

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
        The sample after the step, in the shape and dtype of ``sample``, float32 under autocast.
        Differentiable in every floating tensor; the gradient through x0 is zero where the clamp is
        active.

    Sources: Ho et al., Denoising Diffusion Probabilistic Models (2020); Song et al., Denoising
    Diffusion Implicit Models (2020), equation 12.

    """
    return torch.ops.dpa.scheduler_step(model_output, sample, table, index, noise, clip)


def unet1d(
    sample: Tensor,
    timesteps: Tensor,
    global_cond: Tensor | None,
    packed: Tensor,
    config: list[int],
    dtype: torch.dtype,
    local: Tensor | None = None,
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
        local: (B, T, down_dims[0]), float32: what the first block of ``local_cond_encoder`` makes
            of local conditions, added to the first block's output; or None.

    Returns:
        (B, T, Da), float32. With 16-bit weights the activations between layers are rounded to their
        type, and on a GPU partial sums too; else sums are float32. Not differentiable: the backward
        raises.

    Source: Chi et al., Diffusion Policy: Visuomotor Policy Learning via Action Diffusion (2023).

    """
    return torch.ops.dpa.unet1d(sample, timesteps, global_cond, packed, config, dtype, local)


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
    local: Tensor | None = None,
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
        global_cond, packed, config, dtype: as in :func:`unet1d`.
        table: (S, 6), float32, a row a step, as in :func:`scheduler_step`.
        clip: bound of the predicted x0; infinity turns clipping off.
        noise: (S, B, T, Da), float32, standard normal, or None for a loop without noise.
        known: (B, T, Da), float32: ``condition_data`` of inpainting, or None.
        known_mask: (B, T, Da), bool: ``condition_mask``, given with ``known``.
        local: (S, B, T, down_dims[0]), float32: :func:`unet1d`'s of each step, or None.

    Returns:
        (B, T, Da), float32. Not differentiable; the backward raises.

    Sources: Ho et al., Denoising Diffusion Probabilistic Models (2020); Song et al., Denoising
    Diffusion Implicit Models (2020); Chi et al., Diffusion Policy (2023).

    """
    network, held = (packed, config, dtype), (noise, known, known_mask, local)
    return torch.ops.dpa.diffusion_sample(
        sample, timesteps, global_cond, *network, table, clip, *held
    )
