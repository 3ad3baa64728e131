"""Runs the policy for the pictures: one world, many samples."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from dpa.demo import draw
from dpa.demo import world as W
from dpa.demo.compare import diffusers_sample
from dpa.demo.report import MIN_SUCCESS
from dpa.demo.rollout import (
    EXECUTE,
    STEPS,
    Rollout,
    judge,
    make_plan,
    make_scheduler,
    rollout,
)
from dpa.demo.train import Policy

SHOWN = (100, 40, 20, 10, 4, 0)  # DDPM steps that are left
CLOUD = 40
CANDIDATES = 24


def stage() -> W.World:
    """The world of the pictures, typical of those that the policy is trained in."""
    points = [[[-0.9, -0.06]], [[0.9, 0.1]], [[0.0, 0.0]]]
    return W.World(*(torch.tensor(point) for point in points), torch.tensor([0.25]))


def draw_fan(path: Path, policy: Policy, device: torch.device, episodes: int, seed: int) -> None:
    """Paths of the demonstrations and of both schedulers, from the same start."""
    worlds = stage().repeat(episodes)
    generator = torch.Generator().manual_seed(seed)
    panels: list[tuple[str, Rollout]] = [
        ("Demonstrations", judge(worlds, W.demonstrate(worlds, generator)))
    ]
    for name, steps in STEPS.items():
        plan = make_plan(name, policy, device, seed)
        panels.append((f"Policy, {name} with {steps} steps", rollout(worlds, plan, generator)))
    draw.fan(path, stage(), panels)


def denoise(
    policy: Policy, name: str, observation: Tensor, device: torch.device, seed: int
) -> list[Tensor]:
    """The samples of one chunk for each observation, from the noise to the chunk, on the CPU."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (len(observation), W.HORIZON, W.ACTION_DIM)
    noise = torch.randn(shape, generator=generator, device=device)
    trace: list[Tensor] = []
    scheduler, network = make_scheduler(name, policy), policy.network
    encoded = network.encoder(observation.to(device))
    diffusers_sample(network.unet, scheduler, STEPS[name], encoded, noise, generator, trace)
    return [sample.cpu() for sample in trace]


def draw_denoising(path: Path, policy: Policy, device: torch.device, _: int, seed: int) -> None:
    """The first plan of an episode, on its way through DDPM."""
    world = stage()
    observation = W.observe(world, world.start, world.start).repeat(CLOUD, 1)
    trace = denoise(policy, "DDPM", observation, device, seed)
    chunks = [world.start + W.decode(trace[-1 - left]) for left in SHOWN]
    draw.denoising(path, world, SHOWN, chunks)


def film_episode(path: Path, policy: Policy, device: torch.device, _: int, seed: int) -> None:
    """One episode: every plan as DDIM denoises it, then the steps that are carried out."""
    world = stage()
    traces: list[list[Tensor]] = []

    def plan(observation: Tensor) -> Tensor:
        given = observation.repeat(CANDIDATES, 1)
        traces.append(denoise(policy, "DDIM", given, device, seed + len(traces)))
        return traces[-1][-1][:1]

    result = rollout(world, plan, torch.Generator().manual_seed(seed))
    travelled = result.path[0, : int(result.length[0]) + 1]
    film = draw.EpisodeFilm(world)
    carrying = f"carrying out {EXECUTE} of {W.HORIZON} steps"
    for number, trace in enumerate(traces):
        name = f"Plan {number + 1}: "
        first = number * EXECUTE
        last = min(first + EXECUTE, len(travelled) - 1)
        candidates = [travelled[first] + W.decode(sample) for sample in trace]
        for sample in candidates[:-1:2]:
            film.show_noise(name + "from noise", travelled[: first + 1], sample, 120)
        film.show_plan(name + "one of the samples", travelled[: first + 1], candidates[-1], 600)
        for step in range(first + 1, last + 1):
            film.show_plan(name + carrying, travelled[: step + 1], candidates[-1], 80)
    end = "At the goal" if result.success[0] else "Failed"
    film.show_plan(end, travelled, travelled[-1].expand(1, 1, 2), 2000)
    film.save(path)


def draw_training(path: Path, policy: Policy, *_: object) -> None:
    """The training record in the policy."""
    draw.training(path, policy.history, policy.losses, MIN_SUCCESS)


PICTURES = {
    "fan.png": draw_fan,
    "denoising.png": draw_denoising,
    "training.png": draw_training,
    "episode.gif": film_episode,
}
