"""Convolutions of images in a capture: channels-last, weights copied together, gradients in two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
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
        # Nothing but the copy of all weights may read its gradient: that waits.
        read_later = id(weight) in self._known
        copy = self._copy_of(weight, dtype)
        sizes = _sizes(*args, **kwargs)
        if sizes is None:
            return torch.conv2d(x.to(dtype=dtype, memory_format=_LAST), copy, *args, **kwargs)
        if _is_in_pairs(x, weight, *sizes):
            x, copy = _by_pairs(x, copy, *sizes[1:2])
            sizes, read_later = ((1, 1), (0, 0), (1, 1), 1), False
        x = x.to(dtype=dtype, memory_format=_LAST)
        alone = lambda: read_later and self._uses[id(weight)] == 1  # noqa: E731
        return _Convolution.apply(self._beside, alone, x, copy, *sizes)

    def _copy_of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight channels-last in a dtype."""
        group = self._known.get(id(weight))
        if group is None:
            return _Weight.apply(weight, dtype)
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
        self._join(_KEPT - 1)
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        return self._stream

    def started(self, *tensors: Tensor) -> None:
        """Keep tensors until what has been launched there is done with them."""
        self._running.append((self._stream.record_event(), tensors))

    def finish(self) -> None:
        """Let the current stream wait for all of it."""
        self._join(0)

    def _join(self, left: int) -> None:
        while len(self._running) > left:
            event, _ = self._running.pop(0)
            event.wait()


class _Convolution(torch.autograd.Function):
    """A convolution without bias."""

    @staticmethod
    def forward(ctx: Any, beside: Any, alone: Any, x: Tensor, weight: Tensor, *sizes: Any) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.beside, ctx.alone, ctx.sizes = beside, alone, sizes
        stride, padding, dilation, groups = sizes
        return torch.conv2d(x, weight, None, stride, padding, dilation, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (x, weight), (stride, padding, dilation, groups) = ctx.saved_tensors, ctx.sizes
        of_x, of_weight = ctx.needs_input_grad[2:4]

        def gradients(*wanted: bool) -> Any:
            sizes = None, stride, padding, dilation, False, (0, 0), groups, (*wanted, False)
            return torch.ops.aten.convolution_backward(grad, x, weight, *sizes)

        if not x.is_cuda or not of_weight or torch.is_grad_enabled() or not ctx.alone():
            return None, None, *gradients(of_x, of_weight)[:2], None, None, None, None
        with torch.cuda.stream(ctx.beside.start(x.device)):
            grad_weight = gradients(False, True)[1]
            ctx.beside.started(grad, x, grad_weight)
        grad_x = gradients(True, False)[0] if of_x else None
        return None, None, grad_x, grad_weight, None, None, None, None


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


class _Weight(torch.autograd.Function):
    """A weight channels-last in a dtype, and its gradient as the weight is, by one copy each."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.like = weight
        return weight.to(dtype=dtype, memory_format=_LAST, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.empty_like(ctx.like).copy_(grad), None


def _sizes(
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[Any, ...] | None:
    """Return stride, padding, dilation and groups; None with a bias, or padding by name."""
    if bias is not None or isinstance(padding, str):
        return None
    pair = lambda n: (n, n) if isinstance(n, int) else tuple(n) * (2 // len(n))  # noqa: E731
    return pair(stride), pair(padding), pair(dilation), groups


def _is_in_pairs(
    x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int
) -> bool:
    """Whether few channels make a convolution of stride 2 slow, and nobody wants the gradient."""
    few = weight.shape[1] <= 4 and min(weight.shape[2:]) >= 5 and groups == 1
    square = len({*padding, *weight.shape[2:]}) <= 2 and padding[0] == padding[1]
    return few and square and stride == (2, 2) and dilation == (1, 1) and not x.requires_grad


def _by_pairs(x: Tensor, weight: Tensor, padding: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return images and weight whose convolution of stride 1 is the one of stride 2.

    2 x 2 pixels become one of four times the channels, 8 or 16 of them for the tensor cores: 7 x 7
    taps of 3 channels, which are padded to 8 there, become 4 x 4 taps of 12.
    """
    (batch, channels, *extent), side, before = x.shape, weight.shape[2], padding[0]
    lead = before % 2  # so that the first pixel is the first of a pair
    taps, front = (side + lead + 1) // 2, (before + lead) // 2
    height, width = ((n + 2 * before - side) // 2 + taps for n in extent)  # of the pairs
    padded = 8 if channels <= 2 else 16
    pairs = x.new_zeros(batch, height, width, padded, dtype=weight.dtype)
    odd = [n % 2 for n in extent]
    pixels = F.pad(x, (0, odd[1], 0, odd[0])) if any(odd) else x
    rows = min((extent[0] + 1) // 2, height - front)  # that a window reaches
    columns = min((extent[1] + 1) // 2, width - front)
    inside = pairs[:, front : front + rows, front : front + columns, : 4 * channels]
    pixels = pixels[:, :, : 2 * rows, : 2 * columns].unflatten(3, (columns, 2))
    pixels = pixels.unflatten(2, (rows, 2)).permute(0, 2, 4, 1, 3, 5)
    inside.unflatten(3, (channels, 2, 2)).copy_(pixels)
    rest = 2 * taps - side - lead
    weight = F.pixel_unshuffle(F.pad(weight, (lead, rest, lead, rest)), 2)
    weight = F.pad(weight, (0, 0, 0, 0, 0, padded - 4 * channels)).contiguous(memory_format=_LAST)
    return pairs.permute(0, 3, 1, 2), weight
