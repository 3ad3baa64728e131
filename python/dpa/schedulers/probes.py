"""Measures the linear form of a live scheduler's steps, by calling them on chosen points.

A step is elementwise, so one call on a vector measures many points. The points are float64, so that
the scheduler's own arithmetic adds no rounding; scalars that it computes in float32 keep theirs.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import re
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor

# The largest relative error on points that were not fitted, in float64.
_LIMIT = 1e-9
# What steps of diffusers' schedulers leave in the object for the steps after them.
OF_STEPS = ("_step_index", "model_outputs", "lower_order_nums", "timestep_list", "this_order")
OF_STEPS += ("last_sample", "prev_derivative", "dt", "sample", "is_scale_input_called")


class NotLinearError(ValueError):
    """A step is not the linear form that it was held against."""


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


@contextlib.contextmanager
def measuring(begin: str) -> Iterator[None]:
    """Measure a scheduler inside, on the CPU, as :func:`refusing_foreign_errors` says."""
    with (
        refusing_foreign_errors(begin),
        torch.device("cpu"),  # whatever torch.set_default_device says
        torch.inference_mode(False),  # a table outlives the call, and may be used with gradients
        torch.no_grad(),
    ):
        yield


def cpu_copy(scheduler: Any) -> Any:
    """Copy a scheduler to the CPU.

    Its tensors stay float32: scalars that it computes from them keep the rounding of the live
    object, while the float64 probes that they multiply add none.
    """
    live = copy.deepcopy(scheduler)
    if isinstance(getattr(vars(live).get("step"), "original", None), MethodType):
        del live.step  # dpa.accelerate's, which is made of such a table
    for name, value in vars(live).items():
        if isinstance(value, Tensor):
            setattr(live, name, value.detach().cpu())
    return live


# The options that messages show.
_SHOWN = re.compile(
    r"(variance|prediction|algorithm)_type|beta_schedule|rescale_betas_zero_snr|solver_order"
    r"|use_flow_sigmas"
)


class _Step:
    """A step of a live scheduler, for messages: it must be finite, and what the form says."""

    def __init__(self, live: Any, timestep: Any, options: dict[str, Any]):
        self.live, self.timestep, self.options = live, timestep, options

    def refuse(self, rule: str, got: str, error: type[ValueError] = ValueError) -> None:
        config = dict(self.live.config)
        shown = {n: v for n, v in config.items() if _SHOWN.fullmatch(n)} | self.options
        described = ", ".join(f"{name}={value!r}" for name, value in shown.items())
        raise error(
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
            got = f"a relative {name} error of {error:.1e}"
            self.refuse("linear with a clamped x0", got, NotLinearError)


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


def measure_chain(live: Any, first_step: int = 0) -> Chain:
    """Measure a deterministic scheduler (a multistep solver, Euler, Heun), which this may change.

    The process begins at ``first_step``, with nothing remembered. A step's result may depend on
    what the steps before it kept: their x0 where the scheduler shows it, else the model output.
    Where it depends on an earlier sample too (Heun, UniPC's corrector), that is what the last step
    made this one's sample of, so that this sample and what was kept determine it.
    """
    held = vars(live)  # of a copy that was used: it begins at its first step again
    start = {name: held[name] for name in OF_STEPS if name in held}
    held |= {n: [None] * len(v) if isinstance(v, list) else None for n, v in start.items()}
    if "lower_order_nums" in held:
        live.lower_order_nums = 0
    try:
        return Chain(copy.deepcopy(live), first_step, follows=False)
    except NotLinearError:
        return Chain(live, first_step, follows=True)


class Chain:
    """The steps of a live scheduler that follow one another, taken on points of several sizes.

    The small points are inside every clip range, the large ones far outside.

    Args:
        live: the scheduler.
        first_step: where the process begins.
        follows: whether a step is given the last one's result. If not, samples are powers of two,
            which a coefficient multiplies exactly: some schedulers round the sample to float32.

    Attributes:
        rows: six coefficients a step, the noise's being zero. The first two are the weights of
            sample and model output in what the step keeps.
        history: for each step the weights of what earlier steps kept, the newest first.
        shown: whether the scheduler shows what it keeps; where not that is the model output.
        clip: bound of what a step keeps.
        scales: for each step what the network takes the sample times.
        draws_noise: whether each step takes noise from the random stream, which it does not use.
        follows: whether a step finds an earlier sample from its own one.

    """

    _SIZES = torch.tensor([2.0**-20, 1.0, 2.0**20], dtype=torch.float64).repeat(16)
    _SMALL, _LARGE = slice(0, 24, 3), slice(2, 24, 3)
    _FITTED, _HELD_OUT = slice(0, 24), slice(24, 48)
    _NONE = 1e-10  # of the result's size: the fit's rounding, where a weight is none

    def __init__(self, live: Any, first_step: int, follows: bool):
        self.live, self.follows = live, follows
        self._generator = torch.Generator().manual_seed(1)
        takes = "generator" in inspect.signature(live.step).parameters
        self._noise = torch.Generator().manual_seed(2) if takes else None
        self._depth = max(1, len(getattr(live, "model_outputs", ())))
        self._remembered: list[Tensor] = []
        self.rows: list[list[float]] = []
        self.scales: list[float] = []
        self.draws_noise: list[bool] = []
        self.clip, self.shown = math.inf, True
        sample, found = self._powers(), []
        for timestep in live.timesteps[first_step:]:
            out, weights = self._take(timestep, sample)
            found.append(weights)
            sample = out if follows else self._powers()
        width = max((n + 1 for h in found for n, weight in enumerate(h) if weight), default=0)
        self.history = [(*h[:width], *[0.0] * (width - len(h))) for h in found]

    def _powers(self) -> Tensor:
        count = len(self._SIZES)
        exponent = torch.randint(-3, 4, (count,), generator=self._generator)
        sign = torch.randint(0, 2, (count,), generator=self._generator) * 2 - 1
        return sign * torch.pow(2.0, exponent.double()) * self._SIZES

    def _take(self, timestep: Tensor, sample: Tensor) -> tuple[Tensor, list[float]]:
        """Take a step; return its result, and its weights of what earlier steps kept."""
        step, sizes = _Step(self.live, timestep.item(), {}), self._SIZES
        output = torch.randn(len(sizes), generator=self._generator, dtype=torch.float64) * sizes
        self.scales.append(self._scale(step, timestep, sample))
        options = {} if self._noise is None else {"generator": self._noise}
        before = None if self._noise is None else self._noise.get_state()
        result = self.live.step(output[None], timestep, sample[None], **options)
        out = result.prev_sample[0]
        # What the scheduler shows of what it keeps: it is the x0 of most.
        seen = getattr(result, "pred_original_sample", None)
        if hasattr(self.live, "model_outputs"):
            seen = self.live.model_outputs[-1]
        # Noise of any weight but zero is none of the columns below.
        draws_noise = before is not None and not torch.equal(before, self._noise.get_state())
        self.draws_noise.append(draws_noise)
        step.check_finite(out)

        keeps = output if seen is None else seen[0]
        small, large = self._SMALL, self._LARGE
        r0, r1 = _fit([x[small] / sizes[small] for x in (sample, output)], (keeps / sizes)[small])
        whole = r0 * sample + r1 * output
        if not self.rows and keeps[large].abs().max() < 0.5 * whole[large].abs().max():
            self.clip = float(keeps[large].abs().max())
        clipped, held_out = math.isfinite(self.clip), self._HELD_OUT
        expected = whole.clamp(-self.clip, self.clip)
        step.check_close("x0", (expected / sizes)[held_out], (keeps / sizes)[held_out])

        columns = [sample, output, *[keeps] * clipped, *self._remembered]
        columns, target = [column / sizes for column in columns], out / sizes
        weights = _fit([column[self._FITTED] for column in columns], target[self._FITTED])
        terms = [weight * column for weight, column in zip(weights, columns, strict=True)]
        step.check_close("result", sum(terms)[held_out], target[held_out])
        r3, r4, *others = weights
        r2 = others.pop(0) if clipped else 0.0
        least = self._NONE * float(target.abs().max())
        counts = [float(term.abs().max()) > least for term in terms[len(terms) - len(others) :]]
        history = [weight * counted for weight, counted in zip(others, counts, strict=True)]
        self._remembered = [keeps, *self._remembered][: self._depth]
        self.rows.append([r0, r1, r2, r3, r4, 0.0])
        self.shown = self.shown and seen is not None
        return out, history

    def _scale(self, step: _Step, timestep: Tensor, sample: Tensor) -> float:
        """Return what the network takes the sample times."""
        if not hasattr(self.live, "scale_model_input"):
            return 1.0
        scaled = self.live.scale_model_input(sample[None], timestep)[0]
        scale = float((scaled / sample)[0])
        step.check_close("input", scaled / self._SIZES, scale * sample / self._SIZES)
        return scale
