"""A scheduler's whole sampling process as a table of six numbers a step.

DDPM and DDIM, with any prediction type and with clipping, share one linear form
(:func:`dpa.ops.scheduler_step`)::

    x0  = clamp(r0 * sample + r1 * model_output, -clip, clip)
    out = r2 * x0 + r3 * sample + r4 * model_output + r5 * noise

The rows are measured, not derived: a copy of the live scheduler takes every step on chosen float64
points, and the linear form is then held against it on further points. The table therefore follows
the installed version of diffusers, quirks included, and a scheduler that does something else is
refused instead of approximated.

Sources: Ho et al., Denoising Diffusion Probabilistic Models (2020); Song et al., Denoising
Diffusion Implicit Models (2020).
"""

from __future__ import annotations

import copy
import inspect
import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

_KINDS = ("DDPMScheduler", "DDIMScheduler")
_PREDICTION_TYPES = ("epsilon", "sample", "v_prediction")
_VARIANCE_TYPES = ("fixed_small", "fixed_small_log", "fixed_large", "fixed_large_log")
# Options whose effect is wholly inside the numbers that the probes measure.
_MEASURED = {
    "num_train_timesteps",
    "beta_start",
    "beta_end",
    "beta_schedule",
    "trained_betas",
    "clip_sample",
    "clip_sample_range",
    "timestep_spacing",
    "steps_offset",
    "rescale_betas_zero_snr",
    "set_alpha_to_one",
    # These two act only where thresholding is on, and that is refused.
    "dynamic_thresholding_ratio",
    "sample_max_value",
}


@dataclass(frozen=True, eq=False)
class StepTable:
    """The steps of one sampling process, in the order in which they run.

    Attributes:
        timesteps: (S,) what the network is told at each step.
        coefficients: (S, 6) floating, the columns r0..r5 of :func:`dpa.ops.scheduler_step`.
        clip: bound of the predicted x0; infinity where clipping is off.
        draws_noise: whether each step draws from the random stream. A step may draw and then weight
            the noise by zero, and its draw still moves the stream.

    Raises:
        ValueError: where the shapes do not belong together.

    """

    timesteps: Tensor
    coefficients: Tensor
    clip: float = math.inf
    draws_noise: tuple[bool, ...] = field(default=())

    def __post_init__(self) -> None:
        """Check that the parts belong together."""
        shape = tuple(self.coefficients.shape)
        if len(shape) != 2 or shape[1] != 6 or not self.coefficients.is_floating_point():
            raise ValueError(
                "StepTable: coefficients must be a floating (S, 6) tensor, got "
                f"{self.coefficients.dtype} {shape}"
            )
        if self.timesteps.shape != shape[:1]:
            raise ValueError(
                f"StepTable: timesteps must be ({shape[0]},), a row each, "
                f"got {tuple(self.timesteps.shape)}"
            )
        if not self.clip >= 0:
            raise ValueError(f"StepTable: clip must be at least 0, got {self.clip}")
        if not self.draws_noise:
            draws = (self.coefficients[:, 5] != 0).tolist()
            object.__setattr__(self, "draws_noise", tuple(draws))
        if len(self.draws_noise) != shape[0]:
            raise ValueError(
                f"StepTable: draws_noise must have {shape[0]} entries, got {len(self.draws_noise)}"
            )

    def __len__(self) -> int:
        """Return the number of steps."""
        return self.coefficients.shape[0]

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> StepTable:
        """Return the table on ``device``, its coefficients in ``dtype``."""
        return replace(
            self,
            timesteps=self.timesteps.to(device=device),
            coefficients=self.coefficients.to(device=device, dtype=dtype),
        )


def from_diffusers(
    scheduler: Any,
    num_inference_steps: int | None = None,
    eta: float = 0.0,
    use_clipped_model_output: bool = False,
) -> StepTable:
    """Measure the step table of a live diffusers ``DDPMScheduler`` or ``DDIMScheduler``.

    The scheduler is copied and left as it is.

    Args:
        scheduler: the live object; recognised by its class name, so diffusers is never imported.
        num_inference_steps: steps of the process. None takes the timesteps that the object holds
            (custom ones too), which are all training timesteps where none have been set.
        eta: weight of the noise in DDIM; 0 is deterministic.
        use_clipped_model_output: DDIM's option to derive the noise from the clipped x0 again.

    Returns:
        A :class:`StepTable` on the CPU, in float64.

    Raises:
        TypeError: for another class than these two.
        ValueError: naming the option and its value, where the linear form cannot express it.

    """
    kind = _check_scheduler(scheduler, eta, use_clipped_model_output)
    live = _cpu_copy(scheduler)
    if num_inference_steps is not None:
        most = live.config.num_train_timesteps
        if not 1 <= num_inference_steps <= most:
            raise ValueError(
                f"from_diffusers: num_inference_steps must lie in 1..{most}, the scheduler's "
                f"num_train_timesteps, got {num_inference_steps}"
            )
        live.set_timesteps(num_inference_steps)
    elif kind == "DDIMScheduler" and live.num_inference_steps is None:
        live.set_timesteps(live.config.num_train_timesteps)
    options: dict[str, Any] = {}
    if kind == "DDIMScheduler":
        options = {"eta": eta, "use_clipped_model_output": use_clipped_model_output}

    timesteps = live.timesteps.detach().clone().cpu()
    probes = [_Probe(live, timestep, options) for timestep in timesteps.tolist()]
    # Every step clips alike; a step whose x0 is always zero (r0 = r1 = 0) does not exist.
    clip = probes[0].clip() if probes else math.inf
    rows = [probe.row(clip) for probe in probes]
    coefficients = torch.tensor(rows, dtype=torch.float64).reshape(-1, 6)
    return StepTable(timesteps, coefficients, clip, tuple(probe.draws for probe in probes))


def _check_scheduler(scheduler: Any, eta: float, use_clipped_model_output: bool) -> str:
    """Return the kind of the scheduler, or raise for what the fused step cannot do."""
    names = [cls.__name__ for cls in type(scheduler).__mro__]
    kind = next((name for name in names if name in _KINDS), None)
    if kind is None:
        raise TypeError(
            f"from_diffusers: scheduler must be a {' or a '.join(_KINDS)}, got {names[0]}"
        )

    def refuse(option: str, value: Any, rule: str) -> None:
        raise ValueError(f"from_diffusers: {option} must be {rule} for {kind}, got {value!r}")

    config = dict(scheduler.config)
    if config.pop("thresholding", False):
        refuse("thresholding", True, "False (a quantile per sample is no linear step)")
    prediction_type = config.pop("prediction_type", "epsilon")
    if prediction_type not in _PREDICTION_TYPES:
        refuse("prediction_type", prediction_type, f"one of {', '.join(_PREDICTION_TYPES)}")
    variance_type = config.pop("variance_type", "fixed_small")
    if variance_type not in _VARIANCE_TYPES:
        refuse("variance_type", variance_type, f"one of {', '.join(_VARIANCE_TYPES)}")
    defaults = inspect.signature(type(scheduler).__init__).parameters
    for option, value in config.items():
        if option.startswith("_") or option in _MEASURED:
            continue
        # A later version's new option is harmless at its default, which keeps the old behaviour.
        if option not in defaults or defaults[option].default != value:
            refuse(option, value, "left at its default, being unknown here")
    if kind == "DDPMScheduler":
        if eta != 0:
            refuse("eta", eta, "0 (the option is DDIM's)")
        if use_clipped_model_output:
            refuse("use_clipped_model_output", True, "False (the option is DDIM's)")
    elif not 0 <= eta < math.inf:
        refuse("eta", eta, "finite and at least 0")
    return kind


def _cpu_copy(scheduler: Any) -> Any:
    """Copy the scheduler to the CPU.

    Its tensors stay float32: scalars that it computes from them keep the rounding of the live
    object, while the float64 probes that they multiply add none.
    """
    live = copy.deepcopy(scheduler)
    for name, value in vars(live).items():
        if isinstance(value, Tensor):
            setattr(live, name, value.detach().cpu())
    return live


class _Probe:
    """One timestep of the scheduler's ``step``, taken apart on chosen points.

    Points are elements of one vector: the step is elementwise, so a call measures all of them.
    """

    # Far outside any clip range, and so small that no clip range is reached.
    _LARGE, _SMALL = 2.0**60, 2.0**-60

    def __init__(self, live: Any, timestep: int, options: dict[str, Any]):
        self._live, self._timestep, self._options = live, timestep, options
        large, small = self._LARGE, self._SMALL
        sample = torch.tensor([0.0, small, 0.0, large, 0.0], dtype=torch.float64)
        output = torch.tensor([0.0, 0.0, small, 0.0, large], dtype=torch.float64)
        self.draws = False
        x0, out, noise = self._step(sample, output)
        self.r0, self.r1 = float(x0[1]) / small, float(x0[2]) / small
        self.r5 = float(out[0] / noise[0])
        self._bound = max(abs(float(x0[3])), abs(float(x0[4])))

    def _step(self, sample: Tensor, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run the live step; return x0, the result, and the noise that it draws if it draws."""
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn((1, sample.numel()), generator=generator, dtype=torch.float64)
        generator.manual_seed(0)
        before = generator.get_state()
        result = self._live.step(
            output[None], self._timestep, sample[None], generator=generator, **self._options
        )
        self.draws = self.draws or not torch.equal(before, generator.get_state())
        out, x0 = result.prev_sample, result.pred_original_sample
        if not bool(torch.isfinite(out).all() and torch.isfinite(x0).all()):
            raise ValueError(
                f"from_diffusers: {type(self._live).__name__}.step must be finite, got "
                f"{out[0, 0].item()} at timestep {self._timestep} under {self._described()}"
            )
        return x0[0], out[0], noise[0]

    def _described(self) -> str:
        config = dict(self._live.config)
        names = ("variance_type", "prediction_type", "beta_schedule", "rescale_betas_zero_snr")
        options = {name: config[name] for name in names if name in config} | self._options
        return ", ".join(f"{name}={value!r}" for name, value in options.items())

    def clip(self) -> float:
        """Return the bound that the predicted x0 runs into, or infinity."""
        reach = self._LARGE * max(abs(self.r0), abs(self.r1))
        return math.inf if self._bound > 0.5 * reach else self._bound

    def row(self, clip: float) -> list[float]:
        """Fit the six coefficients, and hold them against the step on points not fitted."""
        generator = torch.Generator().manual_seed(1)
        # Both sides of the clip range, which the factor 1 / r0 brings the sample to.
        reach = 1.0 if math.isinf(clip) else clip
        spread = torch.tensor([0.1, 10.0], dtype=torch.float64).repeat(16) * reach
        sample = torch.randn(32, generator=generator, dtype=torch.float64) * spread
        output = torch.randn(32, generator=generator, dtype=torch.float64) * spread.roll(1)
        x0, out, noise = self._step(sample, output)
        linear = out - self.r5 * noise
        columns = [sample, output] if math.isinf(clip) else [x0, sample, output]
        matrix = torch.stack(columns, dim=1)
        fitted, held_out = slice(0, 16), slice(16, 32)
        solution = torch.linalg.lstsq(matrix[fitted], linear[fitted]).solution
        # The fit's rounding, where a coefficient is zero by construction.
        solution = torch.where(solution.abs() < 1e-12, 0.0, solution).tolist()
        r2, r3, r4 = solution if len(solution) == 3 else [0.0, *solution]

        expected_x0 = (self.r0 * sample + self.r1 * output).clamp(-clip, clip)
        expected = r2 * x0 + r3 * sample + r4 * output + self.r5 * noise
        for name, got, want in (("x0", expected_x0, x0), ("result", expected, out)):
            error = float((got - want)[held_out].abs().max() / want.abs().max().clamp(min=1e-30))
            if not error < 1e-9:
                raise ValueError(
                    f"from_diffusers: {type(self._live).__name__}.step must be linear with a "
                    f"clamped x0, got a relative {name} error of {error:.1e} at timestep "
                    f"{self._timestep} under {self._described()}"
                )
        return [self.r0, self.r1, r2, r3, r4, self.r5]
