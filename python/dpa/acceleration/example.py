"""Calls of a policy before its control loop, so that the loop pays for no comparison or capture."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# A call that is compared with the original, one that is captured and compared, one that replays.
CALLS = 3
# What policies act by: LeRobot's; diffusion_policy's; robomimic's and ManiSkill's.
ACTS = ("select_action", "predict_action", "get_action")


def why_no_example(model: Any) -> str | None:
    """Why a model cannot be called on an example, or None where it can."""
    if not any(hasattr(model, method) for method in ACTS):
        *methods, last = ACTS
        return f"a model with {', '.join(methods)} or {last}, got a {type(model).__name__}"
    if isinstance(model, nn.Module) and model.training:
        return "a policy in evaluation mode: call policy.eval() first"
    return None


def call_on(policy: Any, observation: Any) -> None:
    """Call a policy as its control loop will; its queues are empty then, random numbers as before.

    A policy with ``reset`` answers from a queue between its predictions, so it is reset each time.
    """
    method = next(getattr(policy, name) for name in ACTS if hasattr(policy, name))
    reset = getattr(policy, "reset", lambda: None)
    with torch.random.fork_rng(), torch.no_grad():
        for _ in range(CALLS):
            reset()
            method(dict(observation) if isinstance(observation, dict) else observation)
        reset()
