"""What an accelerated loop runs by: a sampler for one state of a policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dpa.acceleration.any_network import AnyNetwork
from dpa.acceleration.loop_samplers import Sampler, make_sampler
from dpa.acceleration.loops import Loop
from dpa.acceleration.scheduler_step import METHODS, OF_A_LOOP, why_replaced
from dpa.acceleration.unet_forward import FastForward
from dpa.nn.family import Network
from dpa.schedulers.conversion import check_kind
from dpa.tracking import Snapshot, find

_NO_SETTINGS = frozenset({"_parameters", "_buffers", "training"})


@dataclass(eq=False)
class Route:
    """A sampler for one state of a policy, or why there is none, and how to tell that state."""

    forward: FastForward | AnyNetwork
    network: Network | AnyNetwork
    generation: int
    snapshots: tuple[Snapshot, ...]
    kind: Any
    sampler: Sampler | str
    scheduler: Any
    timesteps: Tensor | None


def make_route(
    policy: Any, loop: Loop, forward: FastForward | AnyNetwork, kind: Any, options: dict[str, Any]
) -> Route:
    """Make a sampler that does what the loop does; ValueError where the network cannot be run."""
    network = forward.prepare()
    if network is None:
        raise ValueError(forward.refused)
    scheduler = loop.scheduler_of(policy)
    held = [find(policy, place) for place in loop.holders]
    others = [one for one in held if hasattr(one, "__dict__")]
    settings = find(policy, loop.scheduler)
    but, inside = _NO_SETTINGS.union(loop.changing), forward.unet.modules()
    # Where a loop's arguments are not known its adapter reads modules and tensors in every call.
    whole = loop.knows is not None
    reads = {"apart": (settings, *inside), "tensors": whole, "modules": whole}
    if loop.table is not None:  # it may be made of the policy's own tensors
        reads["values"] = forward.options.weights
    snapshots = [Snapshot(policy, *others, but=but, methods=(loop.method,), **reads)]
    if hasattr(settings, "__dict__"):
        # Where the loop sets no timesteps, those that are there are a setting.
        but = OF_A_LOOP - {"timesteps"} if loop.steps is None else OF_A_LOOP
        snapshots.append(Snapshot(settings, but=but, methods=METHODS))
    sampler: Sampler | str
    try:
        if scheduler is not None:
            check_kind(scheduler)  # others may change in ways that no attribute shows
            if (why := why_replaced(scheduler)) is not None:
                raise ValueError(why)
        sampler = make_sampler(forward, loop, policy, dict(options))
    except (AttributeError, TypeError, ValueError) as error:
        sampler = str(error)
    timesteps = None if scheduler is None else scheduler.timesteps
    state = forward.generation, tuple(snapshots), kind
    return Route(forward, network, *state, sampler, scheduler, timesteps)
