"""The evaluation from end to end: load, run, compare, film."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import TimeRemainingColumn

from dpa.acceleration.api import accelerate, explain
from dpa.eval.environments import Environment
from dpa.eval.episodes import Episode, largest_difference, run_episode, summary
from dpa.eval.policies import LeRobotPolicy
from dpa.eval.video import check_video, save_video
from dpa.library.devices import choose_device
from dpa.library.progress import progress

FILMED = 5  # episodes of the video


@dataclass(frozen=True)
class Options:
    """The options of ``dpa eval``; its ``--help`` explains each."""

    checkpoint: Path
    env: str
    episodes: int = 20
    seed: int = 0
    kinds: tuple[str, ...] = ("accelerated",)
    dtype: torch.dtype | None = None
    mode: str = "loop"
    steps: int | None = None
    max_steps: int | None = None
    device: str = "auto"
    video: Path | None = None


def evaluate(options: Options, console: Console) -> dict[str, Any]:
    """Run every kind through the same episodes; return the results, ready for JSON."""
    if options.video is not None:
        check_video(options.video)
    policy = LeRobotPolicy(options.checkpoint, choose_device(options.device), options.steps)
    pixels = any(name.startswith("observation.image") for name in policy.inputs)
    environment = Environment(options.env, pixels, render=options.video is not None)
    done = {}
    for kind in options.kinds:
        if kind == "accelerated":
            accelerate(policy.policy, options.dtype, options.mode)
        filmed = FILMED if options.video is not None and kind == options.kinds[-1] else 0
        done[kind] = _run(kind, environment, policy, options, filmed, console)
    results: dict[str, Any] = {
        "checkpoint": str(options.checkpoint),
        "env": environment.name,
        "device": str(policy.device),
        "episodes": options.episodes,
        "seed": options.seed,
        "runs": {kind: summary(episodes) for kind, episodes in done.items()},
        "acceleration": explain(policy.policy).to_dict(),
    }
    if len(done) == 2:
        first, second = done.values()
        results["same_outcomes"] = [e.success for e in first] == [e.success for e in second]
        results["largest_action_difference"] = largest_difference(first, second)
    if options.video is not None:
        frames = [frame for episode in done[options.kinds[-1]] for frame in episode.frames]
        save_video(options.video, frames, environment.frame_rate)
        results["video"] = str(options.video)
    return results


def _run(
    kind: str,
    environment: Environment,
    policy: LeRobotPolicy,
    options: Options,
    filmed: int,
    console: Console,
) -> list[Episode]:
    episodes: list[Episode] = []
    with progress(console, 12, TimeRemainingColumn(), "{task.fields[state]}") as bar:
        task = bar.add_task(kind, total=options.episodes, state="")
        for number in range(options.episodes):
            film, seed = number < filmed, options.seed + number
            episodes.append(run_episode(environment, policy, seed, options.max_steps, film))
            successes = sum(episode.success for episode in episodes)
            bar.update(task, advance=1, state=f"{successes} of {len(episodes)} succeeded")
    return episodes
