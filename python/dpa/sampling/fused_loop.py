"""The denoising loop on packed weights: what it takes, and how a call of it runs.

It is one op. A multistep solver's earlier x0 are no operand of that op, nor is inpainting with
weights, in x0 or of a sample that the scheduler scales: there each step is the packed network and
:func:`dpa.ops.scheduler_step`, all of them in one graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpa.library.capture import can_capture, no_autocast_cache
from dpa.library.graphs import GraphCache, captured
from dpa.packed.batch import BatchWeights
from dpa.packed.unet import PackedUnet
from dpa.sampling.arguments import RANKS, Call, Given, Inputs
from dpa.sampling.rng import Launch, RandomNumbers
from dpa.schedulers.inpainting import Inpainting
from dpa.schedulers.stepping import loop
from dpa.schedulers.tables import Generators, MultistepTable, Steps, StepTable
from dpa.tracking import is_dispatched, is_observed

_DEFAULT = 0  # the default stream's address
Body = Callable[[Inputs], Tensor]
Way = tuple[str, int]  # where given actions hold, and the step to begin at
# Makes the body of a loop that is sampled in parallel; a value that tells it from others.
Sweeping = Callable[[PackedUnet, StepTable, tuple[int, int, int], Inputs], Body]


@dataclass(frozen=True)
class Prepared:
    """A loop on packed weights, prepared for calls of one kind: all that they share is found.

    Whoever runs it has checked that the network's modules are what they were.

    Attributes:
        kind: of the calls.
        placement: of the network's weights.
        packed: the network.
        run: runs a call, by its tensors and its generator, on the weights that there are now.

    """

    kind: tuple[Any, ...]
    placement: tuple[torch.device, torch.dtype]
    packed: PackedUnet
    run: Callable[[Given, Generators], Tensor]

    def serves(self, given: Given, batch_size: int | None, generator: Generators, way: Way) -> bool:
        """Whether a call is of this kind, and nobody captures what it does."""
        if kind_of(given, batch_size, generator, way) != self.kind:
            return False
        if self.packed.weights.placement != self.placement:
            return False
        captures = self.placement[0].type == "cuda"
        return not (captures and torch.cuda.is_current_stream_capturing())

    def stands(self, fused: bool | None) -> bool:
        """Whether the modules are what they were, and a call would run nothing else."""
        tracker = self.packed.network.tracker
        plain = tracker.no_one_op() is None if fused else is_plain(self.packed)
        return plain and tracker.unchanged()


def kind_of(
    given: Given, batch_size: int | None, generator: Generators, way: Way
) -> tuple[Any, ...] | None:
    """All that decides how a call runs, but for the sampler's attributes; None of a rare kind."""
    if generator is not None and not isinstance(generator, torch.Generator):
        return None
    tensors = [given[name] for name in RANKS]
    if not all(v is None or isinstance(v, Tensor) for v in tensors):
        return None
    kinds = [None if v is None else (v.shape, v.dtype, v.device) for v in tensors]
    return (*kinds, batch_size, None if generator is None else generator.device, *way)


def expanded(given: Given, shape: tuple[int, int, int]) -> Inputs:
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


def is_plain(packed: PackedUnet) -> bool:
    """Whether a call of the network would run its layers, in its own dtype, and nothing else."""
    device = packed.weights.placement[0]
    observed = is_observed() or is_dispatched()
    own = "forward" not in vars(packed.unet) and packed.network.tracker.no_one_op() is None
    captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return own and not (observed or captured or torch.is_autocast_enabled(device.type))


def run(
    packed: PackedUnet, graphs: LoopGraphs, call: Call, capture: bool, sweeps: Sweeping | None
) -> tuple[Tensor, Callable[[Given, Generators], Tensor] | None]:
    """Run the loop on packed weights, in a graph where ``capture`` allows it and one is possible.

    Beside the actions comes what runs further calls of this kind: all that they share is found and
    checked. None on a GPU where they cannot be captured. ``sweeps`` makes the body of a call that
    samples in parallel.
    """
    table, shape, inputs = call.table, call.shape, expanded(call.given, call.shape)
    device, numbers = table.coefficients.device, call.numbers()

    captures = capture and can_capture(device)

    def make_body() -> Body:
        if sweeps is not None:
            return sweeps(packed, table, shape, inputs)
        return _body(packed, table, inputs, call.inpainting, film=captures)

    if captures:
        soft = "condition_mask" in inputs and inputs["condition_mask"].dtype != torch.bool
        kind = (shape, table, call.noise_dtype, frozenset(inputs), soft, call.inpainting, sweeps)

        def replay(given: Given, generator: Generators) -> Tensor:
            given_now = expanded(given, shape)
            return run_captured(packed, graphs, kind, numbers, make_body, given_now, generator)

        return replay(call.given, call.generator), replay
    with packed.lock:
        packed.follow()
        body = make_body()
        result = body(inputs | {"random": numbers(call.generator)})

    def again(given: Given, generator: Generators) -> Tensor:
        given_now = expanded(given, shape) | {"random": numbers(generator)}
        with packed.lock:
            if packed.weights.changed() or packed.weights.values_changed():
                packed.repack()
            return body(given_now)

    return result, again if device.type == "cpu" else None


def run_captured(
    packed: PackedUnet,
    graphs: LoopGraphs,
    kind: Hashable,
    numbers: RandomNumbers,
    make_body: Callable[[], Body],
    inputs: Inputs,
    generator: Generators,
) -> Tensor:
    """Return the actions, of the weights that there are now; the caller has checked the modules."""
    random = numbers if numbers.rows else None
    with packed.lock, graphs.lock:
        graph = graphs.find((kind, packed.generation))
        if graph is None:
            packed.follow()
        else:
            weights = packed.weights
            weights.start()
            if torch._C._cuda_getCurrentRawStream(numbers.device.index) != packed.packed_on:
                packed.readable()
            result = graph.replay(inputs, random, generator)
            if not (weights.changed() or weights.values_changed()):
                return result
            packed.repack()
            inputs, random = graph.inputs, None  # the random numbers of this call are there
        key = (kind, packed.generation)
        return graphs.run(key, numbers.device, inputs, make_body, random, generator)


class LoopGraphs(GraphCache):
    """Captured loops. Results are copies, so a later call does not overwrite them."""

    def run(
        self,
        key: Hashable,
        device: torch.device,
        inputs: Inputs,
        make_body: Callable[[], Body],
        numbers: RandomNumbers | None = None,
        generator: Generators = None,
    ) -> Tensor:
        """Return ``body(inputs)``, replayed from the second call with a key on.

        The key is everything but the contents of ``inputs`` that the result depends on, their
        shapes too. ``make_body`` makes what launches kernels on the current stream alone. A graph's
        body receives floating inputs as float32, and the random numbers as ``random``.
        """
        with self.lock:
            if (graph := self.find(key)) is not None:
                return graph.replay(inputs, numbers, generator)
            body = make_body()
            if numbers is not None:
                inputs = inputs | {"random": numbers(generator).float()}
            result = body(inputs)
            self.capture(key, device, lambda: LoopGraph(device, body, inputs))
            return result


class LoopGraph:
    """One captured loop with the memory that its kernels read and write.

    Attributes:
        inputs: of the last replay, with its random numbers.

    """

    def __init__(self, device: torch.device, body: Body, inputs: Inputs, known: bool = True):
        self._body = body  # keeps the memory that the kernels read
        self._reads: Sequence[Tensor] = getattr(body, "reads", ())
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(device):
            kept = torch.contiguous_format
            self.inputs = {n: v.clone(memory_format=kept) for n, v in in_float32(inputs).items()}
            with no_autocast_cache():
                # Another's network may use random numbers, or differentiate in other threads.
                graphs, outputs = captured(
                    device, lambda: body(self.inputs), random_numbers=not known
                )
        (self._graph,), (self._output,) = graphs, outputs
        self._done = torch.cuda.Event()
        self._home = torch._C._cuda_getCurrentRawStream(device.index)
        self._last = _DEFAULT
        self._launch: Launch | None = None  # of the device's own generator's numbers

    def replay(
        self, inputs: Inputs, numbers: RandomNumbers | None, generator: Generators
    ) -> Tensor:
        """Return what the loop makes of these inputs, and of its random numbers."""
        # The GPU waits meanwhile: nothing comes before the launch that it does not need. What ran
        # on the default stream last is ahead of this on it; another stream may be one that is gone.
        device = self._output.device
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        if stream != _DEFAULT or self._last != _DEFAULT:
            torch.cuda.current_stream(device).wait_event(self._done)
        if stream != self._home:  # whose memory that is: another's use of it must be known
            for value in (*self.inputs.values(), *self._reads):
                value.record_stream(torch.cuda.current_stream(device))
        targets, sources = [self.inputs[name] for name in inputs], list(inputs.values())
        if numbers is None:
            torch.ops.dpa.loop_inputs_(targets, sources)
        elif generator is None and self._launch is not None:
            torch.ops.dpa.loop_inputs_(targets, sources, *self._launch)
        else:
            random = self.inputs["random"]
            numbers.into(random, generator, targets, sources)
            if generator is None:
                self._launch = numbers.one_launch(random, None)
        self._graph.replay()
        result = self._output.clone()
        self._done.record(torch.cuda.current_stream(device))
        self._last = stream
        return result


def _body(
    packed: PackedUnet, table: StepTable, inputs: Inputs, inpainting: str, film: bool
) -> Body:
    """Return the loop, to be run as it is or captured.

    ``film``: whether FiLM's parameters of the timesteps are kept from run to run.
    """
    mask = inputs.get("condition_mask")
    hard = mask is None or (mask.dtype == torch.bool and inpainting == "sample")
    hard = hard and (mask is None or table.scales is None)
    if isinstance(table, MultistepTable) or not hard:
        return functools.partial(_several_steps, packed, table.to(dtype=torch.float32), inpainting)
    timesteps, coefficients = _timesteps(packed, table.timesteps), table.coefficients.float()
    step_film = packed.step_film(timesteps) if film and "local_cond" not in inputs else None
    # On a CPU the weights are checked once a call, and all that there is is the op.
    direct = timesteps.device.type == "cpu" and "local_cond" not in inputs

    def body(inputs: Inputs) -> Tensor:
        floats, initial, random = split(in_float32(inputs), table)
        noise = None if random is None or not len(random) else random
        arguments = (initial, timesteps, coefficients, table.clip)
        if not direct:
            return packed.sample(*arguments, noise=noise, step_film=step_film, **floats)
        names = ("global_cond", "condition_data", "condition_mask")
        cond, *held = map(floats.get, names)
        given = cond, *packed.operands, coefficients, table.clip, noise, *held
        return torch.ops.dpa.diffusion_sample(initial, timesteps, *given)

    body.reads = [t for t in (timesteps, coefficients, step_film) if t is not None]
    return body


def _timesteps(packed: PackedUnet, timesteps: Tensor) -> Tensor:
    """Return timesteps as the op takes them. Layers of its own may tell integers from floats."""
    return timesteps if packed.network.film_apart else timesteps.float()


def split(inputs: Inputs, table: Steps) -> tuple[Inputs, Tensor, Tensor | None]:
    """Return the other inputs, what the loop begins with, and the steps' noise."""
    rest = dict(inputs)
    random, initial, last_chunk = (rest.pop(n, None) for n in ("random", "noise", "last_chunk"))
    if initial is None:
        initial, random = random[0], random[1:]
    if last_chunk is not None or table.init_noise_sigma != 1.0:
        initial = table.begin(initial, last_chunk)
    return rest, initial, random


def in_float32(inputs: Inputs) -> Inputs:
    """Return the inputs as loops on packed weights take them; masks stay as they are."""
    return {n: v.float() if v.is_floating_point() else v for n, v in inputs.items()}


def _several_steps(packed: PackedUnet, table: StepTable, inpainting: str, inputs: Inputs) -> Tensor:
    """Run the loop step by step, each of them the packed network and a scheduler's step."""
    floats, sample, random = split(in_float32(inputs), table)
    one = sample.is_cuda and len(sample) == 1 and "local_cond" not in floats
    predict = Window(packed, one)
    rows = predict.begin(floats, table.timesteps)
    return loop(
        sample,
        table,
        lambda sample, step: predict(floats, sample, rows[step : step + 1]),
        lambda step: random[step],
        Inpainting.of(floats, inpainting, table),
    )


class Window:
    """The packed network as :class:`Sweeps` calls it, for a window of states at once.

    For one sample on a GPU FiLM's parameters at every timestep are computed once a call.

    Args:
        packed: the network.
        one: whether there is one sample, on a GPU.
        layers: what runs a window of its states layer by layer, if that is faster.

    """

    def __init__(self, packed: PackedUnet, one: bool, layers: BatchWeights | None = None):
        self.packed, self._one, self._layers = packed, one, layers

    def begin(self, inputs: Inputs, timesteps: Tensor) -> Tensor:
        """Return FiLM's parameters of each of the timesteps, or the timesteps, a row each."""
        timesteps = _timesteps(self.packed, timesteps)
        if not self._one:
            return timesteps[:, None]
        cond = inputs.get("global_cond")
        if self._layers is None:
            return self.packed.film(timesteps, cond)
        rows, (self._observed,) = self._layers.film(timesteps, cond)
        return rows.float()

    def __call__(self, inputs: Inputs, sample: Tensor, steps: Tensor) -> Tensor:
        """Predict for samples (N * B, T, Da) at timesteps of which these are the rows, (N, R)."""
        if self._layers is not None:
            rows = steps.to(self._observed.dtype)
            return self._layers.on_film(sample.float(), self._observed, rows).to(sample.dtype)
        if self._one:
            return self.packed.on_film(sample.float(), steps).to(sample.dtype)
        cond, local = inputs.get("global_cond"), inputs.get("local_cond")
        if cond is not None:  # it serves every timestep
            cond = cond.repeat(len(steps), 1)
        timesteps = steps.expand(-1, len(sample) // len(steps)).flatten()
        return self.packed(sample.float(), timesteps, cond, local).to(sample.dtype)
