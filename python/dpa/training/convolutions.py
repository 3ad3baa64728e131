"""Convolutions of images in a capture: channels-last, weights copied together, gradients in two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_LAST = torch.channels_last
_KEPT = 2  # convolutions whose weight gradients may be under way


class Convolutions:
    """Runs convolutions on channels-last images, in autocast's dtype where it is entered.

    On a GPU a weight's gradient is computed on a stream beside the one that images' gradients go
    through: small maps fill the device with neither. The gradients of all weights come together
    where they are copied into the weights' own order.

    Args:
        weights: that are copied together when the first of them is needed.

    """

    def __init__(self, weights: Iterable[Tensor] = ()) -> None:
        alike: dict[torch.dtype, list[Tensor]] = {}
        for weight in weights:
            if weight.is_contiguous():  # as its gradient is to be
                alike.setdefault(weight.dtype, []).append(weight)
        self._known = {id(w): group for group in alike.values() for w in group}
        self._made: dict[tuple[int, torch.dtype], Tensor] = {}
        self._beside = _Beside()
        self._uses: Counter[int] = Counter()

    def __call__(self, x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As torch.conv2d."""
        kind = x.device.type
        narrow = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
        dtype = torch.get_autocast_dtype(kind) if narrow else x.dtype
        if weight.dtype != dtype and not narrow:
            return torch.conv2d(x, weight, *args, **kwargs)
        self._uses[id(weight)] += 1
        copy = self._copy_of(weight, dtype)
        sizes = _sizes(*args, **kwargs)
        if sizes is None:
            return torch.conv2d(x.to(dtype=dtype, memory_format=_LAST), copy, *args, **kwargs)
        # A first layer's images may lie as they are: the op reads them so.
        first = weight.shape[1] <= 4 and sizes[0] == 2 and min(weight.shape[2:]) >= 5
        order = torch.preserve_format if first else _LAST
        x = x.to(dtype=dtype, memory_format=order)
        # Nothing but the copy of all weights may read its gradient: that waits.
        alone = lambda: id(weight) in self._known and self._uses[id(weight)] == 1  # noqa: E731
        return _Convolution.apply(self._beside, alone, x, copy, *sizes)

    def _copy_of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight channels-last in a dtype."""
        group = self._known.get(id(weight))
        if group is None and not weight.is_contiguous():  # its gradient is to have its order
            return weight.to(dtype=dtype, memory_format=_LAST)
        if group is None:
            return _Weights.apply(self._beside, dtype, weight)[0]
        key = id(weight), dtype
        if key not in self._made:
            for one, copy in zip(group, _Weights.apply(self._beside, dtype, *group), strict=True):
                self._made[id(one), dtype] = copy
        return self._made[key]


class _Beside:
    """A stream for gradients of weights."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._running: list[tuple[Any, ...]] = []  # an event, and what is read and written until it

    def start(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream, which has waited for the current one."""
        self.finish(_KEPT - 1)
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        return self._stream

    def started(self, *tensors: Tensor) -> None:
        """Keep tensors until what has been launched there is done with them."""
        self._running.append((self._stream.record_event(), tensors))

    def finish(self, left: int = 0) -> None:
        """Let the current stream wait for all of it, but for so many that began last."""
        while len(self._running) > left:
            event, _ = self._running.pop(0)
            event.wait()


class _Convolution(torch.autograd.Function):
    """`dpa::conv2d`, whose weight's gradient goes to the stream beside."""

    @staticmethod
    def forward(ctx: Any, beside: Any, alone: Any, x: Tensor, weight: Tensor, *sizes: int) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.beside, ctx.alone, ctx.sizes = beside, alone, sizes
        return torch.ops.dpa.conv2d(x, weight, *sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad[2:4]
        gradients = lambda *wanted: torch.ops.dpa.conv2d_backward(  # noqa: E731
            grad, x, weight, *ctx.sizes, wanted
        )
        if not x.is_cuda or not of_weight or torch.is_grad_enabled() or not ctx.alone():
            return None, None, *gradients(of_x, of_weight), None, None
        with torch.cuda.stream(ctx.beside.start(x.device)):
            grad_weight = gradients(False, True)[1]
            ctx.beside.started(grad, x, grad_weight)
        grad_x = gradients(True, False)[0] if of_x else None
        return None, None, grad_x, grad_weight, None, None


class _Weights(torch.autograd.Function):
    """Weights channels-last in a dtype, and their gradients as they are, by one copy each way."""

    @staticmethod
    def forward(
        ctx: Any, beside: _Beside, dtype: torch.dtype, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.beside, ctx.dtype = beside, weights[0].dtype
        return tuple(torch.ops.dpa.weights_in_order(weights, dtype, True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # somebody will differentiate them
            made = (g if g is None else g.to(ctx.dtype).contiguous() for g in grads)
            return None, None, *made
        ctx.beside.finish()
        given = [g for g in grads if g is not None]
        copies = iter(torch.ops.dpa.weights_in_order(given, ctx.dtype, False) if given else ())
        return None, None, *(None if g is None else next(copies) for g in grads)


def _sizes(
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[int, int] | None:
    """Return stride and padding where they are all that `dpa::conv2d` needs to know; else None."""
    if bias is not None or isinstance(padding, str) or groups != 1:
        return None
    each = [{n} if isinstance(n, int) else set(n) for n in (stride, padding, dilation)]
    if any(len(n) != 1 for n in each) or each[2] != {1}:
        return None
    return each[0].pop(), each[1].pop()
