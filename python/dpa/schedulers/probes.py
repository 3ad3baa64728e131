"""Measures the linear form of a live scheduler's steps, by calling them on chosen points.

A step is elementwise, so one call on a vector measures many points. The points are float64, so that
the scheduler's own arithmetic adds no rounding; scalars that it computes in float32 keep theirs.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# The largest relative error on points that were not fitted, in float64.
_LIMIT = 1e-9


@contextlib.contextmanager
def refusing_foreign_errors(begin: str) -> Iterator[None]:
    """Turn whatever the code of a scheduler raises when it is measured into a ValueError.

    A subclass, or a configuration of any values, may raise anything on points that no loop gives
    it. That refuses the table, no more.
    """
    try:
        yield
    except Exception as error:
        if str(error).startswith("from_diffusers: "):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{begin} cannot be measured, it raised {reason}") from error


# The options that messages show.
_SHOWN = re.compile(
    r"(variance|prediction|algorithm)_type|beta_schedule|rescale_betas_zero_snr|solver_order"
    r"|use_flow_sigmas"
)


class _Step:
    """A step of a live scheduler, for messages: it must be finite, and what the form says."""

    def __init__(self, live: Any, timestep: Any, options: dict[str, Any]):
        self.live, self.timestep, self.options = live, timestep, options

    def refuse(self, rule: str, got: str) -> None:
        config = dict(self.live.config)
        shown = {n: v for n, v in config.items() if _SHOWN.fullmatch(n)} | self.options
        described = ", ".join(f"{name}={value!r}" for name, value in shown.items())
        raise ValueError(
            f"from_diffusers: {type(self.live).__name__}.step must be {rule}, got {got} at "
            f"timestep {self.timestep} under {described}"
        )

    def check_finite(self, *values: Tensor) -> None:
        for value in values:
            if not bool(torch.isfinite(value).all()):
                self.refuse("finite", str(value[~torch.isfinite(value)][0].item()))

    def check_close(self, name: str, got: Tensor, want: Tensor) -> None:
        error = float((got - want).abs().max() / want.abs().max().clamp(min=1e-30))
        if not error < _LIMIT:
            self.refuse("linear with a clamped x0", f"a relative {name} error of {error:.1e}")


def _fit(columns: list[Tensor], target: Tensor) -> list[float]:
    """Solve for the weights of ``columns`` in ``target``; columns may differ much in size."""
    sizes = [float(column.abs().max().clamp(min=1e-300)) for column in columns]
    matrix = torch.stack([column / size for column, size in zip(columns, sizes, strict=True)], 1)
    solution = torch.linalg.lstsq(matrix, target).solution
    # The fit's rounding, where a weight is zero by construction.
    solution = torch.where(solution.abs() < 1e-12, 0.0, solution)
    return [float(weight) / size for weight, size in zip(solution, sizes, strict=True)]


class StepProbe(_Step):
    """One timestep of a scheduler with independent steps (DDPM, DDIM), measured."""

    # Far outside any clip range, and so small that no clip range is reached.
    _LARGE, _SMALL = 2.0**60, 2.0**-60

    def __init__(self, live: Any, timestep: int, options: dict[str, Any]):
        super().__init__(live, timestep, options)
        large, small = self._LARGE, self._SMALL
        sample = torch.tensor([0.0, small, 0.0, large, 0.0], dtype=torch.float64)
        output = torch.tensor([0.0, 0.0, small, 0.0, large], dtype=torch.float64)
        self.draws_noise = False
        x0, out, noise = self._step(sample, output)
        self.r0, self.r1 = float(x0[1]) / small, float(x0[2]) / small
        self.r5 = float(out[0] / noise[0])
        self._bound = max(abs(float(x0[3])), abs(float(x0[4])))

    def _step(self, sample: Tensor, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run the live step; return x0, the result, and the noise that it would sample."""
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn((1, sample.numel()), generator=generator, dtype=torch.float64)
        generator.manual_seed(0)
        before = generator.get_state()
        result = self.live.step(
            output[None], self.timestep, sample[None], generator=generator, **self.options
        )
        self.draws_noise = self.draws_noise or not torch.equal(before, generator.get_state())
        out, x0 = result.prev_sample, result.pred_original_sample
        self.check_finite(out, x0)
        return x0[0], out[0], noise[0]

    def clip(self) -> float:
        """Return the bound at which the predicted x0 is clipped, or infinity."""
        reach = self._LARGE * max(abs(self.r0), abs(self.r1))
        return math.inf if self._bound > 0.5 * reach else self._bound

    def row(self, clip: float) -> list[float]:
        """Fit the six coefficients, and compare with the step on held-out points."""
        generator = torch.Generator().manual_seed(1)
        # Both sides of the clip range, which the factor 1 / r0 brings the sample to.
        reach = 1.0 if math.isinf(clip) else clip
        spread = torch.tensor([0.1, 10.0], dtype=torch.float64).repeat(16) * reach
        sample = torch.randn(32, generator=generator, dtype=torch.float64) * spread
        output = torch.randn(32, generator=generator, dtype=torch.float64) * spread.roll(1)
        x0, out, noise = self._step(sample, output)
        linear = out - self.r5 * noise
        columns = [sample, output] if math.isinf(clip) else [x0, sample, output]
        fitted, held_out = slice(0, 16), slice(16, 32)
        solution = _fit([column[fitted] for column in columns], linear[fitted])
        r2, r3, r4 = solution if len(solution) == 3 else [0.0, *solution]

        expected_x0 = (self.r0 * sample + self.r1 * output).clamp(-clip, clip)
        expected = r2 * x0 + r3 * sample + r4 * output + self.r5 * noise
        for name, got, want in (("x0", expected_x0, x0), ("result", expected, out)):
            self.check_close(name, got[held_out], want[held_out])
        return [self.r0, self.r1, r2, r3, r4, self.r5]


def measure_levels(live: Any, timesteps: Tensor) -> Tensor | None:
    """Measure with what weights a scheduler mixes x0 and noise, (S, 2); None where it does not."""
    one, none = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)[:, None]
    try:
        if hasattr(live, "scale_noise"):
            return live.scale_noise(one.expand(len(timesteps), 2), timesteps, none)
        return live.add_noise(one.expand(len(timesteps), 2), none, timesteps)
    except Exception:  # of a subclass, which has another way or none
        return None


def measure_chain(live: Any, first_step: int = 0) -> tuple[list[list[float]], list[list[float]]]:
    """Measure a deterministic scheduler whose steps follow one another (a multistep solver, Euler).

    The process begins at ``first_step``, with nothing remembered.

    Each step may use what the steps before it remembered, ``m = r0 * sample + r1 * model_output``
    (``live.model_outputs``, the newest last).

    Returns:
        A row of six coefficients a step, the noise's being zero, and for each step the weights of
        the remembered values, the newest first.

    """
    _rewind(live)
    points, fitted, held_out = 48, slice(0, 24), slice(24, 48)
    generator = torch.Generator().manual_seed(1)
    orders = len(live.model_outputs) if hasattr(live, "model_outputs") else 1
    remembered: list[Tensor] = []
    rows, history = [], []
    for timestep in live.timesteps[first_step:]:
        # Powers of two, which a coefficient multiplies exactly: these schedulers round the
        # sample, and its multiples, to float32.
        exponent = torch.randint(-3, 4, (points,), generator=generator)
        sign = torch.randint(0, 2, (points,), generator=generator) * 2 - 1
        sample = sign * torch.pow(2.0, exponent.double())
        output = torch.randn(points, generator=generator, dtype=torch.float64)
        out = live.step(output[None], timestep, sample[None]).prev_sample[0]
        step = _Step(live, timestep.item(), {})
        step.check_finite(out)
        columns = [sample, output, *remembered]
        weights = _fit([column[fitted] for column in columns], out[fitted])
        expected = sum(w * column for w, column in zip(weights, columns, strict=True))
        step.check_close("result", expected[held_out], out[held_out])
        r0 = r1 = 0.0
        if orders > 1:
            kept = live.model_outputs[-1][0]
            r0, r1 = _fit([sample[fitted], output[fitted]], kept[fitted])
            step.check_close("x0", (r0 * sample + r1 * output)[held_out], kept[held_out])
            remembered = [kept, *remembered][: orders - 1]
        rows.append([r0, r1, 0.0, weights[0], weights[1], 0.0])
        history.append([*weights[2:], *[0.0] * (orders + 1 - len(weights))])
    return rows, history


def _rewind(live: Any) -> None:
    """Reset a used copy to its first step."""
    outputs = [None] * len(getattr(live, "model_outputs", ()))
    start = {"_step_index": None, "model_outputs": outputs, "lower_order_nums": 0}
    vars(live).update({name: value for name, value in start.items() if hasattr(live, name)})
