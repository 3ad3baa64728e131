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
class Loop:
    """A loop around a module.

    Attributes:
        module: what it calls.
        kind: what the result depends on but for what the module is made of, the shapes of the
            inputs and the settings of kernels.
        inputs: but for its random numbers.
        body: ``body(inputs)`` runs it.

    """

    module: nn.Module
    kind: tuple[Hashable, ...]
    inputs: Inputs
    body: Body

    @property
    def key(self) -> Hashable:
        """What a graph of it is kept by."""
        shapes = tuple((n, tuple(v.shape), v.dtype) for n, v in self.inputs.items())
        return *self.kind, shapes, kernel_settings()


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

    def replay(self, loop: Loop, numbers: RandomNumbers, generator: Generators) -> Tensor | None:
        """Return what a captured loop like this makes of its inputs; None where there is none."""
        key = loop.key
        with self.lock:
            graph, *rests_on = self.find(key) or (None,)
            if graph is not None and not all(one.holds() for one in rests_on):
                del self.kept[key]
                graph, self._misses = None, self._misses + 1
            if graph is None:
                return None
            self._misses = 0
            return graph.replay(loop.inputs, numbers if numbers.rows else None, generator)

    def run(
        self,
        loop: Loop,
        plain: Loop,
        trace: Callable[[Inputs], Body],
        dtype: torch.dtype,
        numbers: RandomNumbers,
        generator: Generators,
    ) -> Tensor:
        """Return what a loop makes of its inputs, replayed from the second call on.

        What is captured is ``trace(inputs)``, which computes ``plain``, the loop around the module
        as it is, in ``dtype``; or ``loop`` where that raises or gives something else: the first
        replay of a graph is compared with the loop.
        """
        with self.lock:
            result = self.replay(loop, numbers, generator)
            if result is not None:
                return result
            random = {"random": numbers(generator).float()} if numbers.rows else {}
            answers = MaskAnswers()
            with answers.used():
                result = loop.body(loop.inputs | random)
                if self._misses > _MISSES:
                    return result
                graph = self._traced(plain, trace, dtype, random, result)
                loop = loop if graph is None else plain
                state = ModuleState(loop.module)

                def make() -> tuple[LoopGraph, ModuleState, MaskAnswers]:
                    inputs = loop.inputs | random
                    return graph or _checked(loop.body, inputs, result), state, answers

                if not state.hooked():
                    self.capture(loop.key, numbers.device, make)
            return result

    def _traced(
        self,
        plain: Loop,
        trace: Callable[[Inputs], Body],
        dtype: torch.dtype,
        random: Inputs,
        result: Tensor,
    ) -> LoopGraph | None:
        """Return the graph of a traced loop; None where there is none that gives the result."""
        if plain.kind in self.untraced or ModuleState(plain.module).hooked():
            return None
        inputs = plain.inputs | random
        try:
            exact = functools.partial(plain.body, inputs)
            return _checked(trace(inputs), inputs, result, dtype, exact)
        except torch.OutOfMemoryError:
            return None  # the next call tries again
        except Exception as error:  # whatever a trace raises, the module runs as it is
            self.untraced[plain.kind] = str(error)
            return None


def _checked(
    body: Body,
    inputs: Inputs,
    result: Tensor,
    dtype: torch.dtype = torch.float32,
    exact: Callable[[], Tensor] | None = None,
) -> LoopGraph:
    """Capture a loop, whose replay gives a result; raise RuntimeError where it does not.

    Two loops in 16 bits may differ by their rounding, which some networks magnify. There the replay
    must be as near to the ``exact`` result as the other is, but for half of that distance.
    """
    device = result.device
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
