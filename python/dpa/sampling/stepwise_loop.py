"""The denoising loop of separate ops: the network, then the scheduler's step, in every step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dpa.nn.family import run_network
from dpa.schedulers.tables import Generators, LiveSteps, StepTable
from dpa.tracking import Snapshot

CONDITIONS = ("global_cond", "local_cond")
_WEIGHTS = frozenset({"_parameters", "_buffers"})


class Copy:
    """A copy of a network in another dtype, brought up to date before every loop."""

    def __init__(self, unet: nn.Module):
        self.unet = unet
        self._copy: nn.Module | None = None
        self._seen: tuple[Snapshot, list[Any]] | None = None

    @torch.inference_mode(False)
    @torch.no_grad()
    def to(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """Return the copy: what the network's modules and weights are now, in that dtype."""
        shapes = [value.shape for value in _values(self.unet)]
        seen = self._seen
        if self._copy is None or seen is None or not seen[0].holds() or seen[1] != shapes:
            modules = Snapshot(*self.unet.modules(), but=_WEIGHTS)
            self._copy, self._seen = copy.deepcopy(self.unet), (modules, shapes)
        # Casting anew costs a fraction of one step, and a copy that lags behind training is a trap.
        copied = self._copy.to(device, dtype)
        for old, new in zip(_values(copied), _values(self.unet), strict=True):
            old.copy_(new)
        return copied


def _values(unet: nn.Module) -> list[Tensor]:
    """Return parameters and buffers, those that several modules hold as often."""
    named = (unet.named_parameters, unet.named_buffers)
    return [value for those in named for _, value in those(remove_duplicate=False)]


class Layers:
    """A network that is called in a dtype, for one state of a loop or for a window of them."""

    def __init__(self, unet: Callable[..., Tensor], dtype: torch.dtype):
        self._unet, self.dtype = unet, dtype

    def predict(
        self, sample: Tensor, timesteps: Tensor, conditions: dict[str, Tensor | None]
    ) -> Tensor:
        """Predict for samples (B, T, Da) at timesteps (B,), in the sample's dtype."""
        cast, given = sample.to(self.dtype), {"global_cond": None} | conditions
        return run_network(lambda: self._unet(cast, timesteps, **given), cast).to(sample.dtype)

    def begin(self, inputs: dict[str, Tensor], timesteps: Tensor) -> Tensor:
        """Return the timesteps, a row each, (N, 1)."""
        return timesteps[:, None]

    def __call__(self, inputs: dict[str, Tensor], sample: Tensor, steps: Tensor) -> Tensor:
        """Predict for samples (N * B, T, Da) at timesteps (N, 1)."""
        conditions = {
            name: value.repeat(len(steps), *[1] * (value.dim() - 1))  # it serves every timestep
            for name, value in inputs.items()
            if name in CONDITIONS
        }
        timesteps = steps.expand(-1, len(sample) // len(steps)).flatten()
        return self.predict(sample, timesteps, conditions)


def loop(
    sample: Tensor,
    table: StepTable | LiveSteps,
    predict: Callable[[Tensor, Tensor], Tensor],
    draw: Callable[[], Tensor],
    condition: dict[str, Tensor],
    generator: Generators,
) -> Tensor:
    """Run the steps of ``table`` on ``sample``, (B, T, Da).

    ``condition``: the ``condition_data`` that hold where ``condition_mask`` does, or nothing.
    """

    def apply_condition(sample: Tensor) -> Tensor:
        if not condition:
            return sample
        return torch.where(condition["condition_mask"], condition["condition_data"], sample)

    timesteps = table.timesteps[:, None].expand(-1, sample.shape[0])
    advance = table.stepper(generator)
    for step in range(len(table)):
        sample = apply_condition(sample)
        output = predict(sample, timesteps[step])
        noise = draw() if table.draws_noise[step] else None
        sample = advance(step, output, sample, noise)
    return apply_condition(sample)
