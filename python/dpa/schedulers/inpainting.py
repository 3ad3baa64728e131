"""What a loop is held to: given actions in the sample, or in what the network predicts of it.

With data y and weights w in [0, 1], a bool mask being 0 and 1:

* "sample": before every call of the network, and after the last step, ``x = x + w (y - x)``. It is
  the inpainting of policies that are trained with it.
* "x0": in every step the predicted x0, clipped as the scheduler clips it, becomes
  ``x0 + w (y - x0)`` where w is not 0, by the model output that predicts just this. After the last
  step x is y where w is 1. The sample keeps its noise level, so that it serves policies that were
  trained without inpainting; so real-time chunking continues the last chunk. It is that method's
  guidance with an identity in the place of the Jacobian of x0.

Source: Black et al., Real-Time Execution of Action Chunking Flow Policies (2025).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dpa.library.checks import require
from dpa.schedulers.tables import Steps

PLACES = ("sample", "x0")


class Inpainting:
    """Given actions, (B, T, Da), how much of each holds, and where: in "sample" or "x0"."""

    def __init__(self, data: Tensor, weights: Tensor, place: str, table: Steps) -> None:
        self.data, self.weights, self.place = data, weights, place
        self._scales = getattr(table, "scales", None)
        if place == "x0":
            # Where the output has no part in x0 there is nothing to correct.
            self._keeps = (weights == 0) | (table.x0[:, 1] == 0)[:, None, None, None]
            # Both ways between the output and x0 are a scheduler's step, one op.
            self._index = torch.arange(len(table), device=data.device)
            self._to_x0, self._to_output = table.to_x0_and_back()
            self._clip = table.clip

    @classmethod
    def of(cls, inputs: Mapping[str, Tensor], place: str, table: Steps) -> Inpainting | None:
        """Return what a loop's inputs say, or None."""
        if "condition_data" not in inputs:
            return None
        return cls(inputs["condition_data"], inputs["condition_mask"], place, table)

    def sample(self, step: int, sample: Tensor) -> Tensor:
        """Return the sample as the network is given it."""
        if self.place == "x0":
            return sample
        given = self.data if self._scales is None else self.data * self._scales[step]
        return self._blend(sample, given)

    def last(self, sample: Tensor) -> Tensor:
        """Return the sample as it is after the last step."""
        if self.place == "sample":
            return self._blend(sample, self.data)
        full = self.weights if self.weights.dtype == torch.bool else self.weights >= 1
        return torch.where(full, self.data, sample)

    def output(self, step: int, output: Tensor, sample: Tensor) -> Tensor:
        """Return the model output that predicts the blended x0."""
        if self.place == "sample":
            return output
        index, advance = self._index[step], torch.ops.dpa.scheduler_step
        # At high noise levels x0 is far outside the clip range, and would outweigh the data.
        x0 = advance(output, sample, self._to_x0, index, None, self._clip)
        wanted = self._blend(x0, self.data)
        held = advance(wanted, sample, self._to_output, index)
        return torch.where(self._keeps[step], output, held)

    def _blend(self, own: Tensor, given: Tensor) -> Tensor:
        if self.weights.dtype == torch.bool:
            return torch.where(self.weights, given, own)
        return torch.lerp(own, given, self.weights)


def prefix_weights(delay: int, horizon: int, length: int, schedule: str = "linear") -> Tensor:
    """Return how much of the last chunk holds at each of the next one's actions, (length,).

    1 before ``delay``: those actions are executed while the chunk is sampled. 0 from ``horizon``
    on. In between: "linear" ``c``, the equal steps from 1 to 0; "exp" ``c (e^c - 1) / (e - 1)``;
    "ones" 1; "zeros" 0, so that only the actions before ``delay`` hold.

    Args:
        delay: actions that are executed before the chunk is there, cut at ``horizon``.
        horizon: actions of the last chunk that have a say.
        length: of the chunk.
        schedule: of the weights in between.

    Raises:
        ValueError: an unknown schedule, or a negative number.

    """
    rule = f"be one of {', '.join(SCHEDULES)}"
    require(schedule in SCHEDULES, "prefix_weights: schedule", rule, repr(schedule))
    for name, value in (("delay", delay), ("horizon", horizon), ("length", length)):
        require(value >= 0, f"prefix_weights: {name}", "be at least 0", value)
    end = min(horizon, length)
    start = min(delay, end)
    between = torch.linspace(1, 0, end - start + 2)[1:-1]
    if schedule == "exp":
        between = between * torch.expm1(between) / torch.expm1(torch.ones(()))
    elif schedule != "linear":
        between = torch.full_like(between, float(schedule == "ones"))
    weights = torch.zeros(length)
    weights[:start], weights[start:end] = 1.0, between
    return weights


SCHEDULES = ("linear", "exp", "ones", "zeros")
