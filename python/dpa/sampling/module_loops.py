"""Denoising loops around any module, captured in CUDA graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpa.library.capture import MaskAnswers, kernel_settings
from dpa.packed.agreement import LOOP_LIMITS, limit, proves, relative_error
from dpa.sampling.arguments import Inputs
from dpa.sampling.fused_loop import Body, LoopGraph, LoopGraphs
from dpa.sampling.rng import RandomNumbers
from dpa.schedulers.tables import Generators
from dpa.tracking import ModuleState

_MISSES = 8  # graphs in a row whose module changed


@dataclass(frozen=True)
class Trace:
    """What is captured in the place of a loop around a module, which it computes otherwise.

    Attributes:
        module: what is traced.
        kind: of the loop, as :meth:`ModuleLoops.run` takes it.
        inputs: of the loop.
        make: ``make(inputs)`` returns the loop, or raises.
        plain: the loop around the module as it is, in the module's own dtype.
        dtype: of its arithmetic.

    """

    module: nn.Module
    kind: tuple[Hashable, ...]
    inputs: Inputs
    make: Callable[[Inputs], Body]
    plain: Body
    dtype: torch.dtype


class ModuleLoops(LoopGraphs):
    """Captured loops around any module, each with what its module was when it was captured.

    A graph reads the module's parameters where they lie, so writes in place need no notice.

    Attributes:
        untraced: why modules run as they are, by kind of loop.

    """

    def __init__(self) -> None:
        super().__init__()
        self._misses = 0
        self.untraced: dict[Hashable, str] = {}

    @property
    def exception(self) -> tuple[str, str] | None:
        """How loops around the module as it is run, and why they are not traced; or None."""
        for way, why in (("kernel by kernel", self.refused), ("one CUDA graph", self.untraced)):
            if why:
                return way, next(reversed(why.values()))
        return None

    def replay(
        self,
        kind: tuple[Hashable, ...],
        inputs: Inputs,
        numbers: RandomNumbers,
        generator: Generators,
    ) -> Tensor | None:
        """Return what a captured loop of that kind makes of its inputs; None where there is none.

        ``kind`` is what the result depends on but for the module, its inputs' shapes and the
        settings of kernels.
        """
        key = _key(kind, inputs)
        with self.lock:
            graph, *rests_on = self.find(key) or (None,)
            if graph is not None and not all(one.holds() for one in rests_on):
                del self.kept[key]
                graph, self._misses = None, self._misses + 1
            if graph is None:
                return None
            self._misses = 0
            return graph.replay(inputs, numbers if numbers.rows else None, generator)

    def run(
        self,
        module: nn.Module,
        kind: tuple[Hashable, ...],
        inputs: Inputs,
        body: Body,
        numbers: RandomNumbers,
        generator: Generators,
        trace: Trace,
    ) -> Tensor:
        """Return ``body(inputs)`` with the loop's random numbers, replayed from the second call on.

        What is captured is the trace, or the body where that has none or gives something else: the
        first replay of a graph is compared with the body.
        """
        with self.lock:
            result = self.replay(kind, inputs, numbers, generator)
            if result is not None:
                return result
            random = {"random": numbers(generator).float()} if numbers.rows else {}
            answers = MaskAnswers()
            with answers.used():
                result = body(inputs | random)
                if self._misses > _MISSES:
                    return result
                graph = self._traced(trace, numbers.device, random, result)
                if graph is not None:
                    module, kind, inputs = trace.module, trace.kind, trace.inputs
                loop = numbers.device, inputs | random, result

                def make() -> tuple[LoopGraph, ModuleState, MaskAnswers]:
                    return graph or _checked(body, *loop), state, answers

                state = ModuleState(module)
                if not state.hooked():
                    self.capture(_key(kind, inputs), numbers.device, make)
            return result

    def _traced(
        self, trace: Trace, device: torch.device, random: Inputs, result: Tensor
    ) -> LoopGraph | None:
        """Return the graph of a traced loop; None where there is none that gives the result."""
        if trace.kind in self.untraced or ModuleState(trace.module).hooked():
            return None
        inputs = trace.inputs | random
        try:
            exact = functools.partial(trace.plain, inputs)
            return _checked(trace.make(inputs), device, inputs, result, trace.dtype, exact)
        except torch.OutOfMemoryError:
            return None  # the next call tries again
        except Exception as error:  # whatever a trace raises, the module runs as it is
            self.untraced[trace.kind] = str(error)
            return None


def _key(kind: tuple[Hashable, ...], inputs: Inputs) -> Hashable:
    shapes = tuple((n, tuple(v.shape), v.dtype) for n, v in inputs.items())
    return *kind, shapes, kernel_settings()


def _checked(
    body: Body,
    device: torch.device,
    inputs: Inputs,
    result: Tensor,
    dtype: torch.dtype = torch.float32,
    exact: Callable[[], Tensor] | None = None,
) -> LoopGraph:
    """Capture a loop, whose replay gives a result; raise RuntimeError where it does not.

    Two loops in 16 bits may differ by their rounding, which some networks magnify. There the replay
    must be as near to the ``exact`` result as the other is, but for half of that distance.
    """
    graph = LoopGraph(device, body, inputs, known=False)
    found = graph.replay(inputs, None, None)
    error, most = relative_error(found, result), limit(LOOP_LIMITS, (torch.float32, dtype), device)
    if not proves(result) or error <= most:
        return graph
    if exact is not None and dtype != torch.float32:
        best = exact()
        if relative_error(found, best) <= 1.5 * relative_error(result, best) < float("inf"):
            return graph
    raise RuntimeError(f"its replay differs by {error:.1e} (relative), more than {most:.0e}")
