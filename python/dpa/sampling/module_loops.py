"""Denoising loops around any module, captured in CUDA graphs."""

from __future__ import annotations

from collections.abc import Hashable

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
            graph, *rests_on = self.find(key) or (None,)
            if graph is not None and not all(one.holds() for one in rests_on):
                del self.kept[key]
                graph, self._misses = None, self._misses + 1
            if graph is not None:
                self._misses = 0
                return graph.replay(inputs, numbers if numbers.rows else None, generator)
            if numbers.rows:
                inputs = inputs | {"random": numbers(generator).float()}
            answers = MaskAnswers()
            with answers.used():
                result = body(inputs)
                state, loop = ModuleState(module), (numbers.device, body, inputs, result)
                if self._misses <= _MISSES and not state.hooked():
                    made = lambda: (_checked(*loop), state, answers)  # noqa: E731
                    self.capture(key, numbers.device, made)
            return result


def _checked(device: torch.device, body: Body, inputs: Inputs, result: Tensor) -> LoopGraph:
    """Capture a loop, whose replay gives a result; raise RuntimeError where it does not."""
    graph = LoopGraph(device, body, inputs, known=False)
    error = relative_error(graph.replay(inputs, None, None), result)
    most = limit(LOOP_LIMITS, (torch.float32,), device)
    if proves(result) and error > most:
        raise RuntimeError(f"its replay differs by {error:.1e} (relative), more than {most:.0e}")
    return graph
