"""A whole training step in one CUDA graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dpa.library.capture import capturing, gradients_kept, leaving_failed
from dpa.library.checks import require

_captured: weakref.WeakSet[GraphedStep] = weakref.WeakSet()


def release_graphs() -> None:
    """Drop the graph of every captured step; its next call captures anew."""
    for step in list(_captured):
        step.release()


class GraphedStep:
    """A whole training step in one CUDA graph: one launch for all its kernels.

    Called like the step itself. The first ``warmup`` calls run as they are, on a side stream, and
    train like any other; the next one is captured, and from then on each call copies its batch into
    the captured one's place and replays. Where there is no CUDA every call runs as it is, so that a
    script is the same on any machine.

    The step must begin with ``optimizer.zero_grad(set_to_none=True)``, read no value on the
    host, and have an optimizer that can be captured: ``AdamW(..., fused=True, capturable=True)``,
    with a tensor for ``lr`` where a schedule changes it. Random numbers drawn in it are new at
    every replay. Autocast and a GradScaler may be part of it; regions of autocast begin and end
    inside.

    Args:
        step: called with the batch; returns a tensor, or a tuple or dict of tensors.
        warmup: calls before the capture; 11 under DDP.

    Raises:
        TypeError: on a batch that is not of tensors.
        ValueError: on a batch whose shapes or dtypes are not those of the captured one.

    """

    def __init__(self, step: Callable[..., Any], warmup: int = 3):
        require(callable(step), "GraphedStep: step", "be callable", type(step))
        require(warmup > 0, "GraphedStep: warmup", "be at least 1", warmup)
        self.step, self.warmup, self.calls = step, warmup, 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: tuple[Tensor, ...] = ()
        self._result: Any = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def captured(self) -> bool:
        """Whether calls replay the graph by now."""
        return self._graph is not None

    def __call__(self, *batch: Tensor) -> Any:
        """Run the step on tensors of a CUDA device; the result is a copy that the caller owns."""
        got = ", ".join(type(x).__name__ for x in batch)
        plain = all(isinstance(x, Tensor) for x in batch)
        require(plain, "GraphedStep: batch", "be tensors", got, TypeError)
        self.calls += 1
        if not batch or not batch[0].is_cuda:
            return self.step(*batch)
        with torch.cuda.device(batch[0].device):
            if self.calls <= self.warmup:
                return self._on_side_stream(batch)
            if self._graph is None:
                self._capture(batch)
            self._fill(batch)
            self._graph.replay()
            return torch.utils._pytree.tree_map(lambda x: x.detach().clone(), self._result)

    def _on_side_stream(self, batch: tuple[Tensor, ...]) -> Any:
        # Capture uses a stream of its own, and autograd records the stream of each node.
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = self.step(*batch)
        torch.cuda.current_stream().wait_stream(self._stream)
        return result

    def _capture(self, batch: tuple[Tensor, ...]) -> None:
        graph, kept = torch.cuda.CUDAGraph(), tuple(x.detach().clone() for x in batch)
        with (
            leaving_failed(kept[0].device, graph),
            gradients_kept(),
            capturing(graph, stream=self._stream),
        ):
            result = self.step(*kept)
        self._graph, self._batch, self._result = graph, kept, result
        _captured.add(self)

    def release(self) -> None:
        """Drop the graph and its memory; the next call captures anew."""
        self._graph, self._batch, self._result = None, (), None
        _captured.discard(self)

    def _fill(self, batch: tuple[Tensor, ...]) -> None:
        kinds = [[(tuple(x.shape), x.dtype) for x in those] for those in (self._batch, batch)]
        rule = f"be as captured, {kinds[0]}"
        require(kinds[0] == kinds[1], "GraphedStep: batch", rule, kinds[1])
        for kept, new in zip(self._batch, batch, strict=True):
            kept.copy_(new, non_blocking=True)
