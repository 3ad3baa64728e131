"""A network on images, channels-last inside: cuDNN's convolutions and dpa's GroupNorm like it so.

The network's own code runs. While it does, its calls of PyTorch's functions are redirected: a
convolution takes its input and weight channels-last, and a GroupNorm waits for the residual sum and
the ReLU that may follow, so that all three are one kernel each way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

_LAST = torch.channels_last
_own_calls = torch._C.DisableTorchFunction  # the mode is not asked


class ChannelsLast(TorchFunctionMode):
    """Where it is entered, convolutions and GroupNorms of images run channels-last."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[_Norm] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function of PyTorch, or its channels-last form."""
        kwargs = kwargs or {}
        if func is F.relu and isinstance(args[0], _Norm):
            return args[0].relu(*args[1:], **kwargs)
        # Neither writes to what a norm that waits will read.
        if func is not torch.conv2d and func is not F.group_norm:
            self.finish()
        args, kwargs = tree_map(value_of, (args, kwargs))
        if func is torch.conv2d:
            return _convolve(*args, **kwargs)
        if func is F.group_norm and _is_for_us(args[0]):
            self._waiting.append(_Norm(*args, **kwargs))
            return self._waiting[-1]
        return func(*args, **kwargs)

    def finish(self) -> None:
        """Run what waits: it may be written to now."""
        for norm in self._waiting:
            norm.value()
        self._waiting.clear()


def value_of(x: Any) -> Any:
    """The tensor that a norm gives; anything else as it is."""
    return x.value() if isinstance(x, _Norm) else x


def _is_for_us(x: Tensor) -> bool:
    return x.dim() == 4 and x.is_contiguous(memory_format=_LAST) and x.is_floating_point()


def in_order_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of an output as a network without this mode gives them."""
    return x.to(dtype).contiguous()


def _convolve(x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    kind = x.device.type
    narrow = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    dtype = torch.get_autocast_dtype(kind) if narrow else x.dtype
    if weight.dtype == dtype or narrow:
        x = x.to(dtype=dtype, memory_format=_LAST)
        weight = _Weight.apply(weight, dtype)
    return torch.conv2d(x, weight, *args, **kwargs)


class _Weight(torch.autograd.Function):
    """A weight channels-last in a dtype, and its gradient as the weight is, by one copy each."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.like = weight
        return weight.to(dtype=dtype, memory_format=_LAST, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.empty_like(ctx.like).copy_(grad), None


class _Norm:
    """What a GroupNorm returns: it runs when something wants its values."""

    def __init__(
        self,
        x: Tensor,
        num_groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ):
        self._args = x, num_groups, weight, bias, eps
        self._residual: Tensor | None = None
        self._value: Tensor | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let functions of PyTorch take it; the mode is asked first."""
        return NotImplemented

    def _run(self, relu: bool) -> Tensor:
        with _own_calls(), torch.autocast(self._args[0].device.type, enabled=False):
            return torch.ops.dpa.group_norm_act(*self._args, self._residual, relu)

    def value(self) -> Tensor:
        """Its values, as a tensor."""
        if self._value is None:
            self._value = self._run(relu=False)
        return self._value

    def relu(self, inplace: bool = False) -> Any:
        """ReLU of it, in the same kernel where nothing has wanted its values before."""
        if self._value is not None:
            with _own_calls():
                return F.relu(self._value, inplace)
        out = self._run(relu=True)
        if inplace:
            self._value = out
        return out

    def __iadd__(self, other: Any) -> Any:
        """Add in place: a residual, where nothing has wanted the values before."""
        x, other = self._args[0], value_of(other)
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
