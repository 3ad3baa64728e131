"""A module's calls in training as CUDA graphs: one of its forward, one of its backward.

The training loop stays as it is. Where the host takes longer to launch a small network's kernels
than the GPU to run them, a step then takes as long as the GPU.
"""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from dpa.library.capture import can_capture, kernel_settings
from dpa.library.checks import first_line, require
from dpa.tracking import is_observed
from dpa.tracking.replacing import Replacement, put_back, replace_method, replaced
from dpa.training.captured_call import CapturedCall
from dpa.training.parts import Parts


def graph_calls(module: nn.Module, warmup: int = 3, capacity: int = 2) -> nn.Module:
    """Let a module's calls replay CUDA graphs while it trains, in place.

    Only the attribute ``forward`` of the object is replaced. In training mode with gradients
    enabled, the first ``warmup`` calls of a kind (shapes, dtypes, autocast, which parameters train)
    run as they are, the next one is captured, forward and backward, and later ones replay: two
    launches, whatever the number of kernels. Optimizer, loss, clipping, EMA, checkpoints and loop
    stay what they are. ``GradScaler`` and hooks of parameters work as before, and copies of the
    module capture anew. Each call writes over the gradients of the one before. Where parameters
    still have those in ``grad``, they are moved first; where somebody else has, the call runs as it
    is. So let ``zero_grad(set_to_none=True)`` come before the call; adding gradients of several
    batches up costs a copy of them.

    A call runs as it is where a graph cannot replace it: no gradients, evaluation mode, arguments
    that are not CUDA tensors or None, hooks on inner modules, checkpointing, a second call before
    the first one's backward, replaced modules, inside a capture or ``torch.compile``. What it may
    not do is read values on the host, or depend on Python values that change. A backward with
    ``create_graph=True``, and a second one of the same call, call the module again, without graphs.
    Under DDP, gradients are exchanged after the backward, not during it: :class:`GraphedStep`
    captures both.

    Args:
        module: takes tensors and returns one; a policy's U-Net, say.
        warmup: calls of a kind before it is captured.
        capacity: kinds that stay captured, each with its activations and gradients in memory.

    Returns:
        ``module``.

    """
    is_module, least = isinstance(module, nn.Module), min(warmup, capacity)
    require(is_module, "graph_calls: module", "be a torch.nn.Module", type(module))
    got = f"{warmup}, {capacity}"
    require(least > 0, "graph_calls: warmup and capacity", "be at least 1", got)
    ungraph_calls(module)
    replace_method(module, "forward", GraphedForward(module, warmup, capacity))
    return module


def ungraph_calls(module: nn.Module) -> nn.Module:
    """Undo :func:`graph_calls` and return ``module``."""
    graphed = replaced(module, "forward")
    if isinstance(graphed, GraphedForward):
        put_back(module, "forward")
        graphed.forget()  # captures lead back to it: memory goes now rather than with the garbage
        if graphed.inner is not None:
            replace_method(module, "forward", graphed.inner)
    return module


def replaced_forward(module: Any) -> Any:
    """Return what replaces a module's forward, beneath graphs of its calls; or None."""
    forward = replaced(module, "forward")
    return forward.inner if isinstance(forward, GraphedForward) else forward


class GraphedForward(Replacement):
    """The replacement of the forward of a module whose calls are graphed."""

    OWNER, KEPT = "module", ("module", "inner", "warmup", "capacity")

    def __init__(self, module: nn.Module, warmup: int, capacity: int):
        super().__init__(module, replaced(module, "forward"), warmup, capacity)

    def forget(self) -> None:
        """Drop every capture, and what calls have shown."""
        self._parts: Parts | None = None
        self._calls: Counter[Hashable] = Counter()
        self._captures: OrderedDict[Hashable, CapturedCall] = OrderedDict()
        self.refused: dict[Hashable, str] = {}

    def copied_to(self, owner: nn.Module) -> GraphedForward:
        """Return the same for another module, what is beneath it too."""
        copied = super().copied_to(owner)
        if isinstance(self.inner, Replacement):
            copied.inner = self.inner.copied_to(owner)
        return copied

    @property
    def captured(self) -> int:
        """How many kinds of calls replay by now."""
        return len(self._captures)

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward that this one replaces."""
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def recorded(self, *args: Any, **kwargs: Any) -> Any:
        """Run what captures record: the same, unless a subclass has another form of it."""
        return self.original(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, by a replay where there is one."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        names, values = (*range(len(args)), *kwargs), (*args, *kwargs.values())
        key = self._key(names, values)
        if key is None or key in self.refused:
            return self.original(*args, **kwargs)
        capture = self._captures.get(key)
        if capture is None:
            self._calls[key] += 1
            if self._calls[key] == self.warmup:  # what is chosen or loaded in a first run, is then
                return self.recorded(*args, **kwargs)
            if self._calls[key] > self.warmup and self._is_decided():
                capture = self._capture(key, args, kwargs)
        if capture is None or not capture.is_free():
            return self.original(*args, **kwargs)
        self._captures.move_to_end(key)
        return capture.replayed(tuple(x for x in values if x is not None))

    def _is_decided(self) -> bool:
        """Whether a later call would run as one does now: not before a comparison has decided."""
        return not _is_compared(self.inner) or self.inner.is_compared()

    def _key(self, names: tuple[Any, ...], values: tuple[Any, ...]) -> Hashable | None:
        """All that a capture depends on, or None where the call has to run as it is."""
        kinds = {type(x) for x in values if x is not None}
        if not kinds or not kinds <= {Tensor, nn.Parameter} or _is_special():
            return None
        device = next(x.device for x in values if x is not None)
        if not self.module.training or not can_capture(device):
            return None
        if device.index != torch.cuda.current_device():  # whose streams are what is captured
            return None
        inner = self.inner
        if _is_compared(inner) and inner.fallback_reason() is not None:
            return None
        parts = self._parts
        if parts is None or not parts.unchanged():
            self.forget()
            parts = self._parts = Parts(self.module)
        if not parts.are_plain() or any(x is not None and x.device != device for x in values):
            return None
        number = parts.state(device)
        if number is None:
            return None
        arguments = tuple(
            None if x is None else (x.shape, x.stride(), x.dtype, x.requires_grad) for x in values
        )
        state = kernel_settings(device.type), number, getattr(inner, "generation", None)
        return names, arguments, *state

    def _capture(self, key: Hashable, args: Any, kwargs: dict[str, Any]) -> CapturedCall | None:
        try:
            # A network of the family uses no random numbers; of another module nobody knows.
            known = _is_compared(self.inner)
            capture = CapturedCall(self.recorded, self._parts, args, kwargs, known)
        except RuntimeError as error:  # calls go on, kernel by kernel
            self.refused[key] = first_line(error)
            warnings.warn(
                f"graph_calls: {type(self.module).__name__} runs kernel by kernel, for its call "
                f"could not be captured: {self.refused[key]}",
                RuntimeWarning,
                stacklevel=4,
            )
            return None
        self._captures[key] = capture
        while len(self._captures) > self.capacity:
            gone, _ = self._captures.popitem(last=False)
            del self._calls[gone]
        return capture


def _is_compared(forward: Any) -> bool:
    """Whether a forward is one that is compared with the original before it takes over."""
    return hasattr(forward, "is_compared")


def _is_special() -> bool:
    """Whether a hook or mode observes calls or changes them."""
    return (
        is_observed()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        or torch.autograd.forward_ad._current_level >= 0
        or nn.modules.module._has_any_global_hook()
    )
