"""The loop of Diffuser: DDPM's steps over trajectories in which given states hold.

Source: Janner et al., Planning with Diffusion for Flexible Behavior Synthesis (2022).
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn

from dpa.acceleration.loops import Loop, LoopCall, ddpm_table
from dpa.acceleration.unet_forward import FastForward
from dpa.nn.family import resembles
from dpa.schedulers.tables import StepTable
from dpa.tracking.replacing import class_of
from dpa.training.graphed_calls import replaced_forward

_NEEDS = frozenset({"shape", "cond", "verbose"})


class _Buffers:
    """A planner's buffers as attributes."""

    def __init__(self, planner: nn.Module):
        self.__dict__ = planner._buffers


def _defaults(policy: Any) -> dict[str, Any]:
    parameters = inspect.signature(class_of(policy).p_sample_loop).parameters
    return {name: parameter.default for name, parameter in parameters.items()}


def _network(policy: Any) -> nn.Module | None:
    of_it = ("posterior_log_variance_clipped", "transition_dim", "n_timesteps")
    if not all(hasattr(policy, name) for name in of_it):
        return None
    network = policy.model
    # Every call asks, and to look through the names of a network's parameters takes milliseconds.
    known = isinstance(network, nn.Module) and isinstance(replaced_forward(network), FastForward)
    return network if known or resembles(network) else None


def _begin(
    policy: Any,
    shape: tuple[int, int, int],
    cond: dict[int, Tensor],
    verbose: bool = True,
    return_chain: bool = False,
    return_diffusion: bool = False,
    sample_fn: Any = None,
) -> LoopCall | None:
    if return_chain or return_diffusion:
        return None
    if sample_fn is not _defaults(policy).get("sample_fn"):
        raise ValueError("its sample_fn is another one")
    if "forward" not in vars(policy.model):
        raise ValueError("its network takes conditions before the timestep")
    data = torch.zeros(shape, device=policy.betas.device)
    mask = torch.zeros_like(data, dtype=torch.bool)
    for moment, state in cond.items():
        data[:, moment, policy.action_dim :] = state
        mask[:, moment, policy.action_dim :] = True
    return LoopCall(tuple(shape), {}, None, None, data, mask)


def _end(policy: Any, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
    if "return_chain" not in _defaults(policy):  # of Maze2D
        return sample
    values = torch.zeros(len(sample), device=sample.device)
    order = torch.argsort(values, descending=True)  # which may move equal ones
    method = inspect.unwrap(class_of(policy).p_sample_loop)  # from under torch.no_grad
    return method.__globals__["Sample"](sample[order], values[order], None)


def _table(policy: Any) -> StepTable:
    means = policy.posterior_mean_coef1, policy.posterior_mean_coef2
    deviations = torch.exp(0.5 * policy.posterior_log_variance_clipped)
    clip = 1.0 if policy.clip_denoised else math.inf
    # Its noise is made like the sample, which after a step lies in memory as x0 does: where that is
    # the network's output, channels before time.
    transposed = (False, *[not policy.predict_epsilon] * (policy.n_timesteps - 1))
    return ddpm_table(policy, means, deviations, clip, transposed)


DIFFUSER = Loop(
    "p_sample_loop",
    _network,
    _begin,
    _end,
    table=_table,
    no_grad=True,
    holders=(_Buffers,),
    needs=_NEEDS,
    knows=_NEEDS | {"return_chain", "return_diffusion", "sample_fn"},
)
