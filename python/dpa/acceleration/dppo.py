"""The loop of DPPO's diffusion policies, as they act deterministically: in evaluation.

Source: Ren et al., Diffusion Policy Policy Optimization (2024). DDPM's noise has a standard
deviation of at least 1e-3; DDIM takes epsilon from the clamped x0. Each step takes random numbers,
used or not.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn

from dpa.acceleration.loops import Loop, LoopCall, ddpm_table
from dpa.schedulers.tables import StepTable, known_of, table_of
from dpa.tracking.replacing import class_of

_LEAST_STD = 1e-3
_BEYOND = 9.0  # no normal random number of PyTorch's is
_OWN = ("DiffusionModel.forward", "VPGDiffusion.forward")  # others differ in their steps


def _count(policy: Any) -> int:
    return int(policy.ddim_steps if policy.use_ddim else policy.denoising_steps)


def _network(policy: Any) -> nn.Module | None:
    """Return the network of all steps, or of the first ones where those of the last differ."""
    if class_of(policy).forward.__qualname__ not in _OWN:
        return None
    tuned = getattr(policy, "ft_denoising_steps", 0)
    return policy.actor_ft if tuned >= _count(policy) else getattr(policy, "actor", policy.network)


def _begin(
    policy: Any,
    cond: dict[str, Tensor],
    deterministic: bool = True,
    return_chain: bool = False,
    use_base_policy: bool = False,
) -> LoopCall | None:
    if not deterministic or return_chain or use_base_policy or not isinstance(cond, dict):
        return None
    tuned = getattr(policy, "ft_denoising_steps", 0)
    if 0 < tuned < _count(policy):
        raise ValueError(f"its last {tuned} steps are those of another network, actor_ft")
    batch = len(cond["state"] if "state" in cond else cond["rgb"])
    return LoopCall((batch, policy.horizon_steps, policy.action_dim), {"cond": cond})


def _end(policy: Any, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
    most = policy.final_action_clip_value
    sample = sample if most is None else sample.clamp(-most, most)
    method = inspect.unwrap(class_of(policy).forward)  # from under torch.no_grad
    return method.__globals__["Sample"](sample, None)


def _table(policy: Any) -> StepTable:
    most = policy.denoised_clip_value
    clip = math.inf if most is None else float(most)
    return _ddim(policy, clip) if policy.use_ddim else _ddpm(policy, clip)


def _ddim(policy: Any, clip: float) -> StepTable:
    if policy.eps_clip_value is not None:
        raise ValueError("its eps_clip_value clamps epsilon")
    names = ("ddim_alphas", "ddim_alphas_prev", "ddim_sqrt_one_minus_alphas")
    rows, levels = [], []
    for alpha, before, sigma in zip(*(getattr(policy, n).tolist() for n in names), strict=True):
        root, direction = math.sqrt(alpha), math.sqrt(1 - before)
        row = [1 / root, -sigma / root, math.sqrt(before), 0.0, direction, 0.0]
        if clip < math.inf:  # epsilon is (sample - root * x0) / sigma
            row[2:5] = [row[2] - direction * root / sigma, direction / sigma, 0.0]
        rows.append(row)
        levels.append([root, sigma])
    steps = policy.ddim_t.tolist()
    return table_of(steps, rows, clip, (True,) * len(rows), **known_of(rows, levels))


def _ddpm(policy: Any, clip: float) -> StepTable:
    if not policy.randn_clip_value > _BEYOND:
        raise ValueError(f"its randn_clip_value of {policy.randn_clip_value} clamps noise")
    means = policy.ddpm_mu_coef1, policy.ddpm_mu_coef2
    deviations = torch.exp(0.5 * policy.ddpm_logvar_clipped).clamp(min=_LEAST_STD)
    return ddpm_table(policy, means, deviations, clip)


DPPO = Loop(
    "forward",
    _network,
    _begin,
    _end,
    table=_table,
    no_grad=True,
    needs=frozenset({"cond", "deterministic"}),
)
