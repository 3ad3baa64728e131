"""Helpers of a training loop: the average of the weights, CUDA graphs of calls and of steps."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .graphed_calls import graph_calls, ungraph_calls
from .graphs import capturing, no_garbage

__all__ = ["EMA", "GraphedStep", "graph_calls", "ungraph_calls"]


_captured: weakref.WeakSet[GraphedStep] = weakref.WeakSet()


def release_graphs() -> None:
    """Drop the graph of every captured step; its next call captures anew."""
    for step in list(_captured):
        step.release()


def _local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor (FSDP2), or the tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class EMA:
    """Exponential moving average of a model's parameters, all of them in a few kernels.

    ``average <- decay * average + (1 - decay) * parameter``, where the decay grows with the number
    ``n`` of updates, so that the start is forgotten::

        decay = clamp(1 - (1 + n / inv_gamma) ** -power, min_decay, max_decay)

    Averages are float32 for 16-bit parameters. Buffers are taken as they are when the averages are
    applied. A sharded model (FSDP2) has its averages sharded in the same way.

    Args:
        model: whose parameters are averaged, those that train and those that do not.
        power: of the decay's growth; 2/3 for a million steps, 3/4 for fewer.
        max_decay: the decay's limit.
        min_decay: the least decay.
        inv_gamma: how many updates the growth takes to set in.

    Source: the schedule is that of Chi et al., Diffusion Policy (2023).

    """

    def __init__(
        self,
        model: nn.Module,
        power: float = 0.75,
        max_decay: float = 0.9999,
        min_decay: float = 0.0,
        inv_gamma: float = 1.0,
    ):
        if not 0.0 <= min_decay <= max_decay <= 1.0:
            raise ValueError(
                "EMA: min_decay and max_decay must be ordered in 0..1, "
                f"got {min_decay}, {max_decay}"
            )
        if not (power >= 0 and inv_gamma > 0):
            raise ValueError(
                f"EMA: power must be at least 0 and inv_gamma above 0, got {power}, {inv_gamma}"
            )
        self.model = model
        self.power, self.max_decay, self.min_decay = power, max_decay, min_decay
        self.inv_gamma = inv_gamma
        self.updates = 0
        self.averages = [self._copy(parameter) for parameter in model.parameters()]

    @staticmethod
    def _copy(parameter: Tensor) -> Tensor:
        value = _local(parameter.detach())
        return value.to(torch.promote_types(value.dtype, torch.float32), copy=True)

    @property
    def decay(self) -> float:
        """The decay of the next update."""
        grown = 1.0 - (1.0 + self.updates / self.inv_gamma) ** -self.power
        return min(max(grown, self.min_decay), self.max_decay)

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the model; call it after the optimizer's step."""
        now = [_local(parameter.detach()) for parameter in self.model.parameters()]
        now = [new.to(old.dtype) for new, old in zip(now, self.averages, strict=True)]
        torch._foreach_lerp_(self.averages, now, 1.0 - self.decay)
        self.updates += 1

    def _check_shapes(self, name: str, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != len(self.averages):
            raise ValueError(
                f"EMA: {name} must hold {len(self.averages)} averages, got {len(tensors)}"
            )
        for given, kept in zip(tensors, self.averages, strict=True):
            if given.shape != kept.shape:
                raise ValueError(
                    f"EMA: {name} must have the shapes of the averages, got {tuple(given.shape)} "
                    f"for {tuple(kept.shape)}"
                )

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """Write the averages, and the trained model's buffers, into a model of the same shapes."""
        parameters = [_local(parameter.detach()) for parameter in model.parameters()]
        self._check_shapes("model", parameters)
        torch._foreach_copy_(parameters, self.averages)
        for kept, new in zip(model.buffers(), self.model.buffers(), strict=True):
            kept.copy_(new)

    @contextlib.contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """Give the model its averages inside a ``with`` block, and its own weights back after."""
        parameters = [_local(parameter.detach()) for parameter in self.model.parameters()]
        with torch.no_grad():
            own = [parameter.clone() for parameter in parameters]
            torch._foreach_copy_(parameters, self.averages)
        try:
            yield self.model
        finally:
            with torch.no_grad():
                torch._foreach_copy_(parameters, own)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"updates": self.updates, "averages": self.averages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up the averages of a checkpoint.

        Raises:
            ValueError: it holds others; then nothing has changed.

        """
        if missing := {"averages", "updates"} - set(state):
            raise ValueError(f"EMA: state must hold averages and updates, got none of {missing}")
        self._check_shapes("state", state["averages"])
        with torch.no_grad():
            for kept, new in zip(self.averages, state["averages"], strict=True):
                kept.copy_(new)
        self.updates = state["updates"]


class GraphedStep:
    """A whole training step in one CUDA graph: one launch for all its kernels.

    Called like the step itself. The first ``warmup`` calls run as they are, on a side stream, and
    train like any other; the next one is captured, and from then on each call copies its batch into
    the captured one's place and replays. Where there is no CUDA every call runs as it is, so that a
    script is the same on any machine.

    The step must begin with ``optimizer.zero_grad(set_to_none=True)``, look at no value on the
    host, and have an optimizer that can be captured: ``AdamW(..., fused=True, capturable=True)``,
    with a tensor for ``lr`` where a schedule changes it. Random numbers drawn in it are new at
    every replay. Autocast and a GradScaler may be part of it; regions of autocast begin and end
    inside.

    Args:
        step: called with the batch; returns a tensor, or a tuple or dict of tensors.
        warmup: calls before the capture; 11 under DDP.

    Raises:
        ValueError: on a batch whose shapes or dtypes are not those of the captured one.

    """

    def __init__(self, step: Callable[..., Any], warmup: int = 3):
        if not callable(step):
            raise ValueError(f"GraphedStep: step must be callable, got {type(step)}")
        if warmup < 1:
            raise ValueError(f"GraphedStep: warmup must be at least 1, got {warmup}")
        self.step = step
        self.warmup = warmup
        self.calls = 0
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
        self.calls += 1
        if not batch or not batch[0].is_cuda:
            return self.step(*batch)
        with torch.cuda.device(batch[0].device):
            if self.calls <= self.warmup:
                return self._on_side_stream(batch)
            if self._graph is None:
                self._capture(batch)
            self._fill(batch)
            assert self._graph is not None
            self._graph.replay()
            return torch.utils._pytree.tree_map(lambda x: x.detach().clone(), self._result)

    def _on_side_stream(self, batch: tuple[Tensor, ...]) -> Any:
        # Captured work runs on a stream of its own, and autograd remembers on which one it ran.
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = self.step(*batch)
        torch.cuda.current_stream().wait_stream(self._stream)
        return result

    def _capture(self, batch: tuple[Tensor, ...]) -> None:
        self._batch = tuple(x.detach().clone() for x in batch)
        graph = torch.cuda.CUDAGraph()
        with no_garbage(), capturing(graph, stream=self._stream):
            self._result = self.step(*self._batch)
        self._graph = graph
        _captured.add(self)

    def release(self) -> None:
        """Drop the graph and its memory; the next call captures anew."""
        self._graph, self._batch, self._result = None, (), None
        _captured.discard(self)

    def _fill(self, batch: tuple[Tensor, ...]) -> None:
        describe = lambda tensors: [(tuple(x.shape), x.dtype) for x in tensors]  # noqa: E731
        if describe(batch) != describe(self._batch):
            raise ValueError(
                f"GraphedStep: batch must be as captured, {describe(self._batch)}, "
                f"got {describe(batch)}"
            )
        for kept, new in zip(self._batch, batch, strict=True):
            kept.copy_(new, non_blocking=True)
