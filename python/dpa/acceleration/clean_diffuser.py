"""The loops of CleanDiffuser's agents around a network with one condition, and none beside it.

Source: Dong et al., CleanDiffuser (2024). These are its DDPM, its DiscreteDiffusionSDE with eight
solvers, and EDM with the steps of Euler and Heun.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import weakref
from collections.abc import Callable, Mapping, Set
from math import expm1
from typing import Any

import torch
from torch import Tensor, nn

from dpa.acceleration.loops import Loop, LoopCall
from dpa.schedulers.tables import StepTable, known_of, table_of
from dpa.tracking.reads import frozen
from dpa.tracking.replacing import class_of

# What an agent calls beside these is left to it.
_NEUTRAL = {"requires_grad": False, "preserve_history": False, "warm_start_reference": None}
_OF_ALL = frozenset({"prior", "n_samples", "sample_steps", "condition_cfg", "w_cfg"})
# Of EDM's agents the schedules that were compared, with what they were made of.
_schedules: weakref.WeakKeyDictionary[Any, tuple[Any, list[Any]]] = weakref.WeakKeyDictionary()
_KEPT_TIMES = 0.005  # below it Heun's second evaluation is left out


def _network(kind: str, agent: Any) -> nn.Module | None:
    fits = any(cls.__name__ == kind for cls in type(agent).__mro__)
    fits = fits and hasattr(agent, "model_ema") and hasattr(agent, "fix_mask")
    return agent.model_ema["diffusion"] if fits else None


def _begin(agent: Any, given: Mapping[str, Any], sigma: float, **options: Any) -> LoopCall | None:
    """Return the call of an agent's ``sample``, by its arguments."""
    prior, weight, condition = given["prior"], given["w_cfg"], given["condition_cfg"]
    if not isinstance(prior, Tensor) or prior.dim() != 3 or len(prior) != given["n_samples"]:
        return None
    if prior.dtype != next(agent.model_ema["diffusion"].parameters()).dtype:
        return None
    if not torch.empty_like(prior, device="meta").is_contiguous():
        return None  # its noise is in the prior's order
    if not given["use_ema"] or any(given.get(name, v) is not v for name, v in _NEUTRAL.items()):
        return None
    if agent.classifier is not None:
        raise ValueError("its classifier guides it")
    if weight not in (0.0, 1.0):
        raise ValueError(f"its w_cfg of {weight} weighs two predictions")
    conditions = {}
    if condition is not None:
        vector = agent.model_ema["condition"](condition, given["mask_cfg"])
        conditions = {"condition": vector} if weight else {}
    prior, mask = prior.to(agent.device), agent.fix_mask
    held = {}
    if isinstance(mask, Tensor):
        held = {"condition_data": prior, "condition_mask": mask.bool().expand(prior.shape)}
    shape = tuple(prior.shape)
    return LoopCall(shape, conditions, **held, options=options, init_noise_sigma=float(sigma))


def _bound(agent: Any) -> float:
    """Return what x0 is clipped to; raise for a mask of weights too, which none of these holds."""
    mask = agent.fix_mask
    if isinstance(mask, Tensor) and bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError("its fix_mask has weights between 0 and 1")
    least, most = getattr(agent, "x_min", None), getattr(agent, "x_max", None)
    if least is None and most is None:
        return math.inf
    if least is not None and most is not None:
        ends = torch.cat([torch.as_tensor(end).flatten().float().cpu() for end in (most, -least)])
        if bool((ends == ends[0]).all()) and ends[0] >= 0:
            return float(ends[0])
    raise ValueError("its x_min and x_max are not one bound for all")


def _row(
    agent: Any, clip: float, levels: tuple[float, float], weights: tuple[float, float, float]
) -> list[float]:
    """Return the row of a step that is ``weights`` of the sample, epsilon and x0, without noise.

    ``levels`` are those of x0 and of noise in the sample.
    """
    (alpha, sigma), (x, eps, x0) = levels, weights
    to_x0 = [1 / alpha, -sigma / alpha] if agent.predict_noise else [0.0, 1.0]
    if math.isinf(clip) and agent.predict_noise:
        return [*to_x0, 0.0, x + x0 / alpha, eps - x0 * sigma / alpha, 0.0]
    return [*to_x0, x0 - eps * alpha / sigma, x + eps / sigma, 0.0, 0.0]


# ------------------------------------ DDPM ------------------------------------


def _begin_ddpm(agent: Any, temperature: float = 1.0, **given: Any) -> LoopCall | None:
    if given["sample_steps"] != agent.diffusion_steps:
        return None  # which warns
    return _begin(agent, given, temperature)


def _end_ddpm(agent: Any, sample: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    return sample, {"log_p": None}


def _ddpm(agent: Any) -> StepTable:
    clip, rows, levels = _bound(agent), [], []
    bars = agent.bar_alpha.double().cpu()
    for t in reversed(range(agent.diffusion_steps)):
        bar, before = float(bars[t]), float(bars[t - 1]) if t else 1.0
        alpha, beta = float(agent.alpha[t]), float(agent.beta[t])
        if agent.predict_noise:
            weights = 1 / math.sqrt(alpha), -beta / math.sqrt(alpha * (1 - bar)), 0.0
        else:
            past = math.sqrt(alpha) * (1 - before) / (1 - bar)
            weights = past, 0.0, beta * math.sqrt(before) / (1 - bar)
        levels.append((math.sqrt(bar), math.sqrt(1 - bar)))
        row = _row(agent, clip, levels[-1], weights)
        row[5] = math.sqrt(beta * (1 - before) / (1 - bar)) if t else 0.0
        rows.append(row)
    steps = list(reversed(range(agent.diffusion_steps)))
    noisy = (*[True] * (len(rows) - 1), False)
    return table_of(steps, rows, clip, noisy, **known_of(rows, levels))


# ----------------------------- DiscreteDiffusionSDE -----------------------------


def _begin_sde(
    agent: Any,
    solver: str = "ddpm",
    sample_steps: int = 5,
    sample_step_schedule: Any = "uniform",
    diffusion_x_sampling_steps: int = 0,
    temperature: float = 1.0,
    **given: Any,
) -> LoopCall | None:
    if not isinstance(sample_step_schedule, str):
        return None
    if not inspect.isfunction(_schedules_of(agent).get(sample_step_schedule)):
        return None  # an object's own values may change
    steps = {"count": sample_steps, "schedule": sample_step_schedule}
    again = diffusion_x_sampling_steps
    return _begin(agent, given, temperature, solver=solver, again=again, **steps)


def _end_sde(agent: Any, sample: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    if agent.x_max is not None or agent.x_min is not None:
        sample = sample.clip(agent.x_min, agent.x_max)
    return sample, {"sample_history": None}


def _schedules_of(agent: Any) -> Mapping[str, Any]:
    """Return the schedules of steps that the agent's module names."""
    names: Mapping[str, Any] = inspect.unwrap(class_of(agent).sample).__globals__
    schedules: Mapping[str, Any] = names.get("SUPPORTED_SAMPLING_STEP_SCHEDULE", {})
    return schedules


def _sde(
    agent: Any, solver: str = "ddpm", count: int = 5, schedule: str = "uniform", again: int = 0
) -> StepTable:
    clip, schedules = _bound(agent), _schedules_of(agent)
    if solver not in _WEIGHTS or schedule not in schedules:
        raise ValueError(f"its solver is {solver!r}, its schedule {schedule!r}")
    places = schedules[schedule](agent.diffusion_steps, count).cpu()
    alphas, sigmas = (v.cpu()[places] for v in (agent.alpha, agent.sigma))
    snr = torch.log(alphas / sigmas)  # rounded as the agent's: where alpha is small that shows
    rows, history, noisy = [], [], []
    order = [*range(count, 0, -1), *[1] * again]
    for i in order:
        h = float(snr[i - 1] - snr[i])
        now, after = ((float(alphas[n]), float(sigmas[n])) for n in (i, i - 1))
        *weights, noise = _WEIGHTS[solver](*now, *after, h)
        ago = 0.0
        if solver.endswith("2M") and i < count:
            if snr[i] == snr[i + 1]:
                raise ValueError(f"its schedule {schedule!r} repeats a place")
            ratio = 0.5 * h / float(snr[i] - snr[i + 1])
            ago, weights[2] = -ratio * weights[2], (1 + ratio) * weights[2]
        adds_noise = solver.startswith("sde") or (solver == "ddpm" and i > 1)
        row = _row(agent, clip, now, tuple(weights))
        row[5] = noise if adds_noise else 0.0
        rows.append(row)
        history.append((ago,))
        noisy.append(adds_noise)
    # Steps that are taken again begin where the last one has ended.
    reached = [*range(count, 0, -1), *[0] * again]
    levels = torch.stack([alphas, sigmas], 1)[reached].tolist()
    return table_of(places[order], rows, clip, noisy, history, **known_of(rows, levels))


def _ancestral(a: float, s: float, a2: float, s2: float, h: float) -> tuple[float, ...]:
    noise = s2 / s * math.sqrt(1 - (a / a2) ** 2)
    return a2 / a, math.sqrt(s2**2 - noise**2 + 1e-8) - a2 / a * s, 0.0, noise


def _sde_1(a: float, s: float, a2: float, s2: float, h: float) -> tuple[float, ...]:
    return a2 / a, -2 * s2 * expm1(h), 0.0, s2 * math.sqrt(expm1(2 * h))


def _sde_pp(a: float, s: float, a2: float, s2: float, h: float) -> tuple[float, ...]:
    return s2 / s * math.exp(-h), 0.0, -a2 * expm1(-2 * h), s2 * math.sqrt(-expm1(-2 * h))


# The weights of the sample, of epsilon, of x0 and of noise, from the levels of x0 and of noise now
# and after the step, and the difference of their logarithms' ratios.
_WEIGHTS: dict[str, Callable[..., tuple[float, ...]]] = {
    "ddpm": _ancestral,
    "ddim": lambda a, s, a2, s2, h: (a2 / a, s2 - a2 * s / a, 0.0, 0.0),
    "ode_dpmsolver_1": lambda a, s, a2, s2, h: (a2 / a, -s2 * expm1(h), 0.0, 0.0),
    "ode_dpmsolver++_1": lambda a, s, a2, s2, h: (s2 / s, 0.0, -a2 * expm1(-h), 0.0),
    "sde_dpmsolver_1": _sde_1,
    "sde_dpmsolver++_1": _sde_pp,
}
_WEIGHTS["ode_dpmsolver++_2M"] = _WEIGHTS["ode_dpmsolver++_1"]
_WEIGHTS["sde_dpmsolver++_2M"] = _WEIGHTS["sde_dpmsolver++_1"]


# ------------------------------------ EDM ------------------------------------


def _begin_edm(
    agent: Any, sample_steps: int = 5, solver: str = "euler", **given: Any
) -> LoopCall | None:
    _check_schedule(agent, sample_steps)
    return _begin(agent, given, 1.0, count=sample_steps, solver=solver)


def _check_schedule(agent: Any, count: int) -> None:
    """Let an agent make its schedule where the original does, and raise where it is another one."""
    if count != agent.sample_steps:
        agent.set_sample_steps(count)
    held: list[Any] = []  # what is compared by its id, which stays its own while it lives
    sigmas = [getattr(agent, name, None) for name in _OF_SIGMAS]
    state = frozen([count, agent.sigma_min, agent.sigma_max, agent.rho, sigmas], held)
    if state == _schedules.get(agent, (None,))[0]:
        return
    (fresh := copy.copy(agent)).set_sample_steps(count)
    for name in _OF_SIGMAS:
        now, made = getattr(agent, name, None), getattr(fresh, name, None)
        if isinstance(now, Tensor) != isinstance(made, Tensor) or (
            isinstance(now, Tensor) and not torch.equal(now, made)
        ):
            raise ValueError(f"its {name} is not what its set_sample_steps makes")
    _schedules[agent] = state, held


def _end_edm(agent: Any, sample: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    return sample, {"log_p": None, "sample_history": None}


def _edm(agent: Any, count: int = 5, solver: str = "euler") -> StepTable:
    """Return Euler's or Heun's steps of ``dx/dt = (x - D) / t``, with D of the network."""
    clip = _bound(agent)
    ends = agent.sigma_max ** (1 / agent.rho), agent.sigma_min ** (1 / agent.rho)
    times = [(ends[0] + n / count * (ends[1] - ends[0])) ** agent.rho for n in range(count + 1)]
    passed, rows, history = [], [], []

    def take(time: float, of_d: float, of_sample: float, earlier: float = 0.0) -> None:
        norm = agent.sigma_data**2 + time**2
        to_d = [agent.sigma_data**2 / norm, time * agent.sigma_data / math.sqrt(norm)]
        passed.append(time)
        rows.append([*to_d, of_d, of_sample, 0.0, 0.0])
        history.append((earlier,))

    for place in range(count):
        time, after = times[place], times[place + 1]
        part = (time - after) / time
        take(time, part, 1 - part)
        if solver == "heun" and place != count - 1 and after > _KEPT_TIMES:
            half, kept = (time - after) / (2 * after), (1 - part / 2) / (1 - part)
            take(after, half, kept - half, part / 2 - kept * part)
    moments = torch.tensor(passed, dtype=torch.float64, device="cpu")
    scales = 1 / (agent.sigma_data**2 + moments**2).sqrt()
    steps = (0.25 * moments.log()).float(), rows, clip, (False,) * len(rows)
    known = known_of(rows, [(1.0, time) for time in passed])
    return table_of(*steps, history, follows=True, **known).scaled(scales, agent.sigma_max)


_KNOWS = _OF_ALL | {"use_ema", "mask_cfg", "temperature", "condition_cg", "w_cg", "kwargs"}
_KNOWS |= _NEUTRAL.keys()
_OF_SDES = {"solver", "diffusion_x_sampling_steps", "warm_start_forward_level"}
_OF_SIGMAS = ("sigma_s", "t_s", "scale_s", "dot_sigma_s", "dot_scale_s", "x_weight_s", "D_weight_s")


def _loop(
    kind: str,
    begin: Callable[..., LoopCall | None],
    end: Callable[..., Any],
    table: Callable[..., StepTable],
    has: str,
    further: Set[str] = frozenset(),
    changing: tuple[str, ...] = (),
) -> Loop:
    """Return the loop of a kind of agents, whose ``sample`` has an argument of that name.

    It may have ``further`` ones.
    """
    return Loop(
        "sample",
        functools.partial(_network, kind),
        begin,
        end,
        table=table,
        needs=_OF_ALL | {has},
        knows=_KNOWS | {has} | further,
        changing=("model", *changing),  # in training; calls that use it are the original's
        scheduler=None,
        steps=None,
        holders=(),
    )


CLEAN_DDPM = _loop("DDPM", _begin_ddpm, _end_ddpm, _ddpm, has="temperature")
CLEAN_SDE = _loop(
    "DiscreteDiffusionSDE", _begin_sde, _end_sde, _sde, has="sample_step_schedule", further=_OF_SDES
)
CLEAN_EDM = _loop(
    "EDM", _begin_edm, _end_edm, _edm, has="solver", changing=("sample_steps", *_OF_SIGMAS)
)
