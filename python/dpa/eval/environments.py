"""Gymnasium's environments, their observations under the names that LeRobot's policies take."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpa.library.checks import first_line

# What registers an environment when it is imported, by the beginning of the environment's name.
_PACKAGES = {"gym_pusht/": "gym_pusht", "gym_aloha/": "gym_aloha", "Fetch": "gymnasium_robotics"}
_SHORT = {"PushT": "gym_pusht/PushT-v0", "FetchReach": "FetchReach-v4"}
_VECTORS = {
    "agent_pos": "observation.state",
    "environment_state": "observation.environment_state",
    # The goal-conditioned environments of gymnasium-robotics; their achieved_goal is in the state.
    "observation": "observation.state",
    "desired_goal": "observation.environment_state",
}


class Environment:
    """One environment of gymnasium, which reports ``is_success``.

    Args:
        name: gymnasium's, such as ``gym_pusht/PushT-v0``, ``FetchReach-v4`` or ``module:Name-v0``;
            PushT and FetchReach will do for these two.
        pixels: whether the policy takes images.
        render: whether :meth:`frame` will be called.

    Raises:
        RuntimeError: a package is missing.
        ValueError: there is no such environment.

    """

    def __init__(self, name: str, pixels: bool = False, render: bool = False):
        module, _, name = name.rpartition(":")
        self.name = _SHORT.get(name, name)
        if render and "DISPLAY" not in os.environ:
            os.environ.setdefault("MUJOCO_GL", "egl")  # which needs no window system
        known = (p for start, p in _PACKAGES.items() if self.name.startswith(start))
        package = module or next(known, None)
        try:
            import gymnasium

            if package is not None:
                importlib.import_module(package)
        except ModuleNotFoundError as error:
            wanted = (package or "gymnasium").replace("_", "-")
            raise RuntimeError(
                f"{self.name} needs the package {error.name}: pip install {wanted}"
            ) from None
        options: dict[str, Any] = {"render_mode": "rgb_array"} if render else {}
        try:
            if "obs_type" in gymnasium.spec(self.name).kwargs:
                seen = "pixels" if pixels else "environment_state"
                options["obs_type"] = f"{seen}_agent_pos"
            self.gym = gymnasium.make(self.name, **options)
        except gymnasium.error.Error as error:
            raise ValueError(f"env: {first_line(error)}") from None
        self.max_steps: int | None = self.gym.spec.max_episode_steps
        self.frame_rate = int(self.gym.metadata.get("render_fps", 10))

    def reset(self, seed: int) -> dict[str, Tensor]:
        """Begin the episode of this seed, and return its first observation."""
        observation, _ = self.gym.reset(seed=seed)
        return lerobot_observation(observation)

    def step(self, action: np.ndarray) -> tuple[dict[str, Tensor], float, bool, bool]:
        """Act; return the observation, the reward, whether it is over and whether it succeeded."""
        observation, reward, terminated, truncated, info = self.gym.step(action)
        success = bool(info.get("is_success", False))
        return lerobot_observation(observation), float(reward), terminated or truncated, success

    def frame(self) -> np.ndarray:
        """Return a picture, (H, W, 3) in uint8."""
        try:
            return np.asarray(self.gym.render())
        except Exception as error:  # each simulator has its own
            raise RuntimeError(f"{self.name} cannot be rendered here: {error}") from error


def lerobot_observation(observation: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return an observation under LeRobot's names: float32, images (3, H, W) in [0, 1]."""
    if not isinstance(observation, Mapping):
        raise ValueError("env: its observations must be a dict of state and images or goals")
    found = {
        name: torch.as_tensor(np.asarray(observation[key]), dtype=torch.float32)
        for key, name in _VECTORS.items()
        if key in observation
    }
    pixels = observation.get("pixels", {})
    if not isinstance(pixels, Mapping):
        pixels = {"": pixels}
    for camera, image in pixels.items():
        name = f"observation.images.{camera}" if camera else "observation.image"
        found[name] = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1).float() / 255
    return found
