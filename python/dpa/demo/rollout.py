"""Closed-loop episodes with receding-horizon execution, all of them in one batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from diffusers import DDIMScheduler, DDPMScheduler
from torch import Tensor

from dpa import DiffusionSampler
from dpa.demo import world as W
from dpa.demo.train import Policy
from dpa.packed.config import runs_packed

EXECUTE = 8  # steps of a chunk that are carried out before the next one is planned
STEPS = {"DDPM": 100, "DDIM": 16}

Plan = Callable[[Tensor], Tensor]  # observations (N, D) -> chunks (N, HORIZON, 2), both on the CPU


@dataclass
class Rollout:
    """What happened in B episodes.

    path: (B, T + 1, 2), where an agent that is done stays put; length: (B,) steps taken;
    success: (B,) bool; side: (B,) LEFT, RIGHT or NEITHER (it never got past the obstacle);
    plans: an entry a replanning step, the episodes that were live and their chunks as positions.
    """

    world: W.World
    path: Tensor
    length: Tensor
    success: Tensor
    side: Tensor
    plans: list[tuple[Tensor, Tensor]]

    def summary(self) -> dict:
        """Shares of all episodes, in [0, 1], and the mean length of the successful ones."""
        steps = self.length[self.success].float().mean().item() if self.success.any() else None
        return {
            "success": self.success.float().mean().item(),
            "left": (self.side == W.LEFT).float().mean().item(),
            "right": (self.side == W.RIGHT).float().mean().item(),
            "mean_steps": steps,
        }


def rollout(
    world: W.World,
    plan: Plan,
    generator: torch.Generator,
    progress: Callable[[int, int], None] | None = None,
) -> Rollout:
    """Run every episode to its goal, its collision or the step limit.

    Each replanning step samples one chunk for every live episode, in one batch. ``progress`` is
    called with the step of every replanning and the number of live episodes.
    """
    position, previous = world.start, world.start
    live = torch.ones(len(world), dtype=torch.bool)
    path, plans = [position], []
    targets = position[:, None].repeat(1, W.HORIZON, 1)
    for number in range(W.STEP_LIMIT):
        if not live.any():
            break
        if number % EXECUTE == 0:
            index = live.nonzero()[:, 0]
            if progress:
                progress(number, len(index))
            chunk = plan(W.observe(world[index], position[index], previous[index]))
            targets[index] = position[index, None] + W.decode(chunk)
            plans.append((index, targets[index]))
        moved = W.step(position, targets[:, number % EXECUTE], generator)
        previous, position = position, torch.where(live[:, None], moved, position)
        path.append(position)
        live &= ~W.collides(world, previous, position) & ~W.arrived(world, position)
    return judge(world, torch.stack(path, 1), plans)


def judge(world: W.World, path: Tensor, plans: Sequence[tuple[Tensor, Tensor]] = ()) -> Rollout:
    """Judge paths (B, T + 1, 2): an episode ends at the goal or at the disc."""
    count, steps = len(world), path.shape[1] - 1
    every = world.repeat(steps)
    before, after = path[:, :-1].reshape(-1, 2), path[:, 1:].reshape(-1, 2)
    hit = W.collides(every, before, after).reshape(count, steps)
    there = W.arrived(every, after).reshape(count, steps)
    crossing = W.crossing_side(every, before, after).reshape(count, steps)
    over = hit | there
    length = torch.where(over.any(1), over.int().argmax(1) + 1, steps)
    within = torch.arange(steps) < length[:, None]
    success = (there & within).any(1) & ~(hit & within).any(1)
    side = (crossing * (within & ~hit)).sum(1).sign()
    return Rollout(world, path, length, success, side, list(plans))


def make_scheduler(name: str, policy: Policy) -> DDPMScheduler | DDIMScheduler:
    """A live diffusers scheduler, as the policy was trained with."""
    kind = {"DDPM": DDPMScheduler, "DDIM": DDIMScheduler}[name]
    return kind(**policy.scheduler_config)


def make_sampler(name: str, policy: Policy, dtype: torch.dtype | None = None) -> DiffusionSampler:
    """dpa's sampler on the policy's current weights."""
    scheduler = make_scheduler(name, policy)
    unet = policy.network.unet
    fused = runs_packed(next(unet.parameters()).device)  # the whole loop as one op
    if dtype is torch.float64:  # its kernels do not support float64
        unet, fused = copy.deepcopy(unet).double(), False
    return DiffusionSampler(unet, scheduler, STEPS[name], dtype, horizon=W.HORIZON, fused=fused)


def make_plan(
    name: str,
    policy: Policy,
    device: torch.device,
    seed: int,
    dtype: torch.dtype | None = None,
) -> Plan:
    """Chunks sampled by dpa, with the usual number of steps and a random stream of their own."""
    generator = torch.Generator(device).manual_seed(seed)
    sampler = make_sampler(name, policy, dtype)

    def plan(observation: Tensor) -> Tensor:
        encoded = policy.network.encoder(observation.to(device))
        return sampler(encoded, generator=generator).float().cpu()

    return plan
