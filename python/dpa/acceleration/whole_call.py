"""A policy's whole call, from observations to actions, as one CUDA graph."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpa.acceleration.encoder_forward import FastEncoder
from dpa.acceleration.loop_samplers import Route
from dpa.acceleration.policy_loop import FastLoop
from dpa.acceleration.shadow_run import ShadowRun, tensors_of
from dpa.library.capture import (
    another_stream,
    can_capture,
    capturing,
    kernel_settings,
    leaving_failed,
    no_autocast_cache,
)
from dpa.library.checks import first_line
from dpa.library.holding import holding
from dpa.packed.agreement import LOOP_LIMITS
from dpa.packed.encoder_kernels import EncoderKernels
from dpa.packed.joint_encoders import JointEncoders
from dpa.tracking import ModuleState, Tracker, is_observed
from dpa.tracking.replacing import Replacement, replaced
from dpa.training.graphed_calls import replaced_forward

# From observations to actions: LeRobot's DiffusionModel, diffusion_policy's policies.
WHOLE_CALLS = ("generate_actions", "predict_action")
_KEPT = 4  # kinds of calls
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)  # that a call may hold
_LEAVES = frozenset({Tensor, *_PLAIN})


class WholeCall(Replacement):
    """Replaces a policy's method from observations to actions; on a GPU its calls replay a graph.

    The graph holds what the policy's own method launches: preprocessing, encoders, the accelerated
    loop. It reads parameters and buffers where they lie, so writes in place need no notice. The
    first call of each kind runs part by part, and so does the second, beside the graph, whose
    result it is compared with. From the third on a call launches the graph at once; the host then
    checks that the policy is still what was captured, and runs the call again where it is not.

    What cannot be captured, such as an encoder that waits for the device, runs part by part.

    Attributes:
        shadow: what comparisons of a graph with the parts found.

    """

    OWNER, KEPT = "policy", ("policy", "METHOD")
    policy: nn.Module

    def forget(self) -> None:
        """Capture and compare again."""
        name = f"{type(self.policy).__name__}.{self.METHOD} in a graph"
        self.shadow = ShadowRun(name)
        # By kind: the graph; the loop's route where the parts ran once; or why they go on to.
        self._graphs: OrderedDict[Hashable, _Graph | Route | _Refusal] = OrderedDict()
        self._lock = threading.RLock()

    @property
    def refused(self) -> str | None:
        """Why calls of the last kind run part by part, where there is a reason."""
        last = next(reversed(self._graphs.values()), None)
        return last.why if isinstance(last, _Refusal) else self.shadow.failed

    @property
    def captured(self) -> bool:
        """Whether calls of the last kind replay."""
        last = next(reversed(self._graphs.values()), None)
        return isinstance(last, _Graph) and bool(self.shadow.passed(last))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Predict, with the arguments of the method that this one replaces."""
        loop = replaced(self.policy, "conditional_sample")
        call = _Call.of(args, kwargs) if isinstance(loop, FastLoop) else None
        if call is None or self.policy.training or loop.thread.held is not None:
            return self.original(*args, **kwargs)
        with self._lock:
            found = self._graphs.get(call.kind)
            if isinstance(found, Route) and loop.runs(found):
                return self._capture(found, loop, call)
            if isinstance(found, _Refusal) and found.stands():
                return self.original(*args, **kwargs)
            if isinstance(found, _Graph):
                self._graphs.move_to_end(call.kind)
                passed = self.shadow.passed(found)
                if passed is None:
                    return self._compare(found, loop, call)
                if not passed:
                    return self.original(*args, **kwargs)
                ran, result = found.run(call.tensors)
                if ran:
                    return result
                self._drop(call.kind)
            return self._warm_up(loop, call)

    def _warm_up(self, loop: FastLoop, call: _Call) -> Any:
        """Run part by part; where the loop ran as one op, the next such call is captured."""
        result, route = loop.watched(lambda: self.original(*call.args, **call.kwargs))
        if route is not None:
            self._graphs[call.kind] = route
            while len(self._graphs) > _KEPT:
                self._drop(next(iter(self._graphs)))
        return result

    def _capture(self, route: Route, loop: FastLoop, call: _Call) -> Any:
        route.sampler.packed.follow()
        for encoder in _encoders(self.policy):
            encoder.repack()
        try:
            graph = self._graphs[call.kind] = _Graph(self, loop, route, call)
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError):  # where memory is short: try again
                why = first_line(error)
                policy = None if isinstance(error, _ChangesItself) else self.policy
                self._graphs[call.kind] = _Refusal(f"it cannot be captured: {why}", policy)
            return self.original(*call.args, **call.kwargs)
        return self._compare(graph, loop, call)

    def _drop(self, kind: Hashable) -> None:
        self.shadow.drop(self._graphs.pop(kind))

    def _compare(self, graph: _Graph, loop: FastLoop, call: _Call) -> Any:
        """Run a call both ways on the same random numbers; return the result of the parts."""
        stream = torch.cuda.default_generators[call.device.index]
        results, before = [], stream.get_offset()

        def parts(own: torch.Generator | None) -> Any:
            with holding(loop.thread, generator=own):
                results.append(self.original(*call.args, **call.kwargs))
            return results[-1]

        # The graph uses the device's own generator, so the parts use a private one.
        self.shadow.run_both(
            graph,
            graph.limit,
            lambda _: graph.replay(call.tensors),
            parts,
            stream=stream,
            parts=tensors_of,
        )
        if results:
            return results[-1]
        stream.set_offset(before)  # the graph's result proved nothing
        return self.original(*call.args, **call.kwargs)


class _ChangesItself(RuntimeError):
    """A call changes what it depends on, so that no call is like the one before."""

    def __init__(self) -> None:
        super().__init__("it changes attributes of its own modules")


class _Refusal:
    """Why a policy's calls of a kind are not captured, as long as its modules stay as they are.

    Without a policy they change in every call.
    """

    def __init__(self, why: str, policy: nn.Module | None):
        self.why = why
        self._tracker = None if policy is None else Tracker(policy)
        self._hooked = self._tracker is not None and self._tracker.hooked()

    def stands(self) -> bool:
        tracker = self._tracker
        return tracker is None or (tracker.unchanged() and tracker.hooked() == self._hooked)


@dataclass(frozen=True)
class _Call:
    """A call that may be captured.

    Attributes:
        args: as given.
        kwargs: as given.
        tensors: all in them, on one CUDA device.
        kind: everything else that the result depends on, but for the policy.

    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Tensor]
    kind: Hashable

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
        """Return the call, or None where it has to run as it is."""
        if torch.is_grad_enabled() or is_observed():
            return None
        leaves: list[Any] = []
        structure = _taken_apart((args, kwargs), leaves)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not tensors or not tensors[0].is_cuda or not can_capture(tensors[0].device):
            return None
        if any(type(x) is not Tensor or x.device != tensors[0].device for x in tensors):
            return None
        others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        if any(type(other) not in _PLAIN for other in others):
            return None
        shapes = tuple((x.shape, x.stride(), x.dtype) for x in tensors)
        kind = (tensors[0].device, shapes, tuple(others), structure, kernel_settings())
        return cls(args, kwargs, tensors, kind)


def _taken_apart(value: Any, leaves: list[Any]) -> Hashable:
    """Return the structure of nested containers, and add what they hold in pytree's order.

    Structures of pytree take longer to compare than those of plain ones.
    """
    kind = type(value)
    if kind is dict:
        return tuple(value), tuple([_taken_apart(one, leaves) for one in value.values()])
    if kind is tuple or kind is list:
        return kind, tuple([_taken_apart(one, leaves) for one in value])
    found, structure = ([value], None) if kind in _LEAVES else pytree.tree_flatten(value)
    leaves += found
    return structure


def _encoders(policy: nn.Module) -> list[EncoderKernels]:
    """Return what holds the packed weights of image encoders."""
    forwards = [replaced_forward(module) for module in policy.modules()]
    held = [forward.kernels for forward in forwards if isinstance(forward, FastEncoder)]
    return [kernels for kernels in held if kernels is not None]


class _Graph:
    """A captured call, the memory that its kernels read and write, and what it was captured of.

    Attributes:
        limit: the relative error of a comparison that passes.

    """

    def __init__(self, whole: WholeCall, loop: FastLoop, before: Route, call: _Call):
        encoders = _encoders(whole.policy)
        watched = [one.weights for one in (before.sampler.packed, *encoders)]
        self._modules = ModuleState(whole.policy, (whole.METHOD,), apart=watched)
        if self._modules.hooked():
            raise RuntimeError("its modules have hooks")
        self._given = [torch.empty_like(tensor).copy_(tensor) for tensor in call.tensors]
        given = iter(self._given)
        lend = lambda leaf: next(given) if isinstance(leaf, Tensor) else leaf  # noqa: E731
        args, kwargs = pytree.tree_map(lend, (call.args, call.kwargs))
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(call.device),
            leaving_failed(call.device, graph),
            no_autocast_cache(),
            capturing(graph),
        ):
            main, beside = torch.cuda.current_stream(), another_stream()
            beside.wait_stream(main)
            with JointEncoders():
                result, route = loop.watched(lambda: whole.original(*args, **kwargs))
            # What holds packed weights that the graph reads. That these are current is compared
            # beside the call.
            packed = [*([] if route is None else [route.sampler.packed]), *encoders]
            with torch.cuda.stream(beside):
                compared = [one.weights.captured_start() for one in packed]
            main.wait_stream(beside)
        if not self._modules.holds():
            raise _ChangesItself
        leaves, self._structure = pytree.tree_flatten(result)
        same = route is not None and route.forward is before.forward
        if not same or any(isinstance(x, Tensor) and not x.is_cuda for x in leaves):
            raise RuntimeError("its loop does not run as one op, or its results are not on the GPU")
        self._graph, self._loop, self._route, self._leaves = graph, loop, route, leaves
        self._inside = any(module is route.forward.unet for module in whole.policy.modules())
        self._packed = route.sampler.packed
        generations = [one.generation for one in packed]  # the memory that they were in
        self._held = list(zip(packed, generations, compared, strict=True))
        self._generator = torch.cuda.default_generators[call.device.index]
        self._done, self._last = torch.cuda.Event(), torch.cuda.current_stream(call.device)
        self.limit = route.forward.limit(LOOP_LIMITS, route.forward.precision())

    def replay(self, tensors: list[Tensor]) -> Any:
        """Launch the graph on these inputs; return copies of the results."""
        stream = torch.cuda.current_stream(self._given[0].device)
        if stream != self._last:
            stream.wait_event(self._done)
            for tensor in (*self._given, *tensors_of(self._leaves)):
                tensor.record_stream(stream)
        torch._foreach_copy_(self._given, tensors)
        self._graph.replay()
        leaves = [x.clone() if isinstance(x, Tensor) else x for x in self._leaves]
        self._done.record(stream)
        self._last = stream
        return pytree.tree_unflatten(leaves, self._structure)

    def run(self, tensors: list[Tensor]) -> tuple[bool, Any]:
        """Launch the graph, then check that the policy is still what was captured.

        Where weights changed that are packed, they are packed again and the graph is launched anew.

        Returns:
            Whether the graph still stands for the policy, and the results.

        """
        before = self._generator.get_offset()
        with contextlib.ExitStack() as locks:
            for packed, *_ in self._held:
                locks.enter_context(packed.lock)
            self._packed.memory(self._given[0].device)
            result = self.replay(tensors)
            after = self._generator.get_offset()
            # Whether the comparisons that were launched are of what is remembered.
            started = [c is None or packed.weights.started(c) for packed, _, c in self._held]
            holds = all(started) and self._holds()
            held = [(packed, packed.weights) for packed, *_ in self._held]
            stale = [one for one, weights in held if weights.changed() or weights.values_changed()]
            holds = holds and not any(one.weights.moved() for one in stale)
            if holds and not stale:
                self._loop.leave_timesteps(self._route)
                return True, result
            if self._generator.get_offset() == after:  # no other thread drew in the meantime
                self._generator.set_offset(before)
            for packed in stale if holds else []:
                packed.repack()
            again = holds and self._lies()
            return again, self.replay(tensors) if again else None

    def _lies(self) -> bool:
        return all(packed.generation == generation for packed, generation, _ in self._held)

    def _holds(self) -> bool:
        # The policy's modules are the network's too, where it is one of them.
        apart = not self._inside
        return self._lies() and self._modules.holds() and self._loop.runs(self._route, apart)
