"""Parallel sampling beside the sequential loop, on a policy that was trained for it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import dpa
from dpa.bench.timing import latency
from dpa.demo import train
from dpa.demo import world as W
from dpa.demo.rollout import make_scheduler, rollout

# The published sizes on the demo's task, which such a network learns in a few hundred batches.
UNET = train.UNET | {"diffusion_step_embed_dim": 256, "down_dims": [256, 512, 1024]}
LEARNING_RATE, DTYPE = 4e-4, torch.bfloat16
WINDOW, TOLERANCES = 16, (1e-3, 3e-3, 1e-2)
OBSERVATIONS, EPISODES, REPEATS = 16, 40, 10
Row = dict[str, Any]


def rows(train_steps: int) -> list[Row]:
    """The sequential loop, then each tolerance: time, sweeps, error, success; 100 DDPM steps.

    ``error`` is of the action chunk, whose range is [-1, 1]: root mean square, and the largest,
    against the sequential loop in the same weights from the same random stream.
    """
    device = torch.device("cuda")
    policy = train.train(train_steps, 0, device, unet=UNET, learning_rate=LEARNING_RATE)
    with torch.no_grad():
        return _rows(policy, device)


def _rows(policy: train.Policy, device: torch.device) -> list[Row]:
    worlds = W.sample_worlds(OBSERVATIONS, torch.Generator().manual_seed(1))
    seen = policy.network.encoder(W.observe(worlds, worlds.start, worlds.start).to(device))

    def make(parallel: dpa.Parallel | None) -> dpa.DiffusionSampler:
        return dpa.DiffusionSampler(
            policy.network.unet,
            make_scheduler("DDPM", policy),
            100,
            DTYPE,
            horizon=W.HORIZON,
            fused=True,
            parallel=parallel,
        )

    def chunks(sampler: dpa.DiffusionSampler) -> tuple[Tensor, list[int]]:
        found, sweeps = [], []
        for i, cond in enumerate(seen.split(1)):
            found.append(sampler(cond, generator=torch.Generator(device).manual_seed(i)))
            if sampler.last_parallel is not None:
                sweeps.append(sampler.last_parallel.sweeps)
        return torch.cat(found), sweeps

    expected, table = None, []
    for tolerance in (None, *TOLERANCES):
        sampler = make(None if tolerance is None else dpa.Parallel(WINDOW, tolerance))
        found, sweeps = chunks(sampler)
        row: Row = {"weights": str(DTYPE).removeprefix("torch."), "tolerance": tolerance}
        row["window"] = None if tolerance is None else WINDOW
        times = [latency(partial(sampler, cond), REPEATS)[0] for cond in seen[:4].split(1)]
        row["us"] = statistics.median(times)
        if expected is None:
            expected = found
        else:
            error = found - expected
            row["faster"] = table[0]["us"] / row["us"]
            row["sweeps"], row["most sweeps"] = statistics.mean(sweeps), max(sweeps)
            row["rms error"] = error.square().mean().sqrt().item()
            row["largest error"] = error.abs().max().item()
        row["success"] = _success(policy, sampler, device)
        table.append(row)
    return table


def _success(policy: train.Policy, sampler: Callable[..., Tensor], device: torch.device) -> float:
    """The share of closed-loop episodes that succeed, every chunk sampled alone."""
    generator = torch.Generator().manual_seed(2)
    noise = torch.Generator(device).manual_seed(3)

    def plan(observation: Tensor) -> Tensor:
        seen = policy.network.encoder(observation.to(device))
        return torch.cat([sampler(c, generator=noise) for c in seen.split(1)]).float().cpu()

    return rollout(W.sample_worlds(EPISODES, generator), plan, generator).summary()["success"]
