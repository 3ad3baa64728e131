"""Chunks that continue the last one, of accelerated policies: real-time control.

A robot acts while the next chunk is sampled. What it executes meanwhile is decided, and the chunk
has to agree with it: the loop is held to the rest of the last chunk, by weights that fall from 1.

Source: Black et al., Real-Time Execution of Action Chunking Flow Policies (2025).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from dpa.acceleration.policy_loop import FastLoop
from dpa.acceleration.survey import owners_of, replacements
from dpa.library.checks import require
from dpa.library.holding import holding
from dpa.schedulers.inpainting import PLACES, prefix_weights
from dpa.tracking import find
from dpa.tracking.replacing import Replacement, class_of, replace_method, replaced

_IMAGES = "observation.images"  # LeRobot's name for all cameras, stacked
_OBSERVED = ("observation.state", "observation.environment_state")


@contextmanager
def continuing(
    policy: Any,
    chunk: Tensor,
    weights: Tensor | None = None,
    *,
    inpainting: str = "x0",
    first_step: int = 0,
) -> Iterator[None]:
    """Let an accelerated policy's calls in this thread continue a chunk, inside a ``with``.

    The loop's own method then runs as :class:`dpa.DiffusionSampler` is called with these. A call
    that has to run as the original does cannot: it warns, or raises where
    :func:`dpa.accelerate` was given ``fallback=False``.

    Args:
        policy: accelerated, with a loop that is.
        chunk: (B, T, Da), what is wanted of the next chunk, in the loop's own units (normalised)
            and at its places in time: shifted by the actions that were executed.
        weights: (B, T, Da) or a shape that expands to it, from 0 to 1, or bool: how much of the
            chunk holds where. None holds nothing.
        inpainting: where it holds, "x0" or "sample".
        first_step: the step of the loop to begin at, from the chunk with that step's noise; 0
            begins with noise alone.

    Raises:
        TypeError: the policy has no accelerated loop.
        ValueError: another ``inpainting``, or a negative step; in a call, a chunk of another shape
            than the loop's or a step that it does not have.

    """
    rule, way = f"be one of {', '.join(PLACES)}", repr(inpainting)
    require(inpainting in PLACES, "continuing: inpainting", rule, way)
    require(first_step >= 0, "continuing: first_step", "be at least 0", first_step)
    found = [fast for _, owner in owners_of(policy) for fast in replacements(owner).values()]
    loops = [fast for fast in found if isinstance(fast, FastLoop)]
    kind = type(policy).__name__
    require(loops, "continuing: policy", "have an accelerated loop", kind, TypeError)
    held: dict[str, Any] = {}
    if weights is not None:
        mask = weights.expand(chunk.shape)
        held |= {"condition_data": chunk, "condition_mask": mask, "inpainting": inpainting}
    if first_step:
        held |= {"last_chunk": chunk, "first_step": first_step}
    with ExitStack() as stack:
        for loop in dict.fromkeys(loops):
            stack.enter_context(holding(loop.thread, held=held))
        yield


class ChunkInTime(Replacement):
    """Replaces ``predict_action_chunk`` of LeRobot's diffusion policy, which has no real-time form.

    It takes what LeRobot's real-time chunking asks of policies. An observation without a dimension
    of time, where no queue holds others, stands for all ``n_obs_steps``: LeRobot's server of
    policies sends such. Other calls run the policy's own method.
    """

    METHOD, OWNER, KEPT = "predict_action_chunk", "policy", ("policy",)
    __signature__ = None  # its own: it takes more than the method
    policy: Any

    def __call__(
        self,
        batch: dict[str, Tensor],
        noise: Tensor | None = None,
        *,
        inference_delay: int | None = None,
        prev_chunk_left_over: Tensor | None = None,
        execution_horizon: int | None = None,
    ) -> Tensor:
        """Predict a chunk that continues what is left over of the previous one.

        Args:
            batch: the observation.
            noise: to start from.
            inference_delay: how many actions are executed before the chunk is there.
            prev_chunk_left_over: (T', Da) or (B, T', Da), normalised, from the next action on. Rows
                of zeros at its end are padding.
            execution_horizon: how many of them have a say; by default the configuration's, or all.

        """
        in_time = inference_delay is not None or prev_chunk_left_over is not None
        if not in_time and not self._lacks_time(batch):
            return self.original(batch, noise=noise)
        with torch.no_grad():
            observed = _observed(self.policy.config, batch)
            generate = self.policy.diffusion.generate_actions
            if prev_chunk_left_over is None:
                return generate(observed, noise=noise)
            size = len(observed[_OBSERVED[0]])
            chunk, weights = self._wanted(
                prev_chunk_left_over, size, inference_delay or 0, execution_horizon
            )
            with continuing(self.policy, chunk, weights):
                return generate(observed, noise=noise)

    def _lacks_time(self, batch: dict[str, Tensor]) -> bool:
        state = batch.get(_OBSERVED[0])
        return state is not None and state.dim() == 2 and not any(self.policy._queues.values())

    def _wanted(
        self, left: Tensor, batch: int, delay: int, horizon: int | None
    ) -> tuple[Tensor, Tensor]:
        """Return what is wanted of the next chunk, and by what weights."""
        given = left.shape
        config = self.policy.config
        rtc = getattr(config, "rtc_config", None)
        first = config.n_obs_steps - 1  # of the actions that are executed
        left = left if left.dim() == 3 else left[None]
        width, name = config.action_feature.shape[0], "prev_chunk_left_over"
        right = left.dim() == 3 and left.shape[0] in (1, batch) and left.shape[2] == width
        rule = f"be (T', {width}) or ({batch}, T', {width})"
        require(right, f"predict_action_chunk: {name}", rule, tuple(given))
        rows = left.abs().amax((0, 2)).nonzero()
        length = min(int(rows[-1]) + 1 if len(rows) else 0, config.horizon - first)
        if horizon is None:
            horizon = length if rtc is None else rtc.execution_horizon
        schedule = "linear" if rtc is None else rtc.prefix_attention_schedule.value.lower()
        chunk = left.new_zeros(batch, config.horizon, left.shape[2])
        chunk[:, first : first + length] = left[:, :length]
        weights = left.new_zeros(config.horizon)
        held = prefix_weights(delay, min(horizon, length), length, schedule)
        weights[first : first + length] = held.to(weights)
        return chunk, weights[None, :, None]


class YesInTime(Replacement):
    """Replaces ``supports_rtc``, which LeRobot asks before it calls a policy in real time."""

    METHOD, OWNER, KEPT = "supports_rtc", "policy", ("policy",)
    policy: Any

    def __call__(self) -> bool:
        """Say so."""
        return True


def add_real_time(policy: Any) -> None:
    """Give LeRobot's diffusion policy what real-time chunking asks, where its loop runs fast."""
    inner = find(policy, "diffusion")
    if inner is None or not isinstance(replaced(inner, "conditional_sample"), FastLoop):
        return
    kind, frames = class_of(policy), find(policy, "config.n_obs_steps")
    acts = hasattr(kind, "select_action") and hasattr(kind, ChunkInTime.METHOD)
    if not acts or frames is None or not hasattr(inner, "generate_actions"):
        return
    replace_method(policy, ChunkInTime.METHOD, ChunkInTime(policy))
    if hasattr(kind, YesInTime.METHOD):
        replace_method(policy, YesInTime.METHOD, YesInTime(policy))


def _observed(config: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return an observation as the policy's model takes it: with time, cameras stacked."""

    def over_time(value: Tensor, rank: int) -> Tensor:
        if value.dim() == rank:
            return value
        return value.unsqueeze(1).expand(-1, config.n_obs_steps, *value.shape[1:])

    found = {name: over_time(batch[name], 3) for name in _OBSERVED if name in batch}
    if cameras := config.image_features:
        found[_IMAGES] = torch.stack([over_time(batch[name], 5) for name in cameras], dim=2)
    return found
