"""A network on images, channels-last inside: cuDNN's convolutions and dpa's norms like it so.

The network's own code runs. While it does, its calls of PyTorch's functions are redirected: a
convolution takes its input and weight channels-last, and a norm waits for the residual sum and the
ReLU that may follow, so that all three are one op each way. Running statistics are updated at the
end, all together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from dpa.training.convolutions import Convolutions

_own_calls = torch._C.DisableTorchFunction  # the mode is not asked


class ChannelsLast(TorchFunctionMode):
    """Where it is entered, convolutions, norms and pooling of images run channels-last.

    Args:
        weights: of convolutions, which are copied together when the first of them is needed.

    """

    def __init__(self, weights: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._convolutions = Convolutions(weights)
        self._waiting: list[_Norm] = []
        self._running = _Running()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function of PyTorch, or its channels-last form."""
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func is F.relu and isinstance(first, _Norm):
            return first.relu(*args[1:], **kwargs)
        if not _leaves_waiting(func, args):
            self.finish()
        args, kwargs = tree_map(value_of, (args, kwargs))
        if func is torch.conv2d:
            return self._convolutions(*args, **kwargs)
        x = args[0] if args else None
        images = isinstance(x, Tensor) and x.dim() == 4 and x.is_floating_point()
        if images and x.is_contiguous(memory_format=torch.channels_last):
            if func is F.group_norm:
                return self._later(x, partial(torch.ops.dpa.group_norm_act, *args, **kwargs))
            if func is F.batch_norm:
                return self._batch_norm(*args, **kwargs)
            if func is F.max_pool2d:
                return _max_pool2d(*args, **kwargs)
        return func(*args, **kwargs)

    def _later(self, x: Tensor, run: Callable[..., Tensor]) -> _Norm:
        """Return a norm that waits."""
        self._waiting.append(_Norm(x, run))
        return self._waiting[-1]

    def _batch_norm(
        self,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Any:
        count = x.numel() // max(x.shape[1], 1)
        if not training or count <= 1:  # which PyTorch refuses
            given = x, running_mean, running_var, weight, bias, training, momentum, eps
            return F.batch_norm(*given)
        add = self._running.add  # self holds the norm: no cycle

        def run(residual: Tensor | None, relu: bool) -> Tensor:
            op = torch.ops.dpa.batch_norm_act_forward
            out, mean, var = op(x, weight, bias, eps, residual, relu)
            if running_mean is not None:
                add(running_mean, mean, 1.0, momentum)
            if running_var is not None:
                add(running_var, var, count / (count - 1), momentum)
            return out

        return self._later(x, run)

    def __exit__(self, *error: Any) -> None:
        """Leave it; running statistics are those of before where an error was raised."""
        super().__exit__(*error)
        if error[0] is None:
            self.finish()
            self._running.update()

    def finish(self) -> None:
        """Run what waits: it may be written to now."""
        for norm in self._waiting:
            norm.value()
        self._waiting.clear()


def value_of(x: Any) -> Any:
    """The tensor that a norm gives; anything else as it is."""
    return x.value() if isinstance(x, _Norm) else x


def _leaves_waiting(func: Callable[..., Any], args: Any) -> bool:
    """Whether it writes to nothing that a norm may wait to read: BatchNorm counts its batches."""
    first = args[0] if args else None
    counts = func is Tensor.add_ and isinstance(first, Tensor) and not first.is_floating_point()
    return counts or func in (torch.conv2d, F.group_norm, F.batch_norm, Tensor.dim)


class _Running:
    """Running statistics of BatchNorms, and what they are to move towards."""

    def __init__(self) -> None:
        self._moves: dict[int, tuple[Tensor, Tensor, float, float]] = {}

    def add(self, running: Tensor, new: Tensor, factor: float, momentum: float) -> None:
        """Let ``running`` move by ``momentum`` towards ``factor`` times ``new``."""
        if id(running) in self._moves:  # a module that is called twice
            self.update()
        self._moves[id(running)] = running, new.to(running.dtype), factor, momentum

    def update(self) -> None:
        """Move them all."""
        if self._moves:
            olds, news, factors, momenta = zip(*self._moves.values(), strict=True)
            with torch.no_grad(), _own_calls():
                torch._foreach_lerp_(olds, torch._foreach_mul(news, factors), momenta)
        self._moves.clear()


def _max_pool2d(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    alone = lambda n: n if isinstance(n, int) else n[0] if len(set(n)) == 1 else None  # noqa: E731
    sizes = [alone(n) for n in (kernel_size, stride or kernel_size, padding)]
    if None in sizes or sizes[0] > 16 or alone(dilation) != 1 or ceil_mode or return_indices:
        given = x, kernel_size, stride, padding, dilation, ceil_mode, return_indices
        return F.max_pool2d(*given)
    return torch.ops.dpa.max_pool2d(x, *sizes)


class _Norm:
    """What a norm of ``x`` returns: it runs, given residual and ReLU, when something wants it."""

    def __init__(self, x: Tensor, run: Callable[..., Tensor]):
        self._x, self._of = x, run
        self._residual: Tensor | None = None
        self._value: Tensor | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let functions of PyTorch take it; the mode is asked first."""
        return NotImplemented

    def _run(self, relu: bool) -> Tensor:
        with _own_calls(), torch.autocast(self._x.device.type, enabled=False):
            return self._of(residual=self._residual, relu=relu)

    def value(self) -> Tensor:
        """Its values, as a tensor."""
        if self._value is None:
            self._value = self._run(relu=False)
        return self._value

    def relu(self, inplace: bool = False) -> Any:
        """ReLU of it, in the same kernel where nothing has wanted its values before."""
        if inplace and self._value is None:
            self._value = self._run(relu=True)
            return self._value
        value = self.value()  # which may be wanted later, too: it runs once
        with _own_calls():
            return F.relu(value, inplace)

    def __iadd__(self, other: Any) -> Any:
        """Add in place: a residual, where nothing has wanted the values before."""
        x, other = self._x, value_of(other)
        with _own_calls():
            takes = isinstance(other, Tensor) and (other.shape, other.device) == (x.shape, x.device)
            if self._value is not None or self._residual is not None or not takes:
                self._value = self.value()
                self._value += other
            else:
                self._residual = other.to(x.dtype)
        return self

    def __getattr__(self, name: str) -> Any:
        """Whatever else a tensor has: of its values."""
        return getattr(self.value(), name)
