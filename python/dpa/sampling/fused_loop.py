"""The denoising loop as one op on packed weights: what it takes, and how a call of it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpa.library.capture import can_capture
from dpa.packed.unet import PackedUnet, runs_packed
from dpa.sampling.graphs import Body, Inputs, LoopGraphs
from dpa.sampling.rng import Drawing, Draws
from dpa.schedulers.conversion import LiveSteps, MultistepTable, StepTable
from dpa.schedulers.tables import Generators

Given = Mapping[str, Tensor | None]


def refusal(
    unet: nn.Module,
    table: StepTable | LiveSteps,
    device: torch.device,
    local_cond: Tensor | None,
) -> tuple[str, str] | None:
    """Why a loop cannot be one op, what ``fused`` must and what was received; None where it can."""
    if not runs_packed(device):
        return "be left out where no kernel runs packed weights", str(device)
    if local_cond is not None:
        return "be left out where there is local_cond", "both"
    if getattr(unet, "local_cond_encoder", None) is not None:
        return "be left out of a network with local conditioning", type(unet).__name__
    if isinstance(table, LiveSteps | MultistepTable):
        rule = "be left out of a scheduler that no StepTable expresses"
        return rule, type(table).__name__
    return None


@dataclass(frozen=True)
class Captured:
    """Calls of one kind, whose loop is in a graph: what they share was looked up and checked once.

    Attributes:
        packed: the network.
        graphs: captured so far.
        kind: of the calls; with the packed weights' place the key of a graph.
        draws: what the loop draws.
        make_body: makes the loop, where it has to be captured anew.
        watch: look for weights written through ``parameter.data`` too.

    """

    packed: PackedUnet
    graphs: LoopGraphs
    kind: Hashable
    draws: Draws
    make_body: Callable[[], Body]
    watch: bool

    def __call__(self, given: Given, generator: Generators) -> Tensor:
        """Return the actions; weights that changed since they were packed cost a second run."""
        draws, packed = self.draws, self.packed
        draw = None if draws.rows is None else Drawing(draws, generator)
        inputs = _expanded(given, draws.shape)

        def replay() -> Tensor:
            packed.memory(draws.device)
            key = (self.kind, packed.generation, packed.places if self.watch else None)
            return self.graphs.run(key, draws.device, inputs, draw, self.make_body)

        with packed.lock:
            result = replay()
            # Looked at while the GPU works already.
            if packed.stale() or (self.watch and packed.differed()):
                packed.repack()
                if draw is not None and draw.back is not None:
                    draw.back()
                result = replay()
        return result


def run(
    packed: PackedUnet,
    graphs: LoopGraphs,
    table: StepTable,
    shape: tuple[int, int, int],
    given: Given,
    generator: Generators,
    *,
    drawn: torch.dtype,
    capture: bool,
    watch: bool = False,
) -> tuple[Tensor, Captured | None]:
    """Run the loop as one op, in a graph where ``capture`` allows it and one can be captured.

    Args:
        packed: the network.
        graphs: captured so far.
        table: the steps, on the network's device.
        shape: (B, T, Da).
        given: ``noise``, ``global_cond``, ``condition_data`` and ``condition_mask`` of the call.
        generator: of the random stream, drawn from as the loop of steps draws.
        drawn: the dtype that noise is drawn in.
        capture: whether a graph is wanted.
        watch: look for weights written through ``parameter.data`` too.

    Returns:
        The actions, and what runs further calls of this kind, where those can be captured.

    """
    device, inputs = table.coefficients.device, _expanded(given, shape)
    draws = Draws("noise" not in inputs, table.draws_noise, shape, drawn, device)
    if not (capture and can_capture(device)):
        if watch:
            packed.follow()
        return _body(packed, table, film=False)(inputs | {"draws": draws(generator)}), None
    make_body = functools.partial(_body, packed, table, film=True)
    if watch:
        make_body = functools.partial(_watched, packed, make_body)
    kind = (shape, table, drawn, frozenset(inputs))
    call = Captured(packed, graphs, kind, draws, make_body, watch)
    return call(inputs, generator), call


def _watched(packed: PackedUnet, make_body: Callable[[], Body]) -> Body:
    run = make_body()

    def body(inputs: Inputs) -> Tensor:
        with packed.looking():
            return run(inputs)

    return body


def _expanded(given: Given, shape: tuple[int, int, int]) -> Inputs:
    """The tensors that there are, every one of the call's batch, without gradient."""
    found = {}
    for name, value in given.items():
        if value is None:
            continue
        if value.requires_grad:
            value = value.detach()
        if value.shape[0] != shape[0]:
            value = value.expand(shape[0], *value.shape[1:])
        found[name] = value
    return found


def _body(packed: PackedUnet, table: StepTable, film: bool) -> Body:
    """Return the loop of one op, to be run as it is or captured.

    Args:
        packed: the network.
        table: the steps.
        film: whether what FiLM makes of the timesteps is kept from run to run.

    """
    timesteps, coefficients = table.timesteps.float(), table.coefficients.float()
    step_film = packed.step_film(timesteps) if film else None

    def body(inputs: Inputs) -> Tensor:
        floats = {n: v.float() if v.is_floating_point() else v for n, v in inputs.items()}
        noise, draws = floats.get("noise"), floats.get("draws")
        if noise is None:
            assert draws is not None
            noise, draws = draws[0], draws[1:]
        return packed.sample(
            noise,
            timesteps,
            coefficients,
            table.clip,
            global_cond=floats.get("global_cond"),
            noise=draws if draws is not None and len(draws) else None,
            known=floats.get("condition_data"),
            known_mask=floats.get("condition_mask"),
            step_film=step_film,
        )

    return body


class Window:
    """The packed network as :class:`dpa.parallel.Sweeps` calls it, for a window of states at once.

    For one sample on a GPU FiLM's parameters at every timestep are computed once a call.
    """

    def __init__(self, packed: PackedUnet, one: bool):
        self.packed, self._one = packed, one

    def begin(self, inputs: Inputs, timesteps: Tensor) -> Tensor:
        """Return FiLM's parameters of each of the timesteps, or the timesteps, a row each."""
        if not self._one:
            return timesteps.float()[:, None]
        cond = inputs.get("global_cond")
        return self.packed.film(timesteps.float(), None if cond is None else cond.float())

    def __call__(self, inputs: Inputs, sample: Tensor, told: Tensor) -> Tensor:
        """Predict for samples (N * B, T, Da) at timesteps of which these are the rows, (N, R)."""
        if self._one:
            return self.packed.on_film(sample.float(), told).to(sample.dtype)
        cond = inputs.get("global_cond")
        if cond is not None:  # it serves every timestep
            cond = cond.float().repeat(len(told), 1)
        timesteps = told.expand(-1, len(sample) // len(told)).flatten()
        return self.packed(sample.float(), timesteps, cond).to(sample.dtype)
