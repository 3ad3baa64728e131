"""The steps of a sampling process: as a table, as a multistep table, or as a live scheduler."""

from __future__ import annotations

import copy
import inspect
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from dpa.library.checks import require
from dpa.schedulers.probes import refusing_foreign_errors

Advance = Callable[[int, Tensor, Tensor, "Tensor | None"], Tensor]
Generators = torch.Generator | Sequence[torch.Generator] | None


@dataclass(frozen=True, eq=False)
class StepTable:
    """The steps of one sampling process, in the order in which they run.

    Attributes:
        timesteps: (S,) the timestep that conditions the network in each step.
        coefficients: (S, 6) floating, the columns r0..r5 of :func:`dpa.ops.scheduler_step`.
        clip: bound of the predicted x0; infinity where clipping is off.
        draws_noise: whether each step takes noise from the random stream. A step may weight its
            noise by zero; it still advances the stream.
        levels: (S, 2), floating: the sample that a step takes is ``levels[s, 0] * x0 +
            levels[s, 1] * noise``. None where nobody knows.
        x0: (S, 2), floating: a step's prediction of x0, before it is clipped, is ``x0[s, 0] *
            sample + x0[s, 1] * model_output``. None where nobody knows.
        scales: (S,), floating, where the network takes the scheduler's sample times these. A
            table's sample is what the network takes; the last step's result is not scaled.
        init_noise_sigma: what the noise to start from is multiplied by.
        transposed: whether each step's noise is made in the order (B, Da, T): that in which the
            sample lies in memory that a loop takes noise like. () is no step's.

    Raises:
        ValueError: where the shapes do not match.

    """

    timesteps: Tensor
    coefficients: Tensor
    clip: float = math.inf
    draws_noise: tuple[bool, ...] = field(default=())
    levels: Tensor | None = field(default=None, kw_only=True)
    x0: Tensor | None = field(default=None, kw_only=True)
    scales: Tensor | None = field(default=None, kw_only=True)
    init_noise_sigma: float = field(default=1.0, kw_only=True)
    transposed: tuple[bool, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        """Check that the shapes match."""
        rows, shape = self.coefficients, tuple(self.coefficients.shape)
        right, got = len(shape) == 2 and shape[1] == 6 and rows.is_floating_point(), rows.dtype
        require(right, "StepTable: coefficients", "be a floating (S, 6) tensor", f"{got} {shape}")
        count, got = shape[0], tuple(self.timesteps.shape)
        require(got == (count,), "StepTable: timesteps", f"be ({count},), a row each", got)
        require(self.clip >= 0, "StepTable: clip", "be at least 0", self.clip)
        if not self.draws_noise:
            object.__setattr__(self, "draws_noise", tuple((rows[:, 5] != 0).tolist()))
        got = len(self.draws_noise)
        require(got == count, "StepTable: draws_noise", f"have {count} entries", got)
        for name, width in (("levels", "2"), ("x0", "2"), ("scales", "")):
            if (rows := getattr(self, name)) is not None:
                shape = tuple(rows.shape)
                right = shape == (count, *map(int, width)) and rows.is_floating_point()
                rule = f"be a floating ({count}, {width}) tensor, a row each"
                require(right, f"StepTable: {name}", rule, f"{rows.dtype} {shape}")

    def __len__(self) -> int:
        """Return the number of steps."""
        return self.coefficients.shape[0]

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> StepTable:
        """Return the table on ``device``, its coefficients in ``dtype``."""
        rows = {
            name: value.to(device=device, dtype=dtype)
            for name in ("coefficients", "levels", "x0", "scales")
            if (value := getattr(self, name)) is not None
        }
        return replace(self, timesteps=self.timesteps.to(device=device), **rows)

    def after(self, first_step: int) -> StepTable:
        """Return the steps from ``first_step`` on, as a process of their own.

        Raises:
            ValueError: there is no such step, or it needs the x0 of steps before it.

        """
        rule = f"lie in 0..{len(self) - 1}"
        require(0 <= first_step < max(len(self), 1), "StepTable: first_step", rule, first_step)
        held = {one.name: getattr(self, one.name) for one in fields(self)}
        # Tensors and tuples have an entry for each step.
        of_steps = {n: v[first_step:] for n, v in held.items() if isinstance(v, Tensor | tuple)}
        return replace(self, **of_steps)

    def scaled(self, scales: Tensor, init_noise_sigma: float) -> StepTable:
        """Return the table of a network that takes the sample times ``scales``, (S,).

        Its sample is the scaled one: a step divides by its scale, and applies the next one's.
        ``init_noise_sigma`` is that of the sample as it was.
        """
        after = torch.cat([scales[1:], scales.new_ones(1)])
        rows, levels, x0 = self.coefficients.clone(), self.levels, self.x0
        rows[:, [0, 3]] /= scales[:, None]
        rows[:, 2:] *= after[:, None]
        return replace(
            self,
            coefficients=rows,
            levels=None if levels is None else levels * scales[:, None],
            x0=None if x0 is None else torch.stack([x0[:, 0] / scales, x0[:, 1]], 1),
            scales=scales,
            init_noise_sigma=init_noise_sigma * float(scales[0]),
        )

    def noised(self, chunk: Tensor, noise: Tensor) -> Tensor:
        """Return the sample that the first step takes of a chunk of actions."""
        known, rule = self.levels is not None, "be there to add noise to a chunk"
        require(known, "StepTable: levels", rule, None)
        levels = self.levels.to(chunk.dtype)
        return levels[0, 0] * chunk + levels[0, 1] * noise

    def begin(self, noise: Tensor, last_chunk: Tensor | None = None) -> Tensor:
        """Return the sample that the loop begins with: of noise, or of a chunk of actions too."""
        if last_chunk is not None:
            return self.noised(last_chunk, noise)
        return noise if self.init_noise_sigma == 1.0 else noise * self.init_noise_sigma

    def x0_coefficients(self) -> Tensor:
        """The coefficients of steps whose result is the predicted x0."""
        coefficients = self.coefficients.clone()
        # No copy from the host, for this may be captured.
        coefficients[:, 2], coefficients[:, 3:] = 1.0, 0.0
        return coefficients

    def to_x0_and_back(self) -> tuple[Tensor, Tensor]:
        """The coefficients of steps from a model output to the x0 that it predicts, and back."""
        of_sample, of_output = self.x0.unbind(1)
        none, one = torch.zeros_like(of_sample), torch.ones_like(of_sample)
        to_x0 = torch.stack([of_sample, of_output, one, none, none, none], 1)
        back = [-of_sample / of_output, 1 / of_output]
        return to_x0, torch.stack([none, none, none, *back, none], 1)

    def stepper(self, generator: Generators = None) -> Advance:
        """Return ``advance(step, model_output, sample, noise)``, to be called in the steps' order.

        ``noise`` is given where ``draws_noise`` is set for the step, else None; ``generator`` is
        for :class:`LiveSteps`, whose scheduler samples its noise itself.
        """
        index = torch.arange(len(self), device=self.coefficients.device)

        def advance(step: int, output: Tensor, sample: Tensor, noise: Tensor | None) -> Tensor:
            return torch.ops.dpa.scheduler_step(
                output, sample, self.coefficients, index[step], noise, self.clip
            )

        return advance


@dataclass(frozen=True, eq=False)
class MultistepTable(StepTable):
    """The steps of a multistep solver: a step also weighs the x0 of the steps before it.

    ``out = (the six columns' sum) + history[s][0] * x0[s - 1] + history[s][1] * x0[s - 2] + ...``,
    where ``x0 = clamp(r0 * sample + r1 * model_output, -clip, clip)`` of each step.

    On packed weights :class:`dpa.DiffusionSampler` runs the network of each step as one op, and on
    a GPU all steps in one CUDA graph.

    Attributes:
        history: for each step the weights of the earlier x0, the newest first.
        follows: whether a step finds an earlier sample from its own one (Heun, UniPC), so that its
            sample must be what the last step gave, but where that is overwritten in every step.

    """

    history: tuple[tuple[float, ...], ...] = ()
    follows: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        """Check that the shapes match."""
        super().__post_init__()
        lengths = list(map(len, self.history))
        right, rule = len(lengths) == len(self), f"have {len(self)} entries of one length"
        got = f"{len(lengths)} of lengths {lengths}"
        require(right and len(set(lengths)) <= 1, "MultistepTable: history", rule, got)

    def after(self, first_step: int) -> StepTable:
        """Return the steps from ``first_step`` on, as a process of their own."""
        table = super().after(first_step)
        needs = any(any(weights[step:]) for step, weights in enumerate(table.history))
        rule = "be one that needs no x0 of an earlier step"
        require(not needs, "MultistepTable: first_step", rule, first_step)
        return table

    def scaled(self, scales: Tensor, init_noise_sigma: float) -> StepTable:
        """Return the table of a network that takes the sample times ``scales``, (S,)."""
        pairs = zip(self.history, [*scales[1:].tolist(), 1.0], strict=True)
        history = tuple(tuple(w * scale for w in weights) for weights, scale in pairs)
        return replace(super().scaled(scales, init_noise_sigma), history=history)

    def stepper(self, generator: Generators = None) -> Advance:
        """Return ``advance``, which keeps the x0 of earlier steps."""
        # Which steps draw is given, not read off the coefficients: this may be captured.
        silent = (False,) * len(self)
        x0 = StepTable(self.timesteps, self.x0_coefficients(), self.clip, silent).stepper()
        plain = super().stepper(generator)
        kept: deque[Tensor | None] = deque(maxlen=max(map(len, self.history), default=0))

        def advance(step: int, output: Tensor, sample: Tensor, noise: Tensor | None) -> Tensor:
            out = plain(step, output, sample, noise)
            for weight, earlier in zip(self.history[step], kept, strict=False):
                if weight != 0:
                    out = out.add(earlier, alpha=weight)
            later = enumerate(self.history[step + 1 :][: kept.maxlen])
            used = any(weights[ago] != 0 for ago, weights in later)
            kept.appendleft(x0(step, output, sample, None) if used else None)
            return out

        return advance


def table_of(
    timesteps: Tensor | Sequence[int],
    coefficients: Tensor | Sequence[Sequence[float]],
    clip: float,
    draws_noise: Sequence[bool],
    history: Sequence[tuple[float, ...]] = (),
    follows: bool = False,
    **known: Any,
) -> StepTable:
    """Return a :class:`MultistepTable`, or a :class:`StepTable` where no step weighs earlier x0.

    Lists of numbers become tensors on the CPU, coefficients of float64.
    """
    if not isinstance(timesteps, Tensor):
        timesteps = torch.tensor(timesteps, dtype=torch.long, device="cpu")
    if not isinstance(coefficients, Tensor):
        coefficients = torch.tensor(coefficients, dtype=torch.float64, device="cpu")
    steps = timesteps, coefficients, clip, tuple(draws_noise)
    if not any(map(any, history)):
        return StepTable(*steps, **known)
    return MultistepTable(*steps, tuple(map(tuple, history)), follows=follows, **known)


def known_of(
    rows: Sequence[Sequence[float]], levels: Sequence[Sequence[float]]
) -> dict[str, Tensor]:
    """Return ``levels`` and ``x0`` of steps whose first two columns predict x0."""
    known = {"levels": levels, "x0": [row[:2] for row in rows]}
    return {n: torch.tensor(v, dtype=torch.float64, device="cpu") for n, v in known.items()}


class LiveSteps:
    """A diffusers scheduler's own ``step`` where a table cannot express it: nothing is fused.

    It stands where a :class:`StepTable` stands. Each loop steps a fresh copy of the scheduler.

    Args:
        scheduler: a live scheduler whose ``scale_model_input`` leaves the sample as it is.
        num_inference_steps: steps of the process; None takes the timesteps that the object holds.
        options: passed to ``step``, as far as it has such parameters.

    Raises:
        TypeError: the object has no ``step``, ``timesteps`` and ``set_timesteps``.
        ValueError: it wants its inputs scaled, which a policy's loop does not do.

    """

    clip = math.inf
    init_noise_sigma = 1.0
    transposed: tuple[bool, ...] = ()

    def __init__(self, scheduler: Any, num_inference_steps: int | None = None, **options: Any):
        for name in ("step", "timesteps", "set_timesteps"):
            has, got = hasattr(scheduler, name), type(scheduler).__name__
            require(has, "LiveSteps: scheduler", f"have {name}", got, TypeError)
        self._live = copy.deepcopy(scheduler)
        if num_inference_steps is not None:
            self._live.set_timesteps(num_inference_steps)
        self._options = self._accepted(options)
        self.timesteps: Tensor = self._live.timesteps.detach().clone()
        self.draws_noise = (False,) * len(self)
        self._check_unscaled(copy.deepcopy(self._live))

    def _check_unscaled(self, live: Any) -> None:
        probe = torch.ones(1)
        scale = getattr(live, "scale_model_input", None)
        with refusing_foreign_errors(f"LiveSteps: {type(live).__name__}.scale_model_input"):
            scaled = scale(probe, live.timesteps[0]) if scale is not None and len(self) else probe
        plain = float(getattr(live, "init_noise_sigma", 1.0)) == 1.0 and torch.equal(scaled, probe)
        rule = "take its noise and its model's inputs unscaled"
        require(plain, "LiveSteps: scheduler", rule, type(live).__name__)

    def _accepted(self, options: dict[str, Any]) -> dict[str, Any]:
        parameters = inspect.signature(self._live.step).parameters
        return {name: value for name, value in options.items() if name in parameters}

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self.timesteps)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> LiveSteps:
        """Return the steps on ``device``; the scheduler chooses the dtype of its arithmetic."""
        moved = copy.copy(self)
        moved.timesteps = self.timesteps.to(device)
        moved._live = copy.deepcopy(self._live)
        # As set_timesteps(device=...) leaves the object: its other tensors stay where they are.
        moved._live.timesteps = moved.timesteps
        return moved

    def stepper(self, generator: Generators = None) -> Advance:
        """Return ``advance``; the scheduler takes its noise from ``generator``."""
        live = copy.deepcopy(self._live)
        options = self._options | self._accepted({"generator": generator})

        def advance(step: int, output: Tensor, sample: Tensor, noise: Tensor | None) -> Tensor:
            out = live.step(output, self.timesteps[step], sample, **options)
            return out.prev_sample.to(sample.dtype)

        return advance


Steps = StepTable | LiveSteps
