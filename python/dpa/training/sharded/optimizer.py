"""An optimizer whose work and state are sharded over data-parallel processes."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpa.library.checks import require
from dpa.library.holding import holding
from dpa.training.sharded.exchange import Exchange, exchange_of
from dpa.training.sharded.layout import Chunk, lay_out

_CHUNKS = 6
# Optimizer state of a parameter that is not one value per element.
_SCALARS = ("step", "mu_product", "eta", "mu")
# Options of dpa.training.AdamW that need all gradients, or the caller's, and what does it here.
_OF_WHOLE = {"max_norm": "clip_grad_norm_", "ema": "EMA.update", "clear_grads": "zero_grad"}


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer for data-parallel training that every process runs on its share of the weights.

    It replaces DDP and a whole optimizer in every process. Gradients are averaged over the
    processes. Every process receives the gradients of its shard, keeps the optimizer's state for
    that shard alone, and sends its new weights to all others. After each step the weights are equal
    in all processes; ``grad`` keeps what this process computed::

        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)
        loss = ...             # of this process's part of the batch, through the model itself
        loss.backward()        # sends gradients as they become ready
        optimizer.step()       # sends new weights

    On GPUs of one machine with NVLink, DMA copy engines write gradients and weights into the other
    processes' buffers (PyTorch's symmetric memory), so that the kernels keep all multiprocessors.
    Elsewhere it uses the collectives of ``torch.distributed``. A whole step can be
    captured by :class:`dpa.training.GraphedStep`.

    Every process must run the same backwards; a backward of one process alone belongs in
    :meth:`no_sync`, followed by ``zero_grad``. The first step records the order of the gradients
    and moves the parameters into one buffer: it must not be captured.

    Args:
        params: parameters or groups of them that require gradients, all of one dtype and on one
            device, the same in every process; the values of the first process are broadcast. They
            become contiguous. Buffers and frozen parameters are not synchronised.
        optimizer: a class whose updates are element by element: ``SGD``, ``Adam``, ``AdamW`` and
            their like.
        group: the processes; by default all.
        options: the class's own, but ``max_norm``, ``ema`` and ``clear_grads``:
            :meth:`clip_grad_norm_`, ``EMA.update`` after ``step`` and ``zero_grad`` do that.

    Raises:
        ValueError: on parameters of several dtypes or devices, frozen ones, one given twice, and
            options that it does not support.
        RuntimeError: from ``step``, where a parameter has no gradient or another storage, or
            gradients were changed after the backward, while they were being sent, and under a
            ``GradScaler``. Writes that PyTorch does not count are not noticed: through
            ``grad.data``, and a GradScaler's ``unscale_`` where ``step`` is not called by it.

    Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models
    (2020), stage 1.

    """

    # A GradScaler then hands over its scale instead of changing gradients, and `step` raises.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        optimizer: Callable[..., torch.optim.Optimizer],
        *,
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ):
        plain = optimizer(params, **options)
        for name, instead in _OF_WHOLE.items():
            value = getattr(plain, name, None)
            require(not value, f"ShardedOptimizer: {name}", f"be left to {instead}", value)
        super().__init__(plain.param_groups, plain.defaults)
        self._make = functools.partial(optimizer, **options)
        self._group = group = group or dist.group.WORLD
        members = [each["params"] for each in self.param_groups]
        self._parameters: list[Tensor] = [p for each in members for p in each]
        self._groups = [i for i, each in enumerate(members) for _ in each]
        kinds = sorted({(p.dtype, p.device) for p in self._parameters}, key=str)
        got, me = ", ".join(f"{dtype} on {device}" for dtype, device in kinds), "ShardedOptimizer"
        require(len(kinds) < 2, f"{me}: params", "have one dtype and device", got)
        if not all(p.requires_grad for p in self._parameters):
            raise ValueError(f"{me}: params must require gradients; leave others out")
        differ = len(set(self._parameters)) == len(self._parameters)
        require(differ, f"{me}: params", "differ", "one twice")
        first = dist.get_global_rank(group, 0)
        for p in self._parameters:
            dist.broadcast(p.detach(), first, group=group)
        self._exchange: Exchange | None = None  # until the first step
        self._chunks: list[Chunk] = []
        self._shards: list[nn.Parameter] = []  # one a chunk: what this process updates
        self._inner: torch.optim.Optimizer | None = None  # of the shards
        self._places: dict[int, int] = {}  # the parameters' addresses
        self._held = False
        self._order: dict[int, None] = {}  # parameters, as their first gradients came
        self._forget()
        me = weakref.ref(self)
        for i, p in enumerate(self._parameters):
            p.register_post_accumulate_grad_hook(functools.partial(_arrived, me, i))

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("ShardedOptimizer: copies must be made by state_dict and load_state_dict")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only the constructor takes parameters."""
        if hasattr(self, "_parameters"):
            raise RuntimeError("ShardedOptimizer: all parameters must be given to the constructor")
        super().add_param_group(param_group)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Send no gradients inside: for all but the last backward of gradient accumulation."""
        return holding(self, _held=True)

    def _forget(self) -> None:
        """Reset the state of a step."""
        self._came: dict[int, tuple[int, int]] = {}  # the identities of gradients that are ready
        self._sent = 0  # chunks
        self._again = False  # whether a sent gradient has been accumulated again
        self._averaged = False

    def _take_up(self, i: int) -> None:
        """Register a parameter's new gradient; called in the backward."""
        self._order.setdefault(i)
        clip, rule = "ShardedOptimizer: clip_grad_norm_", "be followed by step or zero_grad"
        require(not self._averaged, clip, rule, "a backward", RuntimeError)
        if i in self._came:
            self._again = True
        elif not self._held:
            self._came[i] = _identity(self._parameters[i].grad)
        if self._exchange is None or self._again or self._held:
            return
        for number in range(self._sent, len(self._chunks)):
            if not self._came.keys() >= {*self._chunks[number].parameters}:
                return
            self._send(number)

    @torch.no_grad()
    def _send(self, number: int) -> None:
        chunk = self._chunks[number]
        grads = {i: self._gradient(i) for i in chunk.parameters}
        self._came.update((i, _identity(grad)) for i, grad in grads.items())
        self._exchange.send(chunk, [piece.of(grads[piece.parameter]) for piece in chunk.pieces])
        self._sent = number + 1

    def _gradient(self, i: int) -> Tensor:
        grad = self._parameters[i].grad
        if grad is None:
            lost = sum(p.grad is None for p in self._parameters)
            raise RuntimeError(
                "ShardedOptimizer: every parameter must have a gradient in every process, "
                f"{lost} of {len(self._parameters)} have none"
            )
        return grad

    def _send_all(self) -> Exchange:
        """Send the gradients that are not sent, or that another backward has changed."""
        grads = [self._gradient(i) for i in range(len(self._parameters))]
        exchange = self._exchange or self._lay_out()
        if any(self._parameters[i].data_ptr() != place for i, place in self._places.items()):
            raise RuntimeError(
                "ShardedOptimizer: parameters must keep the storage that the first step gave "
                "them; write to them in place"
            )
        if self._again:
            self._sent, self._again = 0, False
        elif any(_identity(grads[i]) != sent for i, sent in self._came.items()):
            raise RuntimeError(
                "ShardedOptimizer: gradients must not change after the backward, while they are "
                "being sent; use its clip_grad_norm_, and bfloat16 in place of a GradScaler"
            )
        for number in range(self._sent, len(self._chunks)):
            self._send(number)
        return exchange

    def _lay_out(self) -> Exchange:
        """Move the parameters into one buffer, in the order of their gradients."""
        like, rank = self._parameters[0], self._group.rank()
        came = [*self._order, *(i for i in range(len(self._parameters)) if i not in self._order)]
        order = torch.tensor(came, device=like.device)
        dist.broadcast(order, dist.get_global_rank(self._group, 0), group=self._group)
        self._chunks = lay_out(
            self._parameters, self._groups, order.tolist(), self._group.size(), _CHUNKS
        )
        self._exchange = exchange = exchange_of(self._chunks, like, self._group)
        for chunk in self._chunks:
            for i, place in chunk.views(chunk.of(exchange.weights), self._parameters):
                place.copy_(self._parameters[i])
                self._parameters[i].data = place
                self._places[i] = place.data_ptr()
            self._shards.append(nn.Parameter(chunk.shard(exchange.weights, rank)))
            self._shards[-1].grad = chunk.among(exchange.average)
        self._take_state()
        return exchange

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this process's shard of the weights, and exchange the new weights.

        A ``closure`` computes the loss, which is returned, and its gradients, as for any optimizer.
        """
        own, names = vars(self), ("grad_scale", "found_inf")
        scaled = [own.pop(name) for name in names if name in own]
        rule = "be called by no GradScaler (take bfloat16, or DDP)"
        require(not scaled, "ShardedOptimizer: step", rule, "one", RuntimeError)
        loss = None if closure is None else torch.enable_grad()(closure)()
        with self._on_device():
            exchange = self._send_all()
            exchange.begin()
            every = range(len(self._chunks))
            for part in [[number] for number in every] if _pipelined(self._shards[0]) else [every]:
                for number in () if self._averaged else part:
                    exchange.receive(self._chunks[number])
                self._update(part)
                for number in part:
                    exchange.share(self._chunks[number])
            exchange.finish()
        torch.autograd.graph.increment_version(self._parameters)
        self._forget()
        return loss

    def _update(self, numbers: Iterable[int]) -> None:
        """Update this process's shards of some chunks, as the groups' options now are."""
        members: dict[int, list[Tensor]] = {}
        for number in numbers:
            members.setdefault(self._chunks[number].group, []).append(self._shards[number])
        self._inner.param_groups = [
            {**self.param_groups[group], "params": shards} for group, shards in members.items()
        ]
        self._inner.step()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the averaged gradients so that their 2-norm is at most ``max_norm``.

        ``torch.nn.utils.clip_grad_norm_`` for what ``step`` uses; ``grad`` itself stays as it is.

        Returns:
            The norm over all parameters before, on the device, equal in all processes.

        """
        with self._on_device():
            exchange = self._send_all()
            for chunk in () if self._averaged else self._chunks:
                exchange.receive(chunk)
            self._averaged = True
            dtype = torch.promote_types(exchange.average.dtype, torch.float32)
            total = torch.linalg.vector_norm(exchange.average, dtype=dtype).square()
            dist.all_reduce(total, group=self._group)
            norm = total.sqrt()
            exchange.average.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, clipped ones included."""
        super().zero_grad(set_to_none)
        if self._averaged and self._exchange is not None:
            with self._on_device():
                self._exchange.begin()
                self._exchange.finish()
            self._forget()

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        device = self._parameters[0].device
        return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """The state of a whole ``optimizer``; every process must call it."""
        if self._exchange is not None and self._inner is not None:
            self.state.clear()
            for chunk, shard in zip(self._chunks, self._shards, strict=True):
                for name, value in self._inner.state[shard].items():
                    of_elements = isinstance(value, Tensor) and value.numel() == chunk.size
                    if of_elements:
                        parts = chunk.views(self._exchange.all_gather(value), self._parameters)
                    else:
                        parts = ((i, value) for i in chunk.parameters)
                    for i, part in parts:
                        own = part.clone() if isinstance(part, Tensor) else part
                        self.state[self._parameters[i]][name] = own
        state = super().state_dict()
        if self._exchange is not None:
            self._clear_state()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this class, or of ``optimizer`` itself, in every process.

        Raises:
            ValueError: parameters of a group have taken different numbers of steps: those that are
                updated together have one. Then nothing has changed.

        """
        for group in state_dict["param_groups"]:
            states = (state_dict["state"].get(i, {}) for i in group["params"])
            taken = {tuple(float(s[name]) for name in _SCALARS if name in s) for s in states}
            rule, got = "have one number of steps a group", sorted(taken)
            require(len(taken) < 2, "ShardedOptimizer: the state", rule, got)
        super().load_state_dict(state_dict)
        for group in self.param_groups:  # of an older class
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        if self._exchange is not None:
            self._take_state()

    def _clear_state(self) -> None:
        """Leave an empty state of a parameter: that there is one says that no step must make it.

        ``torch.distributed.checkpoint.state_dict`` else makes a step, of gradients of 0.
        """
        self.state.clear()
        self.state[self._parameters[0]] = {}

    @torch.no_grad()
    def _take_state(self) -> None:
        """Make the shards' optimizer, with its part of a state that has been loaded."""
        rank = self._group.rank()
        self._inner = self._make(self._shards)
        for chunk, shard in zip(self._chunks, self._shards, strict=True):
            state: dict[str, Any] = {}
            for i in chunk.parameters:
                for name, value in self.state[self._parameters[i]].items():
                    of_elements = isinstance(value, Tensor) and name not in _SCALARS
                    kept = torch.zeros_like(shard, dtype=value.dtype) if of_elements else value
                    state.setdefault(name, kept)
            for piece in chunk.pieces:
                for name, value in self.state[self._parameters[piece.parameter]].items():
                    if piece.owner == rank and isinstance(value, Tensor) and name not in _SCALARS:
                        piece.among(state[name]).copy_(piece.of(value))
            self._inner.state[shard].update(state)
        # As the class takes up a state that an older one, or PyTorch's of its name, has made.
        self._inner.__setstate__(
            {"state": self._inner.state, "param_groups": self._inner.param_groups}
        )
        self._clear_state()


def _pipelined(shard: Tensor) -> bool:
    """Whether to update chunk by chunk, so that one travels while the next is computed.

    In a graph. Otherwise the host is the limit, and one update costs it less than several.
    """
    return shard.is_cuda and torch.cuda.is_current_stream_capturing()


def _identity(tensor: Tensor | None) -> tuple[int, int]:
    """The address and version of a tensor: they change when it is replaced or written."""
    return (0, 0) if tensor is None else (tensor.data_ptr(), tensor._version)


def _arrived(optimizer: weakref.ref[ShardedOptimizer], i: int, p: Tensor) -> None:
    """Forward a new gradient, without keeping the optimizer alive."""
    if (alive := optimizer()) is not None:
        alive._take_up(i)
