"""Parallel sampling: many timesteps of the denoising loop in one batch, by Picard iteration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .schedulers import StepTable

Inputs = dict[str, Tensor]
# The network, of the inputs, samples (N * B, T, Da) and timesteps (N * B,).
Predict = Callable[[Inputs, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Parallel:
    """How a :class:`dpa.DiffusionSampler` samples in parallel.

    Attributes:
        window: timesteps that a sweep evaluates at once, in one batch of ``window * B``.
        tolerance: a state counts as found when a sweep moves it by at most this much, the root mean
            square over (T, Da) of the sample that moves most, in the units of the sample. 0 sweeps
            on until a state repeats exactly, or all before it are exact.

    Raises:
        ValueError: a window below 1, or a negative tolerance.

    """

    window: int = 16
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        """Check the values."""
        if self.window < 1:
            raise ValueError(f"Parallel: window must be at least 1, got {self.window}")
        if not self.tolerance >= 0:
            raise ValueError(f"Parallel: tolerance must be at least 0, got {self.tolerance}")


@dataclass(frozen=True)
class ParallelReport:
    """What a parallel call did.

    Attributes:
        steps: of the loop, the sequential sampler's evaluations one after the other.
        sweeps: batches evaluated one after the other.
        evaluations: timesteps evaluated in all.
        residual: the largest move of a state in the sweep that accepted it (see ``tolerance``).

    """

    steps: int
    sweeps: int
    evaluations: int
    residual: float


class Sweeps:
    r"""All states of the loop ``x[i + 1] = f_i(x[i])``, and sweeps over a window of them.

    A sweep evaluates every ``f_i`` of the window at the states known so far and sums what they do::

        x[j + 1] <- x[w] + sum over i = w..j of (f_i(x[i]) - x[i])

    The first state of a window is exact after one sweep, so each sweep advances by one step or
    more, and takes as many steps as moved by no more than the tolerance. The states that the window
    grows by begin as copies of its last one. Where the window stands is a number on the device,
    which the host reads only when the loop may have ended.

    Args:
        inputs: ``sample`` (B, T, Da), the noise to begin with; ``step_noise`` (S, B, T, Da), what
            each step adds; ``condition_data`` and ``condition_mask`` (B, T, Da), inpainting; and
            what ``predict`` reads. All but the first may be missing.
        table: the steps.
        predict: the network.
        options: window and tolerance.

    Source: Shih et al., Parallel Sampling of Diffusion Models (arXiv 2305.16317).

    """

    def __init__(self, inputs: Inputs, table: StepTable, predict: Predict, options: Parallel):
        sample = inputs["sample"]
        self.inputs, self.table, self.predict = inputs, table, predict
        self.steps, self.batch = len(table), sample.shape[0]
        self.window, self.tolerance = min(options.window, self.steps), options.tolerance
        # A window that reaches past the end puts what it finds there into rows that no one reads.
        self._rows = torch.arange(self.steps + 1 + self.window, device=sample.device)
        self._states = sample.new_empty(len(self._rows), *sample.shape)
        self._position = torch.zeros((), dtype=torch.int64, device=sample.device)
        self._evaluations = torch.zeros_like(self._position)
        self._residual = sample.new_zeros(())

    def begin(self) -> None:
        """Go back to the noise."""
        self._states.copy_(self._impose(self.inputs["sample"]))
        for number in (self._position, self._evaluations, self._residual):
            number.zero_()

    def run(self) -> tuple[Tensor, ParallelReport]:
        """Sweep until all states are found; the result is the last of them, not a copy."""
        self.begin()
        position = sweeps = 0
        while position < self.steps:
            # No sweep takes more than a window of steps: so many are needed at the least.
            needed = -(-(self.steps - position) // self.window)
            for _ in range(needed):
                self.sweep()
            sweeps += needed
            position = int(self._position.item())
        report = ParallelReport(
            self.steps, sweeps, int(self._evaluations.item()), self._residual.item()
        )
        return self._states[self.steps], report

    def sweep(self) -> None:
        """Evaluate the window once, and move it on."""
        rows = self._position + self._rows[: self.window]
        inside = rows < self.steps
        step = rows.clamp(max=self.steps - 1)
        index = step.repeat_interleave(self.batch)
        before, noise = self._states[rows], self.inputs.get("step_noise")
        flat = before.flatten(0, 1)
        after = torch.ops.dpa.scheduler_step(
            self.predict(self.inputs, flat, self.table.timesteps[index]),
            flat,
            self.table.coefficients,
            index,
            None if noise is None else noise[step].flatten(0, 1),
            self.table.clip,
        )
        after = self._impose(after.view_as(before))
        found = before[0] + (after - before).cumsum(0)
        found[0] = after[0]  # free of the sum's rounding
        moved = (found - self._states[rows + 1]).square().mean((2, 3)).amax(1).sqrt()
        moved[0] = 0.0  # exact, however far it moved
        # The states before the first one that moved; a NaN always has.
        within = (moved <= self.tolerance).cumprod(0) * inside
        self._residual.copy_(torch.maximum(self._residual, (moved * within).nan_to_num().amax()))
        self._states.index_copy_(0, rows + 1, found)
        later = (self._rows > rows[-1] + 1).view(-1, 1, 1, 1)
        self._states.copy_(torch.where(later, found[-1], self._states))
        self._evaluations.add_(inside.sum())
        self._position.add_(within.sum())

    def _impose(self, states: Tensor) -> Tensor:
        mask = self.inputs.get("condition_mask")
        return states if mask is None else torch.where(mask, self.inputs["condition_data"], states)
