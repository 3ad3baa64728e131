"""What :func:`dpa.accelerate` puts in the place of a policy's denoising loop."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dpa.acceleration.any_network import AnyNetwork
from dpa.acceleration.loop_samplers import (
    NAMED,
    NoiseDtypes,
    Route,
    Sampler,
    is_nested,
    make_route,
    refusal,
    sample_of,
    translate,
)
from dpa.acceleration.loops import Loop, LoopCall, sample_itself
from dpa.acceleration.shadow_run import Options, ShadowRun, say_fallback, tensors_of
from dpa.acceleration.unet_forward import FastForward
from dpa.library.checks import first_line
from dpa.library.holding import holding
from dpa.nn.family import is_of_family
from dpa.packed.agreement import LOOP_LIMITS, proves
from dpa.sampling.rng import generator_on
from dpa.tracking import find, is_observed
from dpa.tracking.replacing import Replacement, class_of
from dpa.tracking.wrappers import acts_on_some_values
from dpa.training.graphed_calls import replaced_forward

_GIVEN = ("condition_data", "condition_mask", "noise", "last_chunk")
_KEPT = 8  # routes: one for each state of the policy and kind of call
_MISSES = 32  # calls in a row that find no route


class _OfThread(threading.local):
    """What a thread's calls of a loop are given beside their arguments, and how the last one ran.

    Attributes:
        generator: of calls that are given none.
        held: what calls continue: fields of their :class:`LoopCall`.
        route: of the last call that ran by one.

    """

    generator: torch.Generator | None = None
    held: dict[str, Any] | None = None
    route: Route | None = None


def _rewinder(device: torch.device) -> Callable[[], None]:
    """Return what sets the default random streams of the CPU and of ``device`` back to now.

    What runs before it is known whether a replacement may run (an encoder) may take numbers of
    them, and the original takes the same.
    """
    streams = [torch.default_generator]
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        streams.append(torch.cuda.default_generators[device.index])
    states = [(stream, stream.get_state()) for stream in streams]

    def rewind() -> None:
        if threading.active_count() > 1:  # numbers that others took would be given out twice
            return
        for stream, before in states:
            if not torch.equal(stream.get_state(), before):
                stream.set_state(before)

    return rewind


class FastLoop(Replacement):
    """Replaces the method with a policy's loop: the whole loop by :class:`DiffusionSampler`.

    What it cannot run as the original does, the original runs, on the accelerated network. The
    first call of each kind, and the first after the policy, its configuration, its scheduler or its
    network changed in any attribute, runs both loops and returns the original's result.
    """

    OWNER, KEPT = "policy", ("policy", "loop", "options")
    policy: Any
    loop: Loop
    options: Options

    def forget(self) -> None:
        """Find everything anew and compare again."""
        self.METHOD = self.loop.method
        self._name = f"{type(self.policy).__name__}.{self.METHOD}"
        self.shadow = ShadowRun(f"the accelerated {self._name}", self.options.fallback, self._basis)
        self.refused: str | None = None
        self._routes: list[Route] = []
        # What is in the network's place, the network, what replaces its forward, what runs it.
        self._found: tuple[Any, Any, Any, FastForward | AnyNetwork | None] = (None,) * 4
        self._scheduler = None if self.loop.table is not None else self.loop.scheduler
        self._misses = 0
        self._signature: inspect.Signature | None = None
        self.thread = _OfThread()

    def _basis(self) -> Any:
        """Return what a write of weights changes."""
        forward = self.of_network()
        return None if forward is None else forward.basis()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Sample, with the arguments of the method that this one replaces."""
        if self.loop.no_grad and torch.is_grad_enabled():
            with torch.no_grad():
                return self(*args, **kwargs)
        forward = self._forward()
        if forward is None:
            return self._run_original("its network does not run accelerated", args, kwargs)
        rewind = _rewinder(_arithmetic(forward)[0])

        def original(why: str) -> Any:
            rewind()
            return self._run_original(why, args, kwargs)

        try:
            bound = self._bind(args, kwargs)
            call = None if bound is None else self._begin(bound, forward)
            route = None if call is None else self._find(forward, call)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            self._refuse(str(error))
            return original(str(error))
        if route is None:
            return original("dpa does not know this call of it")
        if call.generator is None:
            call.generator = self.thread.generator
        held = self.thread.held
        if held is not None and (why := refusal(route.sampler, call, held)) is not None:
            return original(why)
        passed = route in self.shadow.agreed or self.shadow.passed(route)
        if passed is None:
            rewind()
            stream = call.generator or generator_on(forward.weight.device, None)
            before = stream.get_state()
            result = self._run_both(route, call, bound, args, kwargs)
            if held is None:
                return result
            stream.set_state(before)  # no more than a trial: the original continues no chunk
            passed = self.shadow.passed(route)
        if not passed:
            self.shadow.leave()
            return original("it did not agree with the original")
        if held is not None:
            dtype = _arithmetic(forward)[1]
            floats = {n: x for n, x in held.items() if isinstance(x, Tensor)}
            floats = {n: x.to(dtype) for n, x in floats.items() if x.dtype != torch.bool}
            call = replace(call, **held | floats)
        self.leave_timesteps(route)
        self.thread.route = route
        return self._run(route, call, bound)

    def _run_original(self, why: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the original, which continues no chunk."""
        if self.thread.held is not None:
            why = f"cannot continue the last chunk: {why}"
            say_fallback(self._name, why, self.options.fallback)
        return self.original(*args, **kwargs)

    def _run(self, route: Route, call: LoopCall, bound: inspect.BoundArguments) -> Any:
        dtype = _arithmetic(route.forward)[1]
        sample = _run_again(route.sampler, call, dtype)
        if sample is None:
            sample = sample_of(route.sampler, call, dtype)
        if call.finish is not None:
            return call.finish(sample, call.generator)
        if self.loop.end is sample_itself:
            return sample
        first, *given = bound.args
        return self.loop.end(first, sample, *given, **bound.kwargs)

    def watched(self, run: Callable[[], Any]) -> tuple[Any, Route | None]:
        """Return what ``run()`` gives, and the route by which the loop ran in it as one op."""
        self.thread.route = None
        result, route = run(), self.thread.route
        return result, route if route is not None and route.sampler.packed is not None else None

    def runs(self, route: Route, modules: bool = True) -> bool:
        """Whether a call that ran by this route would run by it again.

        Args:
            route: of a call before.
            modules: whether the network's are checked; otherwise the caller has done so.

        """
        forward = self._forward(modules)
        if forward is not route.forward or not self.shadow.passed(route):
            return False
        return self._holds(route, (*_arithmetic(forward), *route.kind[-3:]))

    def fallback_reason(self) -> str | None:
        """Return why the network's part keeps this loop from running, or None."""
        forward = self.of_network()
        if forward is None:
            place = self.loop.network
            return f"its {place if isinstance(place, str) else 'network'} is not accelerated"
        return forward.fallback_reason()

    def untraced(self) -> tuple[str, str] | None:
        """How the loop last ran around a network that no trace stands for, and why; or None."""
        return getattr(self._routes[0].sampler, "untraced", None) if self._routes else None

    def of_network(self) -> FastForward | AnyNetwork | None:
        """Return what runs the network: dpa's forward, or the network itself where it has none."""
        there = find(self.policy, self.loop.network)
        place, unet, held, found = self._found
        if unet is not None and there is place and vars(unet).get("forward") is held:
            return found
        unet, found = self.loop.network_of(self.policy), None
        if unet is not None and "forward" in vars(unet):
            forward = replaced_forward(unet)
            found = forward if isinstance(forward, FastForward) else None
        elif unet is not None and not is_of_family(unet):
            found = AnyNetwork(unet, self.options)
        held = None if unet is None else vars(unet).get("forward")
        self._found = there, unet, held, found
        return found

    def _forward(self, modules: bool = True) -> FastForward | AnyNetwork | None:
        """Return what runs the network, or None where the loop has to run as it is."""
        forward = self.of_network()
        if torch.compiler.is_compiling() or forward is None:
            return None
        if forward.unet.training or torch.is_grad_enabled() or is_observed():
            return None
        network = forward.network
        same = network is not None and (modules or network.tracker.reads_hold())
        if not same or forward.bypass.on or (modules and not network.tracker.unchanged()):
            return None if forward.fallback_reason() is not None else forward
        return forward if network.tracker.no_one_op() is None else None

    def _run_both(
        self,
        route: Route,
        call: LoopCall,
        bound: inspect.BoundArguments,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run both loops on the same random numbers; return the original's result."""
        forward, mask = route.forward, call.condition_mask
        weight, given = forward.weight, call.generator
        takes_generator = "generator" in bound.signature.parameters and call.one_stream
        attributes = vars(self.policy)
        changing = {n: attributes[n] for n in self.loop.changing if n in attributes}
        after: dict[str, Any] = {}
        # Noise like the network's output, or like the sample: under autocast that is another dtype.
        mixed = forward.precision() != weight.dtype
        noise = NoiseDtypes() if mixed else nullcontext()

        def original(own: torch.Generator | None) -> Any:
            again = bound.signature.bind(self.policy, *args, **kwargs)
            if own is not None:  # however the caller gave one, or none
                again.arguments["generator"] = own
            attributes.update(changing)  # both begin with what the policy was
            with holding(forward.bypass, on=True), noise:
                result = self.original(*again.args[1:], **again.kwargs)
            after.update({name: attributes[name] for name in changing})
            return result

        def replacement(own: torch.Generator | None) -> Any:
            attributes.update(changing)
            if isinstance(noise, NoiseDtypes):
                seen = noise.of_steps(call.noise is None)
                route.sampler.noise_dtype = seen or weight.dtype
            return self._run(route, replace(call, generator=own or given), bound)

        def tells(result: Any) -> bool:
            masked = mask is not None and isinstance(result, Tensor) and result.shape == mask.shape
            masked = masked and mask.dtype == torch.bool
            free = [result[~mask]] if masked else tensors_of(result)
            known = isinstance(forward, FastForward)
            if known and not proves(route.network.parameters()["final_conv.1.weight"]):
                return False
            return any(map(proves, free)) and all(bool(x.isfinite().all()) for x in free)

        result = self.shadow.run_both(
            route,
            forward.limit(LOOP_LIMITS, forward.precision()),
            original,
            replacement,
            stream=given or generator_on(weight.device, None),
            parts=tensors_of,
            tells=tells,
            private=takes_generator,
        )
        attributes.update(after)
        route.timesteps = None if route.scheduler is None else route.scheduler.timesteps
        if self.shadow.passed(route):
            self.thread.route = route
        return result

    def _holds(self, route: Route, kind: Any) -> bool:
        """Whether a route serves a call of that kind now, on a network that did not change."""
        return (
            kind == route.kind
            and find(self.policy, self._scheduler) is route.scheduler
            and route.generation == route.forward.generation
            and all(snapshot.holds() for snapshot in route.snapshots)
        )

    def leave_timesteps(self, route: Route) -> None:
        """Set the scheduler's timesteps as the loop does: users read them afterwards."""
        scheduler = route.scheduler
        if scheduler is None or self.loop.steps is None:
            return
        if scheduler.timesteps is not route.timesteps:
            scheduler.set_timesteps(find(self.policy, self.loop.steps))
            route.timesteps = scheduler.timesteps

    def _refuse(self, why: str) -> None:
        if why != self.refused:
            say_fallback(self._name, f"cannot be accelerated: {why}", self.options.fallback)
        self.refused = why

    def _find(self, forward: FastForward | AnyNetwork, call: LoopCall) -> Route:
        """Return the route for the policy as it is now and for a kind of call, or raise."""
        options = dict(call.options)
        if isinstance(forward, AnyNetwork) and is_nested(call):
            options["nested"] = True
        options["action_dim"] = call.shape[2]
        if call.condition_data is None:
            options["horizon"] = call.shape[1]
        types = [type(value) for value in options.values()]  # 5.0 is no 5
        kind = (*_arithmetic(forward), _dtypes(call), options, types)
        for place, route in enumerate(self._routes):
            if route.forward is forward and self._holds(route, kind):
                if place:
                    self._routes.insert(0, self._routes.pop(place))
                self._misses = 0
                break
        else:
            self._misses += 1
            if self._misses > _MISSES:
                raise ValueError("its attributes change from call to call")
            why = acts_on_some_values(class_of(self.policy), self.loop.method)
            if why is not None:
                raise ValueError(why)
            route = make_route(self.policy, self.loop, forward, kind, options)
            self._routes.insert(0, route)
            for old in self._routes[_KEPT:]:
                self.shadow.drop(old)
            del self._routes[_KEPT:]
        if isinstance(route.sampler, str):
            raise ValueError(route.sampler)
        self.refused = None
        return route

    def _bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> inspect.BoundArguments | None:
        """Return the arguments by name; None where the original says what is wrong."""
        signature = self._signature  # read once: another thread may let this forget it
        if signature is None:
            signature = inspect.signature(getattr(class_of(self.policy), self.loop.method))
            self._signature = signature
        try:
            bound = signature.bind(self.policy, *args, **kwargs)
        except TypeError:
            return None
        if self.loop.knows is not None:
            known = self.loop.knows | {next(iter(signature.parameters))}
            if other := sorted(bound.arguments.keys() - known):
                raise ValueError(f"dpa does not know what it does with {', '.join(other)}")
        bound.apply_defaults()
        return bound

    def _begin(
        self, bound: inspect.BoundArguments, forward: FastForward | AnyNetwork
    ) -> LoopCall | None:
        """Return what a call comes to, or raise ValueError.

        None where the original says what is wrong, or knows what this does not.
        """
        try:
            if self.loop.knows is None:
                call = self.loop.begin(*bound.args, **bound.kwargs)
            else:
                named = {n: v for n, v in bound.arguments.items() if n in self.loop.knows}
                further = named.pop("kwargs", {})
                call = self.loop.begin(self.policy, **named, **further)
        except RuntimeError as error:  # of shapes that an encoder refuses
            raise ValueError(first_line(error)) from None
        if call is None:
            return None
        if not isinstance(call, LoopCall):
            got = type(call).__name__
            raise TypeError(f"its loop.begin must return a dpa.LoopCall or None, got {got}")
        if isinstance(call.generator, Sequence):
            raise ValueError("there are several generators")
        dtype = _arithmetic(forward)[1]
        for name in ("condition_data", "noise", "last_chunk"):
            tensor = getattr(call, name)
            if tensor is not None and tensor.dtype != dtype:
                raise ValueError(f"{name} is {tensor.dtype}, the network {dtype}")
        if isinstance(forward, FastForward) and not forward.called_alike:
            try:
                translate(forward, call)
            except RuntimeError as error:
                raise ValueError(str(error)) from None
        given = call.conditions if isinstance(forward, FastForward) else {}
        cond = given.get("global_cond")
        if isinstance(cond, Tensor) and not cond.is_floating_point():
            raise ValueError(f"global_cond is {cond.dtype}, the network {dtype}")
        batches = [len(x) for x in given.values() if isinstance(x, Tensor) and x.dim() > 1]
        # A condition of one sample serves a batch of a sampler, and none of an original.
        return call if all(call.shape[0] in (None, batch) for batch in batches) else None


def _dtypes(call: LoopCall) -> list[torch.dtype]:
    """Return what the network's inputs are in: the original may refuse one that dpa would cast."""
    leaves: list[Any] = []
    for value in call.conditions.values():
        leaves += value.values() if isinstance(value, Mapping) else [value]
    return [leaf.dtype for leaf in leaves if isinstance(leaf, Tensor)]


def _arithmetic(forward: FastForward | AnyNetwork) -> tuple[Any, ...]:
    """Return where a network computes, its weights' dtype, autocast's, and the default one."""
    held, name = forward.home
    device, dtype = held[name].device, held[name].dtype
    autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
    return device, dtype, autocast, torch.get_default_dtype()  # of a start by torch.randn


def _run_again(sampler: Sampler, call: LoopCall, dtype: torch.dtype) -> Tensor | None:
    """Sample by the loop that was prepared for calls of this kind, where there is one."""
    last, scale = getattr(sampler, "prepared", None), call.init_noise_sigma
    drawn = call.noise is None and (sampler.noise_dtype != dtype or scale != 1.0)
    others = [n for n, value in call.conditions.items() if value is not None and n not in NAMED]
    if last is None or drawn or others:
        return None
    given = {name: call.conditions.get(name) for name in NAMED}
    given |= {name: getattr(call, name) for name in _GIVEN}
    way = call.inpainting, call.first_step
    if not last.serves(given, call.shape[0], call.generator, way):
        return None
    return last.run(given, call.generator).to(dtype)
