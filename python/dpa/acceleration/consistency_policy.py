"""The loops of Consistency Policy: the student's one step or its chain, and the teacher's ODE.

Source: Prasad et al., Consistency Policy (2024). Between the steps the sample is kept as the
network takes it: divided by ``sqrt(t^2 + data_std^2)``.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from dpa.acceleration.loops import CONDITIONED, Loop, LoopCall
from dpa.schedulers.tables import StepTable, table_of

_OF_ODES = ("calc_out", "get_scalings_for_boundary_condition", "timesteps_to_times", "solver")


def _embedded(times: Tensor) -> Tensor:
    """Return what the network takes for times, in float32 as the scheduler computes it."""
    return 1000 * 0.25 * torch.log(times.float() + 1e-44)


def _scalings(scheduler: Any, time: float) -> tuple[float, float, float]:
    """Return c_skip, c_out and c_in at a time, in float64."""
    kinds = {
        "boundary": scheduler.get_scalings_for_boundary_condition,
        "no_boundary": scheduler.get_scalings,
    }
    if scheduler.scaling not in kinds:
        raise ValueError(f"its scheduler's scaling is {scheduler.scaling!r}")
    found = kinds[scheduler.scaling](torch.tensor(time, dtype=torch.float64, device="cpu"))
    c_skip, c_out, c_in = map(float, found)
    return c_skip, c_out, c_in


def _student(policy: Any) -> nn.Module | None:
    return policy.model if hasattr(policy.noise_scheduler, "CTM_calc_out") else None


def _teacher(policy: Any) -> nn.Module | None:
    scheduler = policy.noise_scheduler
    has = all(hasattr(scheduler, name) for name in _OF_ODES)
    return policy.model if has and not hasattr(scheduler, "CTM_calc_out") else None


def _begin(
    policy: Any,
    condition_data: Tensor,
    condition_mask: Tensor,
    local_cond: Tensor | None = None,
    global_cond: Tensor | None = None,
    generator: Any = None,
) -> LoopCall | None:
    scheduler = policy.noise_scheduler
    if not isinstance(condition_data, Tensor) or not isinstance(condition_mask, Tensor):
        return None
    if hasattr(scheduler, "D"):
        raise ValueError("its scheduler starts from the noise of PFGM++")
    if not policy.obs_as_global_cond:
        raise ValueError("it is conditioned by inpainting")
    # A capture holds the policy's own masks, which are empty where it is conditioned by a vector.
    capturing = condition_mask.is_cuda and torch.cuda.is_current_stream_capturing()
    if not capturing and bool(condition_mask.any()):
        raise ValueError("its condition_mask inpaints")
    conditions = {"local_cond": local_cond, "global_cond": global_cond}
    sigma = _scalings(scheduler, scheduler.time_max)[2]
    shape = tuple(condition_data.shape)
    return LoopCall(shape, conditions, generator=generator, init_noise_sigma=sigma)


def _begin_student(policy: Any, condition_data: Tensor, **others: Any) -> LoopCall | None:
    call = _begin(policy, condition_data, **others)
    if call is None or (policy.chain and call.generator is not None):
        return None  # the chain's noise is none of the generator's
    stop = float(_embedded(torch.tensor(policy.noise_scheduler.time_min, device="cpu")))
    stops = condition_data.new_full((len(condition_data),), stop, dtype=torch.float32)
    call.conditions = {**call.conditions, "stoptime": stops}
    call.one_stream = not policy.chain
    return call


def _student_steps(policy: Any) -> StepTable:
    scheduler, chained = policy.noise_scheduler, []
    if policy.chain:
        chained = torch.tensor([float(t) for t in policy.chaining_times[1:]], device="cpu")
        if policy.chaining_times[0] == "C":
            chained = scheduler.timesteps_to_times(chained)
    times = torch.tensor([scheduler.time_max, *chained], dtype=torch.float32, device="cpu")
    stop, rows = scheduler.time_min, []
    for time, following in itertools.zip_longest(times.tolist(), times[1:].tolist()):
        c_skip, c_out, c_in = _scalings(scheduler, time)
        ratio = stop / time
        of_sample, of_output = ratio + (1 - ratio) * c_skip, (1 - ratio) * c_out
        scale = 1.0 if following is None else _scalings(scheduler, following)[2]
        noise = 0.0 if following is None else following * scale
        rows.append([of_sample / c_in, of_output, scale, 0.0, 0.0, noise])
    return table_of(_embedded(times), rows, 1.0, (*[True] * (len(rows) - 1), False))


def _teacher_steps(policy: Any) -> StepTable:
    """Return Euler's or Heun's steps of the ODE ``dx/dt = (x - x0) / t``."""
    scheduler = policy.noise_scheduler
    heun = scheduler.solver in ("heun", "second_order")
    if not heun and scheduler.solver not in ("euler", "first_order"):
        raise ValueError(f"its scheduler's solver is {scheduler.solver!r}")
    bins = torch.arange(scheduler.bins, device="cpu")
    times = [float(scheduler.timesteps_to_times(step)) for step in bins]
    passed, rows, history = [], [], []
    for place, (time, after) in enumerate(itertools.pairwise(times)):
        c_skip, c_out, c_in = _scalings(scheduler, time)
        last, step = place == len(times) - 2, after - time
        scale = _scalings(scheduler, after)
        end = 1.0 if last else scale[2]
        middle = scale[2] if heun else end
        x0 = -step / time
        rows.append([c_skip / c_in, c_out, x0 * middle, (1 - x0) * middle / c_in, 0.0, 0.0])
        passed.append(time)
        history.append((0.0,))
        if heun:  # from Euler's point: the slopes at both ends, of which it knows the first
            part = step / (2 * after)
            kept = time / (2 * after) + 0.5 + part
            row = [scale[0] / scale[2], scale[1], -part * end, kept * end / scale[2], 0.0, 0.0]
            rows.append(row)
            passed.append(after)
            history.append((part * end,))
    moments = torch.tensor(passed, dtype=torch.float32, device="cpu")
    return table_of(_embedded(moments), rows, 1.0, (False,) * len(rows), history)


_TAKES: dict[str, Any] = {"needs": CONDITIONED, "knows": CONDITIONED}
CONSISTENCY = Loop("conditional_sample", _student, _begin_student, table=_student_steps, **_TAKES)
KARRAS = Loop("conditional_sample", _teacher, _begin, table=_teacher_steps, **_TAKES)
