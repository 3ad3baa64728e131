"""The denoising loop of separate ops: the network, then the scheduler's step, in every step."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpa.nn.family import run_network
from dpa.sampling.arguments import OF_THE_LOOP, Call, Inputs
from dpa.sampling.fused_loop import split
from dpa.sampling.traced import TracedNetwork
from dpa.schedulers.inpainting import Inpainting
from dpa.schedulers.stepping import loop
from dpa.schedulers.tables import Generators, Steps, StepTable
from dpa.tracking import Snapshot, Tracker, stamp_of
from dpa.tracking.weights import Stamp

Shape = tuple[int, int, int]  # (B, T, Da)
_WEIGHTS = frozenset({"_parameters", "_buffers"})


class Copy:
    """A copy of a network in another dtype, brought up to date before every loop."""

    def __init__(self, unet: nn.Module):
        self.unet = unet
        self._copy: nn.Module | None = None
        self._seen: tuple[Snapshot, Tracker, Any] | None = None
        self._copied: list[Tensor] = []
        self._stamp: Stamp | None = None  # of the weights that were copied last

    @torch.inference_mode(False)
    @torch.no_grad()
    def to(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """Return the copy: what the network's modules and weights are now, in that dtype."""
        values = _values(self.unet)
        shape = [value.shape for value in values], device, dtype
        if self._seen is not None:
            modules, code, then = self._seen
            same = modules.holds() and code.unchanged() and then == (shape, code.modes())
        if self._copy is None or not same:
            modules, code = Snapshot(*self.unet.modules(), but=_WEIGHTS), Tracker(self.unet)
            self._seen = modules, code, (shape, code.modes())
            self._copy = copy.deepcopy(self.unet)
            self._copied, self._stamp = _values(self._copy.to(device, dtype)), None
        # Casting anew costs a fraction of one step, and a copy that lags behind training is a trap.
        # Unwritten buffers keep their versions, by which a graph tells that a mask was written.
        stamp = stamp_of(values)
        kept = tuple(self._copied) if stamp == self._stamp and stamp[1] else ()
        with torch.autograd._unsafe_preserve_version_counter(kept):
            for kind in {value.dtype for value in values}:
                pairs = [p for p in zip(self._copied, values, strict=True) if p[1].dtype == kind]
                torch._foreach_copy_(*map(list, zip(*pairs, strict=True)))
        self._stamp = stamp
        return self._copy


def _values(unet: nn.Module) -> list[Tensor]:
    """Return parameters and buffers, those that several modules hold as often."""
    named = (unet.named_parameters, unet.named_buffers)
    return [value for those in named for _, value in those(remove_duplicate=False)]


class Layers:
    """A network that is called in a dtype, for one state of a loop or for a window of them.

    Where there is no ``global_cond``, a network that takes one is given None, but for a network
    with ``others``: conditions of further names.
    """

    def __init__(
        self, unet: Callable[..., Tensor], dtype: torch.dtype, others: Mapping[str, Tensor]
    ):
        takes = not others and _takes_global_cond(unet)
        self.network, self.dtype, self._none = unet, dtype, {"global_cond": None} if takes else {}

    def predict(
        self, sample: Tensor, timesteps: Tensor, conditions: Mapping[str, Tensor | None]
    ) -> Tensor:
        """Predict for samples (B, T, Da) at timesteps (B,), in the sample's dtype."""
        cast, given = sample.to(self.dtype), self._none | dict(conditions)
        return run_network(lambda: self.network(cast, timesteps, **given), cast).to(sample.dtype)

    def ahead(
        self, timesteps: Tensor, conditions: Mapping[str, Tensor]
    ) -> Callable[[Tensor, int], Tensor]:
        """Return ``predict(sample, step)`` of a loop with these timesteps, (S, B)."""
        conditions = self.cast(conditions)
        return lambda sample, step: self.predict(sample, timesteps[step], conditions)

    def traced(
        self, table: StepTable, inputs: Mapping[str, Tensor], shape: Shape, dtype: torch.dtype
    ) -> TracedNetwork:
        """Return the network's trace for a loop, whose steps compute in a dtype; or raise."""
        conditions = self.cast(_conditions(inputs))
        sample = table.coefficients.new_zeros(shape)
        timesteps = table.timesteps[:, None].expand(-1, shape[0])
        return TracedNetwork(self.predict, sample, timesteps, conditions, dtype)

    def cast(self, conditions: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return conditions in the network's dtype; indices and masks stay as they are."""
        return {n: v.to(self.dtype) if v.is_floating_point() else v for n, v in conditions.items()}

    def inputs_of(self, call: Call) -> Inputs:
        """Return the inputs of a call's loop, but for its random numbers."""
        return self.cast(call.conditions()) | call.begin()

    def begin(self, inputs: dict[str, Tensor], timesteps: Tensor) -> Tensor:
        """Return the timesteps, a row each, (N, 1)."""
        return timesteps[:, None]

    def __call__(self, inputs: dict[str, Tensor], sample: Tensor, steps: Tensor) -> Tensor:
        """Predict for samples (N * B, T, Da) at timesteps (N, 1)."""
        conditions = {
            name: value.repeat(len(steps), *[1] * (value.dim() - 1))  # it serves every timestep
            for name, value in _conditions(inputs).items()
        }
        timesteps = steps.expand(-1, len(sample) // len(steps)).flatten()
        return self.predict(sample, timesteps, conditions)


def _conditions(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: v for n, v in inputs.items() if n not in OF_THE_LOOP}


def _takes_global_cond(unet: Callable[..., Tensor]) -> bool:
    """Whether a network takes such an argument, as far as it says."""
    try:
        parameters = inspect.signature(getattr(unet, "forward", unet)).parameters
    except (TypeError, ValueError):
        return True
    return "global_cond" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def run(
    layers: Layers | TracedNetwork,
    table: Steps,
    inputs: Mapping[str, Tensor],
    draw: Callable[[int], Tensor] | None = None,
    generator: Generators = None,
    inpainting: str = "sample",
) -> Tensor:
    """Run the loop on its inputs: ``noise``, what holds by inpainting, the network's conditions.

    ``inpainting`` is where given actions hold. ``draw`` gives the random numbers of a step as the
    loop comes to need them; without it they are an input, ``random``.
    """
    rest, sample, random = split(inputs, table)
    predict = layers.ahead(table.timesteps[:, None].expand(-1, len(sample)), _conditions(rest))
    draw = draw or (lambda step: random[step])
    held = Inpainting.of(rest, inpainting, table)
    return loop(sample, table, predict, draw, held, generator)
