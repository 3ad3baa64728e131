"""The denoising loop of separate ops: the network, then the scheduler's step, in every step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .schedulers import LiveSteps, StepTable
from .step_table import Generators


def predict_window(
    unet: Callable[..., Tensor],
    dtype: torch.dtype,
    inputs: dict[str, Tensor],
    sample: Tensor,
    timestep: Tensor,
) -> Tensor:
    """Call the network on a window of states; the conditions serve every one of its timesteps."""
    repeats = sample.shape[0] // inputs["sample"].shape[0]
    given: dict[str, Tensor | None] = {"global_cond": None}
    for name in ("global_cond", "local_cond"):
        if name in inputs:
            value = inputs[name].to(dtype)
            given[name] = value.repeat(repeats, *[1] * (value.dim() - 1))
    return unet(sample.to(dtype), timestep, **given).to(sample.dtype)


def loop(
    sample: Tensor,
    table: StepTable | LiveSteps,
    predict: Callable[[Tensor, Tensor], Tensor],
    draw: Callable[[], Tensor],
    impose: Callable[[Tensor], Tensor],
    generator: Generators,
) -> Tensor:
    """Run the steps of ``table`` on ``sample``, (B, T, Da)."""
    timesteps = table.timesteps[:, None].expand(-1, sample.shape[0])
    advance = table.stepper(generator)
    for step in range(len(table)):
        sample = impose(sample)
        output = predict(sample, timesteps[step])
        noise = draw() if table.draws_noise[step] else None
        sample = advance(step, output, sample, noise)
    return impose(sample)
