"""One kind of call of a module as CUDA graphs: its replays, and whose the gradients are.

`graphed_calls.py` decides which calls are captured and replayed.
"""

from __future__ import annotations

import operator
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dpa.library.capture import no_autocast_cache
from dpa.library.graphs import captured
from dpa.training.parts import Parts

_TAKEN = types.SimpleNamespace(differentiated=False, saved_tensors=())  # a call without a node yet
_trains = operator.attrgetter("requires_grad")
_will_run, _pass_of = torch._C._will_engine_execute_node, torch._C._current_graph_task_id


class CapturedCall:
    """One kind of call: its graphs, and the memory that they read and write.

    Both graphs share their memory, as forward and backward of a plain call do: gradients lie where
    activations did. So a forward may replay only when no backward of the last call may come, and
    nobody has its gradients any more.
    """

    def __init__(
        self, forward: Callable[..., Any], parts: Parts, args: Any, kwargs: Any, known: bool
    ):
        self._stream, self._done = torch.cuda.Stream(), torch.cuda.Event()
        self._call: Callable[[], Any] = lambda: None
        lend = lambda x: None if x is None else x.detach().clone().requires_grad_(x.requires_grad)  # noqa: E731
        args, kwargs = [lend(x) for x in args], {name: lend(x) for name, x in kwargs.items()}
        self._original, self._parts, self._args, self._kwargs = forward, parts, args, kwargs
        self._inputs = [x for x in (*args, *kwargs.values()) if x is not None]
        device = self._inputs[0].device
        self.mark = torch.zeros(1, device=device)
        self._stream.wait_stream(torch.cuda.current_stream())
        # Casts of parameters belong to each replay.
        with no_autocast_cache(), parts.replaced(_without_history) as parameters:
            self._record(forward, args, kwargs, parameters, known)
        self._parameters = [p for p in parts.parameters if p.requires_grad]
        self._of_inputs = sum(x.requires_grad for x in self._inputs)  # gradients, which come first
        # By the backward pass, what its calls owe the parameters: the last replay's gradients
        # (None), or those of a backward without graphs.
        self._owed: dict[int, list[tuple[weakref.ref[Any], list[Tensor | None] | None]]] = {}
        link = _given_out(weakref.ref(self), self.mark, *self._parameters)
        self._link = link if link.requires_grad else None
        self._storages = [g.untyped_storage() for g in self._gradients if g is not None]
        self._places = [storage._cdata for storage in self._storages]
        self._users = list(map(torch._C._storage_Use_Count, self._places))

    def _record(
        self, forward: Any, args: Any, kwargs: Any, parameters: list[Tensor], known: bool
    ) -> None:
        trained = [x for x in (*self._inputs, *parameters) if x.requires_grad]
        outputs: list[Any] = []

        def run() -> None:
            outputs[:] = [forward(*args, **kwargs)]
            if not isinstance(outputs[0], Tensor) or not outputs[0].requires_grad:
                raise RuntimeError("it must return one tensor that has a gradient")
            self._output, self._grad = outputs[0].detach(), torch.empty_like(outputs[0])

        def differentiate() -> None:
            self._gradients = torch.autograd.grad(
                outputs.pop(), trained, self._grad, allow_unused=True
            )

        options = {"stream": self._stream, "random_numbers": not known, "differentiates": True}
        (self._forward, self._backward), _ = captured(
            self.mark.device, run, differentiate, **options
        )

    def is_free(self) -> bool:
        """Whether a replay may write: nothing of the last one is wanted any more."""
        if self._is_open():
            return False
        if not self._are_held():
            return True
        self._give_away()
        return not self._are_held()

    def _is_open(self) -> bool:
        """Whether the backward of the last call may still come, or its parameters' gradients."""
        for task, owed in list(self._owed.items()):
            if not any(call() for call, _ in owed):  # it ended in an error, and they are gone
                self._owed.pop(task, None)
            elif any(gradients is None for _, gradients in owed):
                return True
        call = self._call()
        if call is None or call.differentiated:
            return False
        try:
            return call.saved_tensors is not None
        except RuntimeError:  # somebody let go of them without a backward of this call
            return False

    def _are_held(self) -> bool:
        """Whether somebody still has gradients of the last replay."""
        return list(map(torch._C._storage_Use_Count, self._places)) != self._users

    def _give_away(self) -> None:
        """Move what the parameters hold of the last gradients to memory of its own."""
        written = {g.data_ptr() for g in self._gradients if g is not None}
        for parameter in self._parameters:
            if parameter.grad is not None and parameter.grad.data_ptr() in written:
                parameter.grad = parameter.grad.clone()

    def replayed(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """The output of a call. While the GPU works, autograd gets its node."""
        self._call = lambda: _TAKEN  # before the first launch, where another thread may run
        try:
            stream = torch.cuda.current_stream()
            stream.wait_event(self._done)
            with torch.no_grad():
                for kept, new in zip(self._inputs, inputs, strict=True):
                    kept.data.copy_(new)  # unseen by autograd: what was captured takes the values
                self._forward.replay()
                output = self._output.clone()
            self._done.record(stream)
            return _replayed(self, inputs, [output], self._link, *filter(_trains, inputs))
        except BaseException:
            self._call = lambda: None
            raise

    def begin(self, call: Any) -> None:
        """Remember the call whose backward may come."""
        self._call = weakref.ref(call)
        call.versions = self._parts.versions()

    def backward(self, call: Any, grad: Tensor) -> Iterable[Tensor | None]:
        """Return the gradients of the inputs; those of the parameters are owed (`_GivenOut`)."""
        if call.versions != self._parts.versions():
            raise RuntimeError(
                "graph_calls: parameters have been modified by an inplace operation between a call "
                "and its backward"
            )
        # With create_graph somebody will differentiate the gradients; and a second backward finds
        # them where the activations were.
        if torch.is_grad_enabled() or call.differentiated:
            gradients = self._call_again(call.inputs, grad)
            self._owe(call, list(gradients[self._of_inputs :]))
            return gradients[: self._of_inputs]
        stream = torch.cuda.current_stream()
        stream.wait_event(self._done)
        self._grad.copy_(grad)
        self._backward.replay()
        self._done.record(stream)
        gradients = list(map(_held, self._gradients[: self._of_inputs]))
        self._owe(call, None)
        call.differentiated = True  # not before they are held: another thread's call may replay
        return gradients

    def _owe(self, call: Any, gradients: list[Tensor | None] | None) -> None:
        if self._link is not None and _will_run(self._link.grad_fn):
            owed = self._owed.setdefault(_pass_of(), [])
            owed.append((weakref.ref(call), gradients))

    def give_out(self) -> Iterable[Tensor | None]:
        """Return the gradients that this pass owes the parameters."""
        static = self._gradients[self._of_inputs :]
        found = [gradients for _, gradients in self._owed[_pass_of()]]
        lists = [list(map(_held, static)) if own is None else own for own in found]
        del self._owed[_pass_of()]  # not before they are held
        return lists[0] if len(lists) == 1 else map(_sum, *lists)

    def _call_again(self, inputs: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
        """Without graphs, on views, since hooks of the parameters run behind this backward."""
        with torch.enable_grad(), self._parts.replaced(_with_history) as parameters:
            views = [_with_history(x) for x in inputs]
            given = iter(views)
            take = lambda x: None if x is None else next(given)  # noqa: E731
            args = [take(x) for x in self._args]
            output = self._original(*args, **{name: take(x) for name, x in self._kwargs.items()})
            trained = [x for x in (*views, *parameters) if x.requires_grad]
        again = torch.is_grad_enabled()
        return torch.autograd.grad(output, trained, grad, create_graph=again, allow_unused=True)


def _without_history(parameter: nn.Parameter) -> nn.Parameter:
    """The same memory without hooks; `data`, for autograd would object to what replays change."""
    return nn.Parameter(parameter.data, parameter.requires_grad)


def _with_history(tensor: Tensor) -> Tensor:
    """The same values, differentiable as what they are a view of; of integers as they are."""
    return tensor.view_as(tensor) if tensor.requires_grad else tensor


def _held(gradient: Tensor | None) -> Tensor | None:
    return gradient if gradient is None else gradient.detach()


def _sum(*gradients: Tensor | None) -> Tensor | None:
    """The sum of what there is of them, in memory of its own."""
    given = [gradient for gradient in gradients if gradient is not None]
    return sum(given[1:], given[0]) if given else None


class _Replay(torch.autograd.Function):
    """A call by replay; what it saves tells whether its backward may still come."""

    @staticmethod
    def forward(
        ctx: Any,
        capture: CapturedCall,
        inputs: Any,
        output: list[Tensor],
        link: Any,
        *trained: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(capture.mark)
        ctx.capture, ctx.inputs, ctx.differentiated = capture, inputs, False
        capture.begin(ctx)
        return output.pop()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _ = ctx.saved_tensors  # PyTorch's own error where they are freed
        link = ctx.capture.mark if ctx.needs_input_grad[3] else None
        return None, None, None, link, *ctx.capture.backward(ctx, grad)


class _GivenOut(torch.autograd.Function):
    """Behind the replays of a capture: its parameters' gradients, after whatever else can go on.

    Autograd runs the latest node first, as threads count them, and this one is older than those of
    every call that replays in the thread that captured. So the host hands hundreds of gradients to
    parameters while the GPU works on what comes in front of the module: launching that waits for
    none of them.
    """

    @staticmethod
    def forward(ctx: Any, capture: Any, mark: Tensor, *parameters: Tensor) -> Tensor:
        ctx.capture = capture
        return torch.zeros_like(mark)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, *ctx.capture().give_out()


# Without what Function.apply does for torch.func's transforms, an argument after the other: under
# them no call replays.
_replayed = super(torch.autograd.Function, _Replay).apply
_given_out = super(torch.autograd.Function, _GivenOut).apply
