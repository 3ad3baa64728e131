"""What an accelerated loop runs by: a sampler for one state of a policy, and a call of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpa.acceleration.any_network import AnyNetwork
from dpa.acceleration.loops import Loop, LoopCall
from dpa.acceleration.scheduler_step import METHODS, OF_A_LOOP, check_methods
from dpa.acceleration.unet_forward import FastForward
from dpa.nn.family import Network, is_of_family
from dpa.sampling.arguments import check_way
from dpa.sampling.each_action import EachActionSampler
from dpa.sampling.rng import draw_normal
from dpa.sampling.sampler import DiffusionSampler
from dpa.schedulers.conversion import check_kind
from dpa.schedulers.each_action import EachActionTable
from dpa.tracking import OwnMode, Snapshot, find

Sampler = DiffusionSampler | EachActionSampler
NAMED = ("global_cond", "local_cond")  # what the sampler takes under these names
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
            check_methods(scheduler)
        sampler = _sampler(forward, loop, policy, dict(options))
    except (AttributeError, TypeError, ValueError) as error:
        sampler = str(error)
    timesteps = None if scheduler is None else scheduler.timesteps
    state = forward.generation, tuple(snapshots), kind
    return Route(forward, network, *state, sampler, scheduler, timesteps)


def _sampler(
    forward: FastForward | AnyNetwork, loop: Loop, policy: Any, options: dict[str, Any]
) -> Sampler:
    """Return a sampler that does what a loop does, or raise what says why there is none."""
    precision = forward.precision()
    horizon, action_dim = options.pop("horizon", None), options.pop("action_dim", None)
    nested = options.pop("nested", False)
    table = loop.table_of(policy, options)
    packed, unet, each = None, forward.unet, isinstance(table, EachActionTable)
    dtype = None
    if isinstance(forward, FastForward) and forward.network.variant.each_action == each:
        packed = forward.packed(forward.packed_dtype(precision))
        unet = forward.layers if packed is None else unet
        if unet is None:
            raise ValueError("the network cannot be run layer by layer")
        action_dim = action_dim or forward.network.arguments["input_dim"]
    elif nested:
        unet = _Nested(unet)
    if packed is None and forward.weight.is_cuda and not is_of_family(unet):  # steps are captured
        dtype = forward.packed_dtype(precision)
        dtype = None if dtype == precision else dtype
    if each:
        return EachActionSampler(unet, table, packed=packed, noise_dtype=precision)
    sampler = DiffusionSampler(
        unet,
        table,
        dtype=dtype if packed is None else packed.dtype,
        horizon=horizon,
        action_dim=action_dim,
        fused=packed is not None,
        noise_dtype=precision,
        weights=forward.options.weights,
    )
    if packed is not None:
        sampler.packed = packed  # one copy of the weights for every sampler
    return sampler


class NoiseDtypes(OwnMode):
    """The dtypes of the random tensors that were made while it was last entered."""

    def __enter__(self) -> NoiseDtypes:
        """Note it from here on."""
        self._noted: list[tuple[int, torch.dtype]] = []  # with numbers of elements
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note what an op that takes random numbers returns."""
        result = func(*args, **kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags and isinstance(result, Tensor):
            self._noted.append((result.numel(), result.dtype))
        return result

    def of_steps(self, starts: bool) -> torch.dtype | None:
        """Return the dtype of the noise of a loop's steps; None where they have none.

        Raises ValueError where they have several.

        Args:
            starts: whether the loop samples its start, before.

        """
        alike = [dtype for size, dtype in self._noted if size == self._noted[-1][0]]
        dtypes = set(alike[1:] if starts else alike)
        if len(dtypes) > 1:
            raise ValueError("its steps have noise in several dtypes")
        return next(iter(dtypes), None)


def translate(forward: FastForward, call: LoopCall) -> None:
    """Bring what a network of the family is called with into the original's arguments."""
    variant, given = forward.network.variant, dict(call.conditions)
    kept = {"timestep": given.pop("timestep")} if "timestep" in given else {}
    given = {variant.inputs[name]: value for name, value in given.items()}
    if variant.condition is not None:
        given["global_cond"] = variant.condition(forward.unet, given)
    call.conditions = {n: given[n] for n in NAMED if given.get(n) is not None} | kept


def is_nested(call: LoopCall) -> bool:
    """Whether the network takes conditions in dictionaries, or a sequence as ``global_cond``.

    Of a sampler's condition of that name every sample has a vector.
    """
    cond = call.conditions.get("global_cond")
    sequence = isinstance(cond, Tensor) and cond.dim() > 2
    return sequence or any(isinstance(value, Mapping) for value in call.conditions.values())


def refusal(sampler: Sampler, call: LoopCall, held: Mapping[str, Any]) -> str | None:
    """Return why a call cannot continue a chunk by these fields, or None."""
    if call.finish is not None or call.init_noise_sigma != 1.0:
        return "its loop starts otherwise"
    if call.condition_mask is not None and bool(call.condition_mask.any()):
        return "it has inpainting of its own"
    if not isinstance(sampler, DiffusionSampler):
        return "its actions have a timestep each"
    table, first = sampler.table, held.get("first_step", 0)
    given = {name: held.get(name) for name in ("last_chunk", "condition_mask")}
    try:
        check_way(given, held.get("inpainting", "sample"), first, table, None)
        if 0 < first < len(table):  # the sampler says that there is no such step
            table.after(first)
    except ValueError as error:
        return str(error)
    return None


def sample_of(sampler: Sampler, call: LoopCall, dtype: torch.dtype) -> Tensor:
    """Sample as a policy does whose parameters have that dtype: it starts and ends in it."""
    given = {"": call.conditions} if isinstance(sampler.unet, _Nested) else call.conditions
    conditions = {name: x for name, x in _flat(given).items() if x is not None}
    named = {name: conditions.pop(name) for name in NAMED if name in conditions}
    batch, noise, scale = call.shape[0], call.noise, call.init_noise_sigma
    if noise is None and (sampler.noise_dtype != dtype or scale != 1.0):
        shape = (batch, sampler.horizon, sampler.action_dim)
        shape = shape if call.condition_data is None else tuple(call.condition_data.shape)
        device = next(sampler.unet.parameters()).device
        noise = draw_normal(shape, call.generator, device, dtype)
        noise = noise if scale == 1.0 else noise * scale
    continued = {}
    if isinstance(sampler, DiffusionSampler):
        continued = {n: getattr(call, n) for n in ("inpainting", "last_chunk", "first_step")}
    return sampler(
        **named,
        **continued,
        condition_data=call.condition_data,
        condition_mask=call.condition_mask,
        noise=noise,
        generator=call.generator,
        batch_size=batch,
        conditions=conditions,
    ).to(dtype)


def _flat(conditions: Mapping[str, Any], begin: str = "") -> dict[str, Any]:
    """Return what nested dictionaries hold, by the names on the way to it."""
    flat: dict[str, Any] = {}
    for name, value in conditions.items():
        path = f"{begin}{name}"
        flat |= _flat(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
    return flat


class _Nested(nn.Module):
    """A network called with what nested dictionaries of its conditions hold."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network
        self.training = False  # a loop asks the network for its mode before it comes here

    def forward(self, sample: Tensor, timestep: Tensor, **conditions: Tensor) -> Tensor:
        """Predict; the name of a condition is the way to it."""
        nested: dict[str, Any] = {}
        for path, value in conditions.items():
            *way, name = path.split(".")
            inner = nested
            for part in way:
                inner = inner.setdefault(part, {})
            inner[name] = value
        return self.network(sample, timestep, **nested.get("", {}))
