"""Parallel sampling: many timesteps of the denoising loop in one batch, by Picard iteration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .schedulers import StepTable


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


def picard(
    sample: Tensor,
    table: StepTable,
    noise: Tensor | None,
    predict: Callable[[Tensor, Tensor], Tensor],
    impose: Callable[[Tensor], Tensor],
    options: Parallel,
) -> tuple[Tensor, ParallelReport]:
    r"""Solve for all states of the loop ``x[i + 1] = f_i(x[i])`` by sweeps over a window of them.

    A sweep evaluates every ``f_i`` of the window at the states known so far and sums what they do::

        x[j + 1] <- x[w] + sum over i = w..j of (f_i(x[i]) - x[i])

    The first state of a window is exact after one sweep, so each sweep advances by one step or
    more, and takes as many steps as moved by no more than the tolerance. The states that the window
    grows by begin as copies of its last one. The host reads one pair of numbers a sweep.

    Args:
        sample: (B, T, Da), the noise to begin with.
        table: the steps.
        noise: (S, B, T, Da), what each step adds, or None.
        predict: the network, of samples (N * B, T, Da) and timesteps (N * B,).
        impose: inpainting, of samples (N, B, T, Da).
        options: window and tolerance.

    Returns:
        (B, T, Da), and the report.

    Source: Shih et al., Parallel Sampling of Diffusion Models (arXiv 2305.16317).

    """
    steps, batch, shape = len(table), sample.shape[0], sample.shape
    states = impose(sample).expand(steps + 1, *shape).clone()
    index = torch.arange(steps, device=sample.device).repeat_interleave(batch)
    timesteps = table.timesteps.repeat_interleave(batch)
    done = sweeps = evaluations = 0
    residual = 0.0
    while done < steps:
        end = min(done + options.window, steps)
        before = states[done:end]
        flat, rows = before.flatten(0, 1), slice(done * batch, end * batch)
        after = torch.ops.dpa.scheduler_step(
            predict(flat, timesteps[rows]),
            flat,
            table.coefficients,
            index[rows],
            None if noise is None else noise[done:end].flatten(0, 1),
            table.clip,
        )
        after = impose(after.view_as(before))
        found = states[done] + (after - before).cumsum(0)
        found[0] = after[0]  # free of the sum's rounding
        moved = (found - states[done + 1 : end + 1]).square().mean((2, 3)).amax(1).sqrt()
        moved[0] = 0.0  # exact, however far it moved
        # The states before the first one that moved; a NaN always has.
        within = (moved <= options.tolerance).cumprod(0)
        largest = (moved * within).nan_to_num().amax()
        advance, largest = torch.stack([within.sum(), largest]).tolist()
        states[done + 1 : end + 1] = found
        states[end + 1 :] = found[-1]
        sweeps, evaluations = sweeps + 1, evaluations + end - done
        done, residual = done + int(advance), max(residual, largest)
    return states[-1], ParallelReport(steps, sweeps, evaluations, residual)
