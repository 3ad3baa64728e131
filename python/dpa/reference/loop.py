"""The denoising loop on a scheduler's own steps, written out."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def sample_chunk(
    network: Callable[[Tensor, Tensor], Tensor],
    scheduler: Any,
    noise: Tensor,
    *,
    condition_data: Tensor | None = None,
    weights: Tensor | None = None,
    inpainting: str = "sample",
    last_chunk: Tensor | None = None,
    first_step: int = 0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Run the loop of :class:`dpa.DiffusionSampler` on the own step of a DDPM or DDIM scheduler.

    With ``a`` the timestep's ``alphas_cumprod``, a predicted noise ``e`` says
    ``x0 = (x - sqrt(1 - a) e) / sqrt(a)``, a predicted velocity ``v`` says
    ``x0 = sqrt(a) x - sqrt(1 - a) v``. Held in x0, the network's answer is replaced, where w is not
    0, by the one that says ``x0 + w (y - x0)`` with the scheduler's clipped x0. Source of real-time
    chunking: Black et al., Real-Time Execution of Action Chunking Flow Policies (2025), with an
    identity for the Jacobian of x0.
    """
    data, w = condition_data, 0 if weights is None else weights.to(noise.dtype)
    x, timesteps = noise, scheduler.timesteps[first_step:]
    if last_chunk is not None:
        # sqrt(a) y + sqrt(1 - a) noise; the copy, because an old version's add_noise changes it.
        x = copy.deepcopy(scheduler).add_noise(last_chunk, noise, timesteps[:1])
    for t in timesteps:
        if data is not None and inpainting == "sample":
            x = x + w * (data - x)
        output = network(x, t)
        if data is not None and inpainting == "x0":
            x0 = _x0_of(scheduler, output, t, x)
            held = _output_of(scheduler, x0 + w * (data - x0), t, x)
            output = torch.where(w == 0, output, held)
        x = scheduler.step(output, t, x, generator=generator).prev_sample
    if data is None:
        return x
    return x + w * (data - x) if inpainting == "sample" else torch.where(w >= 1, data, x)


def _x0_of(scheduler: Any, output: Tensor, t: Tensor, x: Tensor) -> Tensor:
    """Return the clipped x0 that a model output says."""
    a = scheduler.alphas_cumprod[t]  # which the scheduler's step rounds to float32
    x0 = {
        "epsilon": (x - (1 - a).sqrt() * output) / a.sqrt(),
        "v_prediction": a.sqrt() * x - (1 - a).sqrt() * output,
        "sample": output,
    }[scheduler.config.prediction_type]
    reach = scheduler.config.clip_sample_range if scheduler.config.clip_sample else math.inf
    return x0.clamp(-reach, reach)


def _output_of(scheduler: Any, x0: Tensor, t: Tensor, x: Tensor) -> Tensor:
    """Return the model output that says x0."""
    a = scheduler.alphas_cumprod[t]
    return {
        "epsilon": (x - a.sqrt() * x0) / (1 - a).sqrt(),
        "v_prediction": (a.sqrt() * x - x0) / (1 - a).sqrt(),
        "sample": x0,
    }[scheduler.config.prediction_type]
