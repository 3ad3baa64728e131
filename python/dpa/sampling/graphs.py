"""CUDA graphs of whole denoising loops: captured once for each kind of call, then replayed."""

from __future__ import annotations

import functools
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dpa.library.capture import MaskAnswers, kernel_settings, no_autocast_cache
from dpa.library.graphs import captured
from dpa.packed.agreement import LOOP_LIMITS, limit, proves, relative_error
from dpa.packed.unet import PackedUnet
from dpa.sampling.rng import RandomNumbers
from dpa.schedulers.tables import Generators
from dpa.tracking import ModuleState

Inputs = dict[str, Tensor]
# Allocated before a capture, and freed: more than a loop of the published networks takes.
_ROOM = 64 << 20
_MISSES = 8  # graphs in a row whose module changed
_DEFAULT = 0  # the default stream's address

Body = Callable[[Inputs], Tensor]
Made = TypeVar("Made")


def attempt(
    refused: dict[Hashable, str], key: Hashable, device: torch.device, capture: Callable[[], Made]
) -> Made | None:
    """Return what ``capture()`` captures, or None: then the work still runs, kernel by kernel.

    Where memory is short the next call tries again; what else fails is ``refused`` for good, and a
    warning says why.
    """
    try:
        # Without memory a capture would end in pieces; here the error is an ordinary one.
        torch.empty(_ROOM, dtype=torch.uint8, device=device)
        return capture()
    except torch.OutOfMemoryError:
        warnings.warn(
            "DiffusionSampler: no memory for a CUDA graph of this loop, which runs kernel by "
            "kernel: free some, the next call tries again",
            stacklevel=2,
        )
    except RuntimeError as error:
        refused[key] = str(error).partition("\n")[0]
        warnings.warn(
            "DiffusionSampler: this loop could not be captured and runs kernel by kernel: "
            f"{refused[key]}",
            RuntimeWarning,
            stacklevel=2,
        )
    return None


class GraphCache:
    """A bounded cache of captured work; the least recently used goes first.

    Calls from several streams or threads are safe: one waits for the other.
    """

    def __init__(self, capacity: int = 8):
        self.capacity = capacity
        self.refused: dict[Hashable, str] = {}
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self.lock = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy, or what a pickle brings back, captures anew.
        return (type(self), (self.capacity,))

    def __len__(self) -> int:
        """Return how many are held."""
        return len(self._kept)

    def clear(self) -> None:
        """Drop all, and forget what could not be captured."""
        with self.lock:
            self._kept.clear()
            self.refused.clear()

    def find(self, key: Hashable) -> Any:
        """Return what is kept of a key, or None."""
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def capture(self, key: Hashable, device: torch.device, capture: Callable[[], Any]) -> Any:
        """Keep and return what :func:`attempt` captures, which is not tried again once refused."""
        if key not in self.refused:
            captured = attempt(self.refused, key, device, capture)
            if captured is not None:
                self._kept[key] = captured
        while len(self._kept) > self.capacity:
            self._kept.popitem(last=False)
        return self._kept.get(key)


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
            self.capture(key, device, lambda: _LoopGraph(device, body, inputs))
            return result


def run_captured(
    packed: PackedUnet,
    graphs: LoopGraphs,
    kind: Hashable,
    numbers: RandomNumbers,
    make_body: Callable[[], Body],
    inputs: Inputs,
    generator: Generators,
) -> Tensor:
    """Return the actions, of the weights that there are now."""
    random = numbers if len(numbers) else None
    with packed.lock, graphs.lock:
        graph = graphs.find((kind, packed.generation))
        if graph is None:
            packed.follow()
        else:
            packed.start()
            result = graph.replay(inputs, random, generator)
            if packed.current():
                return result
            packed.repack()
            inputs, random = graph.inputs, None  # the random numbers of this call are there
        key = (kind, packed.generation)
        return graphs.run(key, numbers.device, inputs, make_body, random, generator)


class ModuleLoops(LoopGraphs):
    """Captured loops around any module, each with what its module was when it was captured.

    A graph reads the module's parameters where they lie, so writes in place need no notice.
    """

    def __init__(self, capacity: int = 8):
        super().__init__(capacity)
        self._misses = 0

    def run(
        self,
        module: nn.Module,
        kind: tuple[Hashable, ...],
        inputs: Inputs,
        body: Body,
        numbers: RandomNumbers,
        generator: Generators,
    ) -> Tensor:
        """Return ``body(inputs)`` with the loop's random numbers, replayed from the second call on.

        ``kind`` is what the result depends on but for the module, its inputs' shapes and the
        settings of kernels. The first replay of a graph is compared with the body.
        """
        shapes = tuple((n, tuple(v.shape), v.dtype) for n, v in inputs.items())
        key = (*kind, shapes, kernel_settings())
        with self.lock:
            graph = self.find(key)
            if graph is not None and not (graph.state.holds() and graph.answers.hold()):
                del self._kept[key]
                graph, self._misses = None, self._misses + 1
            if graph is not None:
                self._misses = 0
                return graph.replay(inputs, numbers if len(numbers) else None, generator)
            if len(numbers):
                inputs = inputs | {"random": numbers(generator).float()}
            answers = MaskAnswers()
            with answers.used():
                result = body(inputs)
                state = ModuleState(module)
                if self._misses <= _MISSES and not state.hooked():
                    capture = functools.partial(_checked, numbers.device, body, inputs, result)
                    graph = self.capture(key, numbers.device, capture)
            if graph is not None:
                graph.state, graph.answers = state, answers
            return result


def _checked(device: torch.device, body: Body, inputs: Inputs, result: Tensor) -> _LoopGraph:
    """Capture a loop, whose replay gives a result; raise RuntimeError where it does not."""
    graph = _LoopGraph(device, body, inputs, known=False)
    error = relative_error(graph.replay(inputs, None, None), result)
    most = limit(LOOP_LIMITS, (torch.float32,), device)
    if proves(result) and error > most:
        raise RuntimeError(f"its replay differs by {error:.1e} (relative), more than {most:.0e}")
    return graph


class _LoopGraph:
    """One captured loop with the memory that its kernels read and write.

    Attributes:
        inputs: of the last replay, with its random numbers.
        state: the module that the loop calls, where it is none of packed weights.
        answers: what was found of its masks.

    """

    state: ModuleState
    answers: MaskAnswers

    def __init__(self, device: torch.device, body: Body, inputs: Inputs, known: bool = True):
        self._body = body  # keeps the memory that the kernels read
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(device):
            self.inputs = {name: _static(value) for name, value in inputs.items()}
            with no_autocast_cache():
                # Another's network may use random numbers, or differentiate in other threads.
                graphs, outputs = captured(
                    device, lambda: body(self.inputs), random_numbers=not known
                )
        (self._graph,), (self._output,) = graphs, outputs
        self._done = torch.cuda.Event()
        self._home = torch._C._cuda_getCurrentRawStream(device.index)
        self._last = _DEFAULT

    def replay(
        self, inputs: Inputs, numbers: RandomNumbers | None, generator: Generators
    ) -> Tensor:
        # The GPU waits meanwhile: nothing comes before the launch that it does not need. What ran
        # on the default stream last is ahead of this on it; another stream may be one that is gone.
        device = self._output.device
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        if stream != _DEFAULT or self._last != _DEFAULT:
            torch.cuda.current_stream(device).wait_event(self._done)
        if stream != self._home:  # whose memory the inputs are
            for value in self.inputs.values():
                value.record_stream(torch.cuda.current_stream(device))
        targets, sources = [self.inputs[name] for name in inputs], list(inputs.values())
        if numbers is None:
            torch.ops.dpa.loop_inputs_(targets, sources)
        else:
            numbers.into(self.inputs["random"], generator, targets, sources)
        self._graph.replay()
        result = self._output.clone()
        self._done.record(torch.cuda.current_stream(device))
        self._last = stream
        return result


def _static(value: Tensor) -> Tensor:
    dtype = torch.float32 if value.is_floating_point() else value.dtype
    return torch.empty(value.shape, dtype=dtype, device=value.device).copy_(value)
