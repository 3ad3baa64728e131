"""A scheduler's whole sampling process as a table of six numbers a step.

DDPM and DDIM, with any prediction type and with clipping, and Euler's steps share one
linear form (:func:`dpa.ops.scheduler_step`)::

    x0  = clamp(r0 * sample + r1 * model_output, -clip, clip)
    out = r2 * x0 + r3 * sample + r4 * model_output + r5 * noise

A multistep solver (DPM-Solver++, UniPC, Heun) adds weights of the x0 of earlier steps
(:class:`MultistepTable`).

The rows are measured, not derived: a copy of the live scheduler takes every step on chosen float64
points, and the linear form is then held against it on further points. The table therefore follows
the installed version of diffusers, quirks included, and a scheduler that does something else is
refused instead of approximated. :class:`LiveSteps` runs such a scheduler as it is, unfused.

Sources: Ho et al., Denoising Diffusion Probabilistic Models (2020); Song et al., Denoising
Diffusion Implicit Models (2020); Lu et al., DPM-Solver++ (2022); Lipman et al., Flow Matching for
Generative Modeling (2022); Karras et al., Elucidating the Design Space of Diffusion-Based
Generative Models (2022); Zhao et al., UniPC (2023).
"""

from __future__ import annotations

import copy
import inspect
import math
import numbers
import re
from typing import Any

import torch
from torch import Tensor

from dpa.library.checks import require
from dpa.schedulers.probes import (
    Chain,
    StepProbe,
    cpu_copy,
    measure_chain,
    measure_levels,
    measuring,
)
from dpa.schedulers.tables import StepTable, table_of

_DDPM, _DDIM = "DDPMScheduler", "DDIMScheduler"
_DPM, _UNIPC = "DPMSolverMultistepScheduler", "UniPCMultistepScheduler"
_FLOW, _EDM_DPM = "FlowMatchEulerDiscreteScheduler", "EDMDPMSolverMultistepScheduler"
_KINDS = (_DDPM, _DDIM, _DPM, _UNIPC, "EulerDiscreteScheduler", "HeunDiscreteScheduler")
_KINDS += ("EDMEulerScheduler", _EDM_DPM, _FLOW)
# The values of an option that the linear form covers, where it does not cover all.
_CHOICES: dict[str, dict[str, tuple]] = {
    "thresholding": dict.fromkeys(_KINDS, (False,)),
    "prediction_type": {
        _DDPM: ("epsilon", "sample", "v_prediction"),
        _DDIM: ("epsilon", "sample", "v_prediction"),
        _DPM: ("epsilon", "sample", "v_prediction", "flow_prediction"),
    },
    "variance_type": {
        _DDPM: ("fixed_small", "fixed_small_log", "fixed_large", "fixed_large_log"),
        _DPM: (None,),
    },
    # The stochastic ones sample noise in another dtype, or from another stream.
    "algorithm_type": {_DPM: ("dpmsolver++", "dpmsolver", "deis"), _EDM_DPM: ("dpmsolver++",)},
    "stochastic_sampling": {_FLOW: (False,)},
    "solver_p": {_UNIPC: (None,)},  # another scheduler
}
# Options whose effect is wholly inside the numbers that the probes measure. Two of them act only
# where thresholding is on, and that is refused.
_MEASURED = re.compile(
    r"num_train_timesteps|beta_(start|end|schedule)|trained_betas|rescale_betas_zero_snr"
    r"|clip_sample(_range)?|timestep_spacing|steps_offset|set_alpha_to_one"
    r"|dynamic_thresholding_ratio|sample_max_value|solver_(order|type)|lower_order_final"
    r"|euler_at_final|use_(karras|exponential|beta|flow)_sigmas|use_lu_lambdas|final_sigmas_type"
    r"|lambda_min_clipped|(flow_|base_|max_)?shift|shift_terminal|use_dynamic_shifting"
    r"|time_shift_type|(base|max)_image_seq_len|invert_sigmas|prediction_type|predict_x0"
    r"|disable_corrector|interpolation_type|timestep_type|sigma_(min|max|data|schedule)|rho"
)


def from_diffusers(
    scheduler: Any,
    num_inference_steps: int | None = None,
    eta: float = 0.0,
    use_clipped_model_output: bool = False,
    *,
    first_step: int = 0,
    scaled: bool = True,
) -> StepTable:
    """Measure the step table of a live diffusers scheduler.

    ``DDPMScheduler``, ``DDIMScheduler``, ``EulerDiscreteScheduler``, ``EDMEulerScheduler`` and
    ``FlowMatchEulerDiscreteScheduler`` give a :class:`StepTable`; ``HeunDiscreteScheduler``,
    ``UniPCMultistepScheduler``, ``DPMSolverMultistepScheduler`` and
    ``EDMDPMSolverMultistepScheduler`` a :class:`MultistepTable`, but where the solver's order is 1.
    Each evaluation of the network is a step: Heun's n steps are 2 n - 1. The scheduler is copied
    and left as it is.

    Args:
        scheduler: the live object; recognised by its class name, so diffusers is never imported.
        num_inference_steps: steps of the process. None takes the timesteps that the object holds
            (custom ones too), which for DDPM and DDIM are all training timesteps where none have
            been set.
        eta: weight of the noise in DDIM; 0 is deterministic.
        use_clipped_model_output: DDIM's option to derive the noise from the clipped x0 again.
        first_step: the step that the process begins at, of those of all timesteps.
        scaled: whether the network takes what ``scale_model_input`` makes of the sample, and the
            loop starts from noise times ``init_noise_sigma``, as in diffusers' pipelines. The loops
            of most policies call neither. Only Euler, Heun and EDM's schedulers scale.

    Returns:
        The table on the CPU, in float64.

    Raises:
        TypeError: for another class than these.
        ValueError: naming the option and its value, where the linear form cannot express it; or
            saying what the scheduler's own code raised when its copy was measured.

    """
    kind = check_kind(scheduler)
    with measuring(f"from_diffusers: {type(scheduler).__name__}"):
        _check_options(kind, scheduler, eta, use_clipped_model_output)
        copied = cpu_copy(scheduler)
        _set_timesteps(kind, copied, num_inference_steps)
        if kind in (_DDPM, _DDIM):
            options = {"eta": eta, "use_clipped_model_output": use_clipped_model_output}
            return _measure(copied, {} if kind == _DDPM else options, first_step)
        return _measure_chain(copied, first_step, scaled)


def _set_timesteps(kind: str, live: Any, num_inference_steps: int | None) -> None:
    """Set the timesteps of a copy, or check that it holds some."""
    if num_inference_steps is not None:
        most, steps = live.config.num_train_timesteps, num_inference_steps
        right = isinstance(steps, numbers.Integral) and 1 <= steps <= most
        rule = f"lie in 1..{most}, the scheduler's num_train_timesteps"
        require(right, "from_diffusers: num_inference_steps", rule, repr(steps))
        live.set_timesteps(num_inference_steps)
    elif getattr(live, "num_inference_steps", None) is None:
        rule = f"be given for a {kind} whose timesteps have not been set"
        require(kind in (_DDPM, _DDIM), "from_diffusers: num_inference_steps", rule, None)
        if kind == _DDIM:
            live.set_timesteps(live.config.num_train_timesteps)


def _begun(live: Any, first_step: int) -> Tensor:
    """Return the timesteps from the first step on."""
    timesteps = live.timesteps.detach().clone().cpu()
    right = isinstance(first_step, numbers.Integral) and 0 <= first_step < max(len(timesteps), 1)
    rule = f"lie in 0..{len(timesteps) - 1}"
    require(right, "from_diffusers: first_step", rule, repr(first_step))
    return timesteps[first_step:]


def _measure(live: Any, options: dict[str, Any], first_step: int) -> StepTable:
    """Measure a copy of DDPM or DDIM."""
    timesteps = _begun(live, first_step)
    levels = measure_levels(copy.deepcopy(live), timesteps)  # which may change it
    probes = [StepProbe(live, timestep, options) for timestep in timesteps.tolist()]
    # Every step clips alike; a step whose x0 is always zero (r0 = r1 = 0) does not exist.
    clip = probes[0].clip() if probes else math.inf
    coefficients = _matrix([probe.row(clip) for probe in probes])
    draws_noise = tuple(probe.draws_noise for probe in probes)
    known = {"levels": levels, "x0": coefficients[:, :2].clone()}
    return StepTable(timesteps, coefficients, clip, draws_noise, **known)


def _measure_chain(live: Any, first_step: int, scaled: bool) -> StepTable:
    """Measure a copy of a scheduler whose steps may depend on one another."""
    timesteps = _begun(live, first_step)
    second = first_step and len(timesteps) > 1 and timesteps[0] == timesteps[1]
    rule = "be the first evaluation of a step of Heun's"
    require(not second, "from_diffusers: first_step", rule, first_step)
    levels = measure_levels(copy.deepcopy(live), timesteps)
    chain = measure_chain(copy.deepcopy(live), first_step)
    rows, x0 = _matrix(chain.rows), _x0_of(live.config, chain, levels)
    if math.isinf(chain.clip) and not any(map(any, chain.history)):
        rows[:, :2] = 0.0  # of no use
    steps, known = (timesteps, rows, chain.clip, chain.draws_noise), {"levels": levels, "x0": x0}
    table = table_of(*steps, chain.history, chain.follows, **known)
    scales, sigma = chain.scales, float(getattr(live, "init_noise_sigma", 1.0))
    if not scaled or all(value == 1 for value in (sigma, *scales)):
        return table
    return table.scaled(torch.tensor(scales, dtype=torch.float64), sigma)


def _x0_of(config: Any, chain: Chain, levels: Tensor | None) -> Tensor | None:
    """Return the weights of sample and model output in a solver's prediction of x0."""
    if levels is None or config.get("invert_sigmas"):
        return None
    of_noise = config.get("algorithm_type") == "dpmsolver" or not config.get("predict_x0", True)
    if chain.shown and not of_noise:
        return _matrix(chain.rows)[:, :2].clone()
    signal, noise = levels.unbind(1)
    one = torch.ones_like(signal)
    rows = {
        "epsilon": (1 / signal, -noise / signal),
        "sample": (0 * one, one),
        "v_prediction": (signal, -noise),
        "flow_prediction": (one, -noise),
    }
    return torch.stack(rows[config.get("prediction_type", "flow_prediction")], 1)


def _matrix(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, 6)


def check_kind(scheduler: Any) -> str:
    """Return the kind of the scheduler; raise TypeError for one that no table expresses."""
    names = [cls.__name__ for cls in type(scheduler).__mro__]
    kind = next((name for name in names if name in _KINDS), None)
    rule = f"be a {', a '.join(_KINDS[:-1])} or a {_KINDS[-1]}"
    require(kind is not None, "from_diffusers: scheduler", rule, names[0], TypeError)
    return kind


def _check_options(kind: str, scheduler: Any, eta: float, use_clipped_model_output: bool) -> None:
    """Raise for what the fused step cannot do."""

    def check(holds: bool, option: str, value: Any, rule: str) -> None:
        require(holds, f"from_diffusers: {option}", f"be {rule} for {kind}", repr(value))

    defaults = inspect.signature(type(scheduler).__init__).parameters
    for option, value in dict(scheduler.config).items():
        choices = _CHOICES.get(option, {}).get(kind)
        if choices is not None:
            listed = ", ".join(map(str, choices))
            rule = f"one of {listed}" if len(choices) > 1 else listed
            check(value in choices, option, value, rule)
        elif not option.startswith("_") and not _MEASURED.fullmatch(option):
            # A later version's new option is harmless at its default: that is the old behaviour.
            usual = option in defaults and defaults[option].default == value
            check(usual, option, value, "left at its default, being unknown here")
    if kind == _DDIM:
        finite = isinstance(eta, numbers.Real) and 0 <= eta < math.inf
        check(finite, "eta", eta, "finite and at least 0")
        return
    check(eta == 0, "eta", eta, "0 (the option is DDIM's)")
    unused, option = not use_clipped_model_output, "use_clipped_model_output"
    check(unused, option, True, "False (the option is DDIM's)")
