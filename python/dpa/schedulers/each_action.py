"""The steps of a process in which every action has a timestep of its own.

Source: Zhang et al., TEDi (2023), whose schedulers Streaming Diffusion Policy has.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dpa.schedulers.probes import StepProbe, cpu_copy, measuring
from dpa.schedulers.tables import StepTable


@dataclass(frozen=True, eq=False)
class EachActionTable:
    """What a step does to an action, by the action's timestep; each step counts it down to -1.

    Attributes:
        rows: a row for each timestep, that of -1 first.
        count: steps of the process.

    """

    rows: StepTable
    count: int

    @property
    def draws_noise(self) -> tuple[bool, ...]:
        """Whether each step takes noise from the random stream."""
        return (any(self.rows.draws_noise),) * self.count


class _OneTimestep:
    """A scheduler whose ``step`` takes a timestep for each action, called with one for all."""

    def __init__(self, live: Any):
        self._live, self.config = live, live.config

    def step(self, output: Tensor, timestep: int, sample: Tensor, **options: Any) -> Any:
        """Step (1, T) of one action dimension."""
        timesteps = torch.full(sample.shape, timestep)
        result = self._live.step(output[..., None], timesteps, sample[..., None], **options)
        x0, out = result.pred_original_sample, result.prev_sample
        return SimpleNamespace(prev_sample=out[..., 0], pred_original_sample=x0[..., 0])


def from_each_action(
    scheduler: Any, num_inference_steps: int, count: int, **options: Any
) -> EachActionTable:
    """Measure the steps of a live scheduler that takes (B, T) timesteps; leave it as it is.

    Args:
        scheduler: a ``DDPMTEDiScheduler`` or ``DDIMTEDiScheduler``, or one like them; ValueError
            refuses others.
        num_inference_steps: what its ``set_timesteps`` is called with.
        count: steps of the process.
        options: of its ``step``.

    """
    with measuring(f"from_each_action: {type(scheduler).__name__}"):
        live = cpu_copy(scheduler)
        live.set_timesteps(num_inference_steps)
        timesteps = torch.arange(-1, live.config.num_train_timesteps)
        one = _OneTimestep(live)
        probes = [StepProbe(one, timestep, options) for timestep in timesteps.tolist()]
        noisy = {probe.draws_noise for probe in probes}
        if len(noisy) > 1:
            raise ValueError("from_each_action: a step must take noise always or never")
        clip = probes[-1].clip()
        rows = torch.tensor([probe.row(clip) for probe in probes], dtype=torch.float64)
        table = StepTable(timesteps, rows, clip, (noisy.pop(),) * len(rows))
    return EachActionTable(table, count)
