"""A planar world with two right answers: reach the goal past a disc, on the left or on the right.

Everything is batched: a ``World`` holds B start, goal and obstacle triples, and an agent's position
is a ``(B, 2)`` tensor. The agent sees the world from where it stands (goal and obstacle relative to
itself), and an action is its next position, relative to where it stood when the chunk was planned.
A chunk of ``HORIZON`` steps at ``SPEED`` stays within one unit, so that actions lie in [-1, 1], the
range to which the diffusion schedulers clip, without a normaliser.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

HORIZON = 16  # next positions in a chunk
SPEED = 0.058  # what a demonstration travels in a step
MAX_STEP = 0.09  # the limit of what the agent travels in a step
DISTURBANCE = 0.004  # standard deviation of the push that every step suffers
GOAL_RADIUS = 0.06
STEP_LIMIT = 64
OBSERVATION_DIM = 7
ACTION_DIM = 2
LEFT, RIGHT, NEITHER = 1, -1, 0


@dataclass
class World:
    """B worlds. start, goal, centre: (B, 2); radius: (B,)."""

    start: Tensor
    goal: Tensor
    centre: Tensor
    radius: Tensor

    def __len__(self) -> int:
        return len(self.radius)

    def __getitem__(self, index) -> World:
        return World(self.start[index], self.goal[index], self.centre[index], self.radius[index])

    def repeat(self, count: int) -> World:
        """The same worlds, each ``count`` times in a row."""
        fields = (self.start, self.goal, self.centre, self.radius)
        return World(*(field.repeat_interleave(count, 0) for field in fields))


def sample_worlds(count: int, generator: torch.Generator) -> World:
    """Worlds with the start on the left, the goal on the right and the obstacle between them."""

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, generator=generator)

    start = torch.stack([uniform(-0.95, -0.85), uniform(-0.2, 0.2)], -1)
    goal = torch.stack([uniform(0.85, 0.95), uniform(-0.2, 0.2)], -1)
    centre = torch.stack([uniform(-0.15, 0.15), uniform(-0.15, 0.15)], -1)
    return World(start, goal, centre, uniform(0.18, 0.28))


def observe(world: World, position: Tensor, previous: Tensor) -> Tensor:
    """(B, OBSERVATION_DIM): velocity, goal and obstacle as the agent sees them, and the radius.

    Each is scaled to a spread of about one: a network does not see what hardly varies.
    """
    velocity = (position - previous) / SPEED
    goal = (world.goal - position) * torch.tensor([2.0, 4.0])
    centre = (world.centre - position) * torch.tensor([2.0, 4.0])
    radius = (world.radius[:, None] - 0.23) * 30.0
    return torch.cat([velocity, goal, centre, radius], -1)


def encode(chunk: Tensor) -> Tensor:
    """Next positions relative to the agent, as actions; few leave [-1, 1]."""
    return (chunk - torch.tensor([0.46, 0.0])) * torch.tensor([2.0, 1.5])


def decode(action: Tensor) -> Tensor:
    """The inverse of ``encode``."""
    return action / torch.tensor([2.0, 1.5]) + torch.tensor([0.46, 0.0])


def step(position: Tensor, target: Tensor, generator: torch.Generator) -> Tensor:
    """The agent's next position: towards the target, as far as it can, and a small random push."""
    move = target - position
    length = move.norm(dim=-1, keepdim=True).clamp_min(1e-9)
    push = DISTURBANCE * torch.randn(position.shape, generator=generator)
    return position + move * (MAX_STEP / length).clamp_max(1.0) + push


def collides(world: World, before: Tensor, after: Tensor) -> Tensor:
    """(B,) bool: the straight move from ``before`` to ``after`` touches the obstacle."""
    move = after - before
    along = ((world.centre - before) * move).sum(-1) / move.square().sum(-1).clamp_min(1e-12)
    nearest = before + along.clamp(0.0, 1.0)[:, None] * move
    return (nearest - world.centre).norm(dim=-1) <= world.radius


def arrived(world: World, position: Tensor) -> Tensor:
    """(B,) bool: the agent stands at the goal."""
    return (position - world.goal).norm(dim=-1) <= GOAL_RADIUS


def crossing_side(world: World, before: Tensor, after: Tensor) -> Tensor:
    """(B,) LEFT or RIGHT where this move passes level with the obstacle's centre, else NEITHER.

    Left and right are as seen from the start in the direction of the goal.
    """
    axis = world.goal - world.start
    ahead = ((before - world.centre) * axis).sum(-1) < 0
    passed = ((after - world.centre) * axis).sum(-1) >= 0
    side = torch.where(cross(axis, after - world.centre) > 0, LEFT, RIGHT)
    return torch.where(ahead & passed, side, NEITHER)


def cross(a: Tensor, b: Tensor) -> Tensor:
    """The z component of the cross product: positive where b points to the left of a."""
    return a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]


def demonstrate(world: World, generator: torch.Generator) -> Tensor:
    """(B, STEP_LIMIT + 1, 2): the paths of an expert who tosses a fair coin for the side."""
    coin = torch.rand(len(world), generator=generator) < 0.5
    side = torch.where(coin, LEFT, RIGHT)
    return _follow_expert(world, side, torch.zeros_like(world.start), generator)


def demonstrate_recovery(world: World, generator: torch.Generator) -> tuple[World, Tensor]:
    """Demonstrations that start off the beaten path, at a walk: the worlds so changed and paths.

    They show how to recover. A policy trained on good paths alone cannot return to them after its
    own small errors. The expert takes the side to which it is heading.
    """
    count = len(world)
    reach = world.radius + 0.05 + 0.6 * torch.rand(count, generator=generator)
    bearing = math.pi * (0.5 + torch.rand(count, generator=generator))
    heading = bearing + math.pi * (0.5 + torch.rand(count, generator=generator))
    offset = reach[:, None] * torch.stack([bearing.cos(), bearing.sin()], -1)
    velocity = SPEED * torch.stack([heading.cos(), heading.sin()], -1)
    side = torch.where(cross(velocity, offset) > 0, LEFT, RIGHT)
    world = World(world.centre + offset, world.goal, world.centre, world.radius)
    return world, _follow_expert(world, side, velocity, generator)


def _follow_expert(
    world: World, side: Tensor, velocity: Tensor, generator: torch.Generator
) -> Tensor:
    """The expert keeps a margin of its own choice from the obstacle, walks like a taut string
    around it, takes corners with some inertia, corrects every push, and waits at the goal.
    """
    clearance = world.radius + 0.12 + 0.1 * torch.rand(len(world), generator=generator)
    position, path = world.start, [world.start]
    for _ in range(STEP_LIMIT):
        velocity = 0.5 * velocity + 0.5 * _expert_velocity(world, position, side, clearance)
        position = step(position, position + velocity, generator)
        path.append(position)
    return torch.stack(path, 1)


def _expert_velocity(world: World, position: Tensor, side: Tensor, clearance: Tensor) -> Tensor:
    """Straight to the goal where the way is free, else along the tangent on the chosen side."""
    to_goal, to_centre = world.goal - position, world.centre - position
    distance = to_centre.norm(dim=-1)
    # Inside the clearance the tangent does not exist: turn beyond 90 degrees, which leads out.
    inside = (1.0 - distance / clearance).clamp_min(0.0)
    tangent = torch.asin((clearance / distance).clamp_max(1.0)) + math.pi * inside
    dot = (to_centre * to_goal).sum(-1)
    goal_angle = side * torch.atan2(cross(to_centre, to_goal), dot)
    free = (dot <= 0) | (goal_angle >= tangent)

    turn = side * tangent
    cos, sin = torch.cos(turn), torch.sin(turn)
    x, y = (to_centre / distance[:, None]).unbind(-1)
    around = SPEED * torch.stack([cos * x - sin * y, sin * x + cos * y], -1)
    length = to_goal.norm(dim=-1, keepdim=True).clamp_min(1e-9)
    straight = to_goal * (SPEED / length).clamp_max(1.0)
    return torch.where(free[:, None], straight, around)


def windows(world: World, paths: Tensor) -> tuple[Tensor, Tensor]:
    """Training pairs from demonstrations: observations (N, D) and action chunks (N, HORIZON, 2).

    One pair for every step of every path, up to the step at which the expert arrives.
    """
    future = paths.unfold(1, HORIZON + 1, 1).transpose(2, 3)
    now, chunk = future[:, :, 0], future[:, :, 1:] - future[:, :, :1]
    before = torch.cat([paths[:, :1], paths[:, : now.shape[1] - 1]], 1)
    length = now.shape[1]
    every = world.repeat(length)
    flat = now.reshape(-1, 2)
    observation = observe(every, flat, before.reshape(-1, 2))
    travelling = ~arrived(every, flat)
    return observation[travelling], encode(chunk.reshape(-1, HORIZON, 2)[travelling])
