"""The denoising loop of separate ops: the network, then the scheduler's step, in every step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .schedulers import LiveSteps, StepTable
from .step_table import Generators


class Prediction:
    """A network of a loop of steps: it is called in ``dtype``, on conditions of that dtype."""

    def __init__(
        self, unet: Callable[..., Tensor], dtype: torch.dtype, conditions: dict[str, Tensor]
    ):
        self._unet, self._dtype = unet, dtype
        given = {name: value.to(dtype) for name, value in conditions.items()}
        self._given = {"global_cond": None} | given

    def __call__(self, sample: Tensor, timestep: Tensor) -> Tensor:
        """Predict for samples (B, T, Da) at timesteps (B,), in the sample's dtype."""
        return self._unet(sample.to(self._dtype), timestep, **self._given).to(sample.dtype)


class Window:
    """A network as :class:`dpa.parallel.Sweeps` calls it, for a window of states at once."""

    def __init__(self, unet: Callable[..., Tensor], dtype: torch.dtype):
        self._unet, self._dtype = unet, dtype

    def begin(self, inputs: dict[str, Tensor], timesteps: Tensor) -> Tensor:
        """Return the timesteps, a row each, (N, 1)."""
        return timesteps[:, None]

    def __call__(self, inputs: dict[str, Tensor], sample: Tensor, told: Tensor) -> Tensor:
        """Predict for samples (N * B, T, Da) at timesteps (N, 1)."""
        timesteps = told.expand(-1, len(sample) // len(told)).flatten()
        given: dict[str, Tensor | None] = {"global_cond": None}
        for name in ("global_cond", "local_cond"):
            if name in inputs:  # it serves every timestep
                value = inputs[name].to(self._dtype)
                given[name] = value.repeat(len(told), *[1] * (value.dim() - 1))
        return self._unet(sample.to(self._dtype), timesteps, **given).to(sample.dtype)


def loop(
    sample: Tensor,
    table: StepTable | LiveSteps,
    predict: Callable[[Tensor, Tensor], Tensor],
    draw: Callable[[], Tensor],
    imposed: dict[str, Tensor],
    generator: Generators,
) -> Tensor:
    """Run the steps of ``table`` on ``sample``, (B, T, Da).

    ``imposed``: the ``condition_data`` that hold where ``condition_mask`` does, or nothing.
    """

    def impose(sample: Tensor) -> Tensor:
        if not imposed:
            return sample
        return torch.where(imposed["condition_mask"], imposed["condition_data"], sample)

    timesteps = table.timesteps[:, None].expand(-1, sample.shape[0])
    advance = table.stepper(generator)
    for step in range(len(table)):
        sample = impose(sample)
        output = predict(sample, timesteps[step])
        noise = draw() if table.draws_noise[step] else None
        sample = advance(step, output, sample, noise)
    return impose(sample)
