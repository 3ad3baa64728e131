"""The denoising loop as one op on packed weights: what it takes, and how a call of it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .graphs import Body, Inputs, LoopGraphs, can_capture
from .noise import draw_normal, draw_steps, generator_on
from .packed import PackedUnet, runs_packed
from .schedulers import LiveSteps, MultistepTable, StepTable
from .step_table import Generators


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


def run(
    packed: PackedUnet,
    graphs: LoopGraphs,
    table: StepTable,
    shape: tuple[int, int, int],
    given: dict[str, Tensor | None],
    generator: Generators,
    *,
    drawn: torch.dtype,
    capture: bool,
    watch: bool = False,
) -> Tensor:
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

    """
    inputs = {
        name: value.expand(shape[0], *value.shape[1:])
        for name, value in given.items()
        if value is not None
    }
    device = table.coefficients.device
    source: torch.Generator | None = None
    if "noise" not in inputs or any(table.draws_noise):
        source = generator_on(device, generator)
        if source is None:  # drawn elsewhere, and brought here
            if "noise" not in inputs:
                inputs["noise"] = draw_normal(shape, generator, device, drawn)
            if any(table.draws_noise):
                steps = draw_steps(table.draws_noise, shape, generator, drawn)
                inputs["step_noise"] = steps.to(device)
    make_body = functools.partial(_body, packed, table, shape, device, drawn)
    if not (capture and can_capture(device)):
        if watch:
            packed.follow()
        return make_body()(inputs, source)
    if watch:
        make_body = functools.partial(_watched, packed, make_body)

    def replay() -> Tensor:
        memory = packed.memory(device).data_ptr()
        network = (packed.dtype, tuple(packed.config), memory, packed.places if watch else None)
        key = (shape, table, *network, drawn, frozenset(inputs), source is None)
        return graphs.run(key, device, inputs, source, make_body)

    offset = 0 if source is None else source.get_offset()
    with packed.lock:
        result = replay()
        # Looked at while the GPU works already: weights that changed cost a second run.
        if packed.stale() or (watch and packed.differed()):
            packed.repack()
            if source is not None:
                source.set_offset(offset)
            result = replay()
    return result


def _watched(packed: PackedUnet, make_body: Callable[[], Body]) -> Body:
    run = make_body()

    def body(inputs: Inputs, generator: torch.Generator | None) -> Tensor:
        with packed.looking():
            return run(inputs, generator)

    return body


def _body(
    packed: PackedUnet,
    table: StepTable,
    shape: tuple[int, int, int],
    device: torch.device,
    drawn: torch.dtype,
) -> Body:
    """Return the loop of one op, to be run as it is or captured; it draws in ``drawn``."""
    timesteps, coefficients = table.timesteps.float(), table.coefficients.float()

    def body(inputs: Inputs, generator: torch.Generator | None) -> Tensor:
        floats = {n: v.float() if v.is_floating_point() else v for n, v in inputs.items()}
        noise, step_noise = floats.get("noise"), floats.get("step_noise")
        if noise is None:
            noise = draw_normal(shape, generator, device, drawn).float()
        if step_noise is None and any(table.draws_noise):
            step_noise = draw_steps(table.draws_noise, shape, generator, drawn).float()
        return packed.sample(
            noise,
            timesteps,
            coefficients,
            table.clip,
            global_cond=floats.get("global_cond"),
            noise=step_noise,
            known=floats.get("condition_data"),
            known_mask=floats.get("condition_mask"),
        )

    return body


class Window:
    """The packed network as :class:`dpa.parallel.Sweeps` calls it, for a window of states at once.

    For one sample on a GPU FiLM's parameters at every timestep are computed once a call.
    """

    def __init__(self, packed: PackedUnet, one: bool):
        self.packed, self._one, self._film = packed, one, torch.empty(0)

    def begin(self, inputs: Inputs, timesteps: Tensor) -> None:
        """Prepare for a call with these inputs; ``timesteps`` are those of the rows to come."""
        if self._one:
            cond = inputs.get("global_cond")
            cond = None if cond is None else cond.float()
            self._film = self.packed.film(timesteps.float(), cond)

    def __call__(self, inputs: Inputs, sample: Tensor, timesteps: Tensor, rows: Tensor) -> Tensor:
        """Predict for samples (N * B, T, Da) at timesteps (N * B,), which are these rows' (N,)."""
        if self._one:
            return self.packed.on_film(sample.float(), self._film[rows]).to(sample.dtype)
        cond = inputs.get("global_cond")
        if cond is not None:  # it serves every timestep
            cond = cond.float().repeat(len(rows), 1)
        return self.packed(sample.float(), timesteps.float(), cond).to(sample.dtype)
