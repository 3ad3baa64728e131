"""What a call of the sampler is given: checked against the network and against one another."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpa.library.checks import require
from dpa.sampling.rng import RandomNumbers
from dpa.schedulers.inpainting import PLACES
from dpa.schedulers.tables import Generators, Steps

Given = Mapping[str, Tensor | None]
Inputs = dict[str, Tensor]  # what a loop takes of them
# The tensors that a call may be given, and their dimensions; further conditions may have any.
_ACTIONS = ("condition_data", "condition_mask", "noise", "last_chunk")
_OF_THE_NETWORK = ("global_cond", "local_cond")
RANKS = {"global_cond": 2, "local_cond": 3, **dict.fromkeys(_ACTIONS, 3)}
# What a loop takes beside the conditions of the network.
OF_THE_LOOP = (*_ACTIONS, "sample", "timestep", "random", "step_noise")


@dataclass(frozen=True)
class Call:
    """What a call came to.

    Attributes:
        given: its tensors by name; None where there is none.
        others: further conditions of the network, by name.
        held: ``condition_data`` and ``condition_mask``, or nothing.
        device: of the network.
        dtype: of the sample and the scheduler's arithmetic.
        weights_dtype: of the network.
        noise_dtype: what random numbers are sampled in.
        table: the steps that run.
        shape: (B, T, Da).
        generator: of the random stream.
        inpainting: where given actions hold.

    """

    given: Given
    others: Inputs
    held: Inputs
    device: torch.device
    dtype: torch.dtype
    weights_dtype: torch.dtype
    noise_dtype: torch.dtype
    table: Steps
    shape: tuple[int, int, int]
    generator: Generators
    inpainting: str

    def conditions(self) -> Inputs:
        """Return what the network is called with, every tensor of the call's batch."""
        own = {name: self.given[name] for name in _OF_THE_NETWORK} | self.others
        batch = self.shape[0]
        return {n: v.expand(batch, *v.shape[1:]) for n, v in own.items() if v is not None}

    def begin(self) -> Inputs:
        """Return what the loop begins with and is held to, as far as it was given."""
        given = {name: self.given[name] for name in ("noise", "last_chunk")}
        return self.held | {n: v.to(self.dtype) for n, v in given.items() if v is not None}

    def numbers(self) -> RandomNumbers:
        """Return the random numbers of the loop."""
        flags = self.given["noise"] is None, self.table.draws_noise
        kind = self.shape, self.noise_dtype, self.device
        return RandomNumbers(*flags, *kind, self.table.transposed)


def check(holds: object, argument: str, rule: str, got: Any) -> None:
    """Raise what an argument of the sampler must do, and what was received, unless it holds."""
    require(holds, f"DiffusionSampler: {argument}", rule, got)


def check_conditions(conditions: Any) -> dict[str, Any]:
    """Return what else the network is called with, by name."""
    named = isinstance(conditions, Mapping) and all(isinstance(n, str) for n in conditions)
    check(named, "conditions", "map names to tensors", type(conditions).__name__)
    taken = sorted(conditions.keys() & {*_OF_THE_NETWORK, *OF_THE_LOOP})
    check(not taken, "conditions", "have names of their own", ", ".join(taken))
    return dict(conditions)


def check_count(name: str, value: Any, least: int) -> int:
    """Return a size as an integer."""
    try:
        count = operator.index(value)
    except TypeError:
        count = least - 1
    check(count >= least, name, f"be an integer of at least {least}", repr(value))
    return count


def check_generator(generator: Any, batch: int) -> None:
    """Refuse what is no generator of a batch's random numbers."""
    several = generator if isinstance(generator, Sequence) else [generator]
    wrong = next((one for one in several if not isinstance(one, torch.Generator)), None)
    rule = "be a torch.Generator, or a sequence of them"
    check(generator is None or wrong is None, "generator", rule, type(wrong).__name__)
    if isinstance(generator, Sequence):
        count, rule = len(generator), f"be one, or a sequence of {batch}"
        check(count == batch, "generator", rule, count)


def check_dtype(name: str, dtype: Any) -> None:
    """Refuse what is neither None nor a floating dtype."""
    floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    check(dtype is None or floating, name, "be a floating dtype", dtype)


def placement(
    unet: Callable[..., Tensor], tensors: Mapping[str, Tensor]
) -> tuple[torch.device, torch.dtype]:
    """Return the device and dtype of the network; every argument must be on that device."""
    for name, value in tensors.items():
        check(isinstance(value, Tensor), name, "be a tensor", type(value).__name__)
    parameters = unet.parameters() if isinstance(unet, nn.Module) else iter(())
    first = next((p for p in parameters if p.is_floating_point()), None)
    if first is not None:
        device, dtype, whose = first.device, first.dtype, "the network's"
    else:
        placed = next(iter(tensors.values()), torch.empty(0))
        device, dtype, whose = placed.device, torch.float32, "the first argument's"
    for name, value in tensors.items():
        check(value.device == device, name, f"be on {whose} device {device}", value.device)
    return device, dtype


def shape_of(
    tensors: Mapping[str, Tensor],
    batch_size: int | None,
    horizon: int | None,
    action_dim: int | None,
) -> tuple[int, int, int]:
    """Return (B, T, Da), on which all arguments must agree; what is None follows from them."""
    for name, value in tensors.items():
        rank = RANKS.get(name, value.dim())
        check(value.dim() == rank, name, f"have {rank} dimensions", tuple(value.shape))
        check(value.dim() > 0, name, "have a batch", "a number")
    sequences = {name: value for name, value in tensors.items() if RANKS.get(name) == 3}
    actions = {name: value for name, value in sequences.items() if name != "local_cond"}
    batch = batch_size
    if batch is None:
        batch = max((value.shape[0] for value in tensors.values()), default=1)
    if horizon is None and sequences:
        horizon = next(iter(sequences.values())).shape[1]
    if action_dim is None and actions:
        action_dim = next(iter(actions.values())).shape[2]
    rule = "be given to the constructor, or follow from an argument"
    for name, size in (("horizon", horizon), ("action_dim", action_dim)):
        check(size is not None, name, rule, None)
    shape = (
        check_count("batch_size", batch, 0),
        check_count("horizon", horizon, 1),
        check_count("action_dim", action_dim, 1),
    )
    for name, value in tensors.items():
        got, whole = tuple(value.shape), f"be (B, T, Da) = {shape}"
        check(name != "noise" or got == shape, name, whole, got)
        check(got[0] in (1, batch), name, f"have a batch of 1 or {batch}", got)
        check(name not in actions or got[1:] == shape[1:], name, whole, got)
        fits = name not in sequences or got[1] == horizon
        check(fits, name, f"have the horizon {horizon}", got)
    return shape


def condition_of(given: Given, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return ``condition_data`` of that dtype and ``condition_mask``, or nothing."""
    data, mask = given["condition_data"], given["condition_mask"]
    missing = "condition_data" if data is None else "condition_mask"
    check((data is None) == (mask is None), missing, "be given where its counterpart is", None)
    if data is None or mask is None:
        return {}
    right = mask.dtype == torch.bool or mask.is_floating_point()
    check(right, "condition_mask", "be a bool tensor, or floating weights", mask.dtype)
    weights = mask.to(dtype) if mask.is_floating_point() else mask
    return {"condition_data": data.to(dtype), "condition_mask": weights}


def check_way(given: Given, inpainting: str, first_step: Any, table: Any, parallel: Any) -> None:
    """Refuse a way through the loop that there is not: how it begins, and where actions hold."""
    got, way, hard = type(table).__name__, repr(inpainting), inpainting == "sample"
    check(inpainting in PLACES, "inpainting", f"be one of {', '.join(PLACES)}", way)
    check_count("first_step", first_step, 0)
    chunk, mask = given["last_chunk"], given["condition_mask"]
    check(not first_step or chunk is not None, "last_chunk", "be given where first_step is", None)
    known = chunk is None or getattr(table, "levels", None) is not None
    check(known, "last_chunk", "be left out where the steps' noise levels are unknown", got)
    known = hard or getattr(table, "x0", None) is not None
    check(known, "inpainting", "be 'sample' where the steps' x0 is unknown", got)
    soft = mask is not None and mask.dtype != torch.bool
    rule = "be 'x0' with weights, where a solver's step depends on an earlier sample"
    check(not (soft and hard and getattr(table, "follows", False)), "inpainting", rule, way)
    if parallel is not None and mask is not None:
        check(hard, "inpainting", "be 'sample' with parallel", way)
        check(not soft, "condition_mask", "be a bool tensor with parallel", mask.dtype)
        plain = getattr(table, "scales", None) is None
        rule = "be left out with parallel of a scheduler with scales"
        check(plain, "condition_mask", rule, got)


def last_width(unet: Any) -> int | None:
    """Return the width of the network's last layer, where it has the original's name."""
    if not isinstance(unet, nn.Module):
        return None
    # Wrappers, such as a compiled module, put a prefix before the name.
    widths = (p.shape[0] for n, p in unet.named_parameters() if n.endswith("final_conv.1.weight"))
    return next(widths, None)
