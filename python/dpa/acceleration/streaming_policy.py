"""The loop of Streaming Diffusion Policy: a buffer whose later actions are noisier.

Source: Høeg et al., Streaming Diffusion Policy (2024). A call denoises until the first actions are
clean, hands them out, and appends noise. Each action has a timestep of its own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from dpa.acceleration.loops import CONDITIONED, Loop, LoopCall
from dpa.sampling.rng import draw_normal
from dpa.schedulers.each_action import EachActionTable, from_each_action

_MOVED = ("alphas_cumprod", "alphas", "betas", "final_alpha_cumprod")  # by the scheduler's step


def _network(policy: Any) -> nn.Module | None:
    return policy.model if hasattr(policy, "buffer_diff_steps") else None


def _begin(
    policy: Any,
    condition_data: Tensor,
    condition_mask: Tensor,
    local_cond: Tensor | None = None,
    global_cond: Tensor | None = None,
    generator: Any = None,
    **options: Any,
) -> LoopCall | None:
    steps, buffer = policy.buffer_diff_steps, policy.action_buffer
    if generator is not None or not isinstance(steps, Tensor) or not isinstance(buffer, Tensor):
        return None  # noise is appended from another stream; an empty buffer is an error
    if buffer.shape != condition_data.shape:
        return None  # the original says what is wrong
    _move_constants(policy.noise_scheduler, buffer)
    clean = policy.n_obs_steps - 1 + policy.n_action_steps - 1
    conditions = {"local_cond": local_cond, "global_cond": global_cond, "timestep": steps}
    options = {"steps": int(steps[:, clean].max()) + 1, **options}
    given = buffer, None, condition_data, condition_mask, options
    finish = functools.partial(_finish, policy, steps)
    shape = tuple(buffer.shape)
    return LoopCall(shape, conditions, *given, one_stream=False, finish=finish)


def _move_constants(scheduler: Any, like: Tensor) -> None:
    """Bring a scheduler's constants to the sample's device and dtype, as its first step does.

    Otherwise the scheduler would be another one after the first call.
    """
    for name in _MOVED:
        value = getattr(scheduler, name, None)
        if isinstance(value, Tensor) and (value.device, value.dtype) != (like.device, like.dtype):
            setattr(scheduler, name, value.to(like.device, like.dtype))


def _finish(policy: Any, before: Tensor, sample: Tensor, generator: Any) -> Tensor:
    """Leave the policy's buffers as its own loop does; return the whole buffer."""
    count, first = policy.n_action_steps, policy.n_obs_steps - 1
    clean = first + count - 1
    steps = (before - (before[:, clean].max() + 1)).clamp(min=-1)
    horizon = sample.shape[1]
    excess = (horizon - first) % count  # of no whole chunk
    kept = slice(count, horizon - excess)
    shape = (len(sample), count + excess, sample.shape[2])
    fresh = draw_normal(shape, generator, sample.device, sample.dtype)
    noisiest = steps.new_full(shape[:2], policy.num_inference_steps - 1)
    policy.action_buffer = torch.cat([sample[:, kept], fresh], dim=1)
    policy.buffer_diff_steps = torch.cat([steps[:, kept], noisiest], dim=1)
    policy.buffer_diff_steps[:, :first] = policy.buffer_diff_steps[:, first : first + 1]
    # The policy takes these random numbers, and does not use them.
    draw_normal((len(sample), first, sample.shape[2]), generator, sample.device, sample.dtype)
    return sample


def _table(policy: Any, steps: int = 1, **options: Any) -> EachActionTable:
    count = policy.num_inference_steps
    return from_each_action(policy.noise_scheduler, count, steps, **options)


STREAMING = Loop(
    "conditional_sample",
    _network,
    _begin,
    table=_table,
    changing=("action_buffer", "buffer_diff_steps"),
    needs=CONDITIONED,
    knows=CONDITIONED | {"kwargs"},
)
