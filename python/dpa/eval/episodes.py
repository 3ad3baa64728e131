"""Closed-loop episodes: what was done, whether it succeeded, and how long each plan took."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dpa.eval.environments import Environment
from dpa.eval.policies import LeRobotPolicy

PERCENTILES = (50, 90, 99)


@dataclass
class Episode:
    """One episode.

    Attributes:
        seed: of the environment and of the policy's random numbers.
        success: the environment's flag at the last step.
        reward: the sum.
        actions: (steps, action dimension), as the environment received them.
        plan_seconds: of each call that sampled a chunk of actions, from observation to action.
        frames: pictures (H, W, 3), where the episode is filmed.

    """

    seed: int
    success: bool = False
    reward: float = 0.0
    actions: np.ndarray = field(default_factory=lambda: np.empty((0, 0)))
    plan_seconds: list[float] = field(default_factory=list)
    frames: list[np.ndarray] = field(default_factory=list)


def run_episode(
    environment: Environment,
    policy: LeRobotPolicy,
    seed: int,
    max_steps: int | None = None,
    film: bool = False,
) -> Episode:
    """Run one episode to its end, or for ``max_steps``. The same seed gives the same episode."""
    limit = max_steps or environment.max_steps
    if limit is None:
        raise ValueError(f"max_steps must be given: {environment.name} has no limit of its own")
    episode, actions = Episode(seed), []
    torch.manual_seed(seed)
    observation = environment.reset(seed)
    policy.check(observation, environment.name)
    policy.reset()
    for _ in range(limit):
        if film:
            episode.frames.append(environment.frame())
        planned, started = policy.plans_next(), time.perf_counter()
        action = policy.act(observation)
        if planned:
            episode.plan_seconds.append(time.perf_counter() - started)
        actions.append(action)
        observation, reward, over, episode.success = environment.step(action)
        episode.reward += reward
        if over:
            break
    if film:
        episode.frames.append(environment.frame())
    episode.actions = np.stack(actions)
    return episode


def summary(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Return the success rate, and the latency of the plans in milliseconds.

    The first plan, which warms up and compares, is reported apart from the others.
    """
    plans = [1e3 * seconds for episode in episodes for seconds in episode.plan_seconds]
    rest = plans[1:] or plans
    return {
        "success": float(np.mean([episode.success for episode in episodes])),
        "successes": [episode.seed for episode in episodes if episode.success],
        "reward": float(np.mean([episode.reward for episode in episodes])),
        "steps": sum(len(episode.actions) for episode in episodes),
        "plans": len(plans),
        "first_plan_ms": plans[0],
        "plan_ms": {f"p{p}": float(np.percentile(rest, p)) for p in PERCENTILES},
    }


def largest_difference(first: Sequence[Episode], second: Sequence[Episode]) -> float:
    """Return how far the actions of two runs of the same seeds are apart, in the action's units."""
    pairs = [(a.actions, b.actions) for a, b in zip(first, second, strict=True)]
    if any(a.shape != b.shape for a, b in pairs):
        return float("inf")  # one of them ended earlier
    return max(float(np.abs(a - b).max()) for a, b in pairs)
