"""What :func:`dpa.accelerate` puts in the place of a policy's denoising loop."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpa.acceleration.scheduler_step import OF_A_LOOP, why_replaced
from dpa.acceleration.shadow_run import Options, ShadowRun, say_fallback
from dpa.acceleration.unet_forward import FastForward
from dpa.nn.family import Network
from dpa.packed.agreement import LOOP_LIMITS, proves
from dpa.sampling.rng import draw_normal, generator_on
from dpa.sampling.sampler import DiffusionSampler
from dpa.schedulers.conversion import MultistepTable, check_kind, from_diffusers
from dpa.tracking import Snapshot, is_observed
from dpa.tracking.replacing import Replacement
from dpa.training.graphed_calls import replaced_forward

_KEPT = 8  # routes: one for each state of the policy and kind of call
_MISSES = 32  # calls in a row that find no route
_LEROBOT = frozenset({"batch_size", "global_cond", "generator"})
_ORIGINAL = frozenset({"condition_data", "condition_mask", "local_cond", "global_cond"})
LOOPS = (_LEROBOT, _ORIGINAL | {"generator"})  # the arguments of a supported loop
# Whatever else a caller gives belongs to the original. (DP3 has the two of a point cloud and does
# not use them.)
_FURTHER = frozenset({"noise", "kwargs", "condition_data_pc", "condition_mask_pc"})
_STEP_OPTIONS = frozenset({"eta", "use_clipped_model_output"})
_NO_SETTINGS = frozenset({"_parameters", "_buffers", "training"})


@dataclass(eq=False)
class Route:
    """A sampler for one state of a policy, or why there is none, and how to tell that state."""

    forward: FastForward
    network: Network
    generation: int
    snapshots: tuple[Snapshot, ...]
    kind: Any
    sampler: DiffusionSampler | str
    timesteps: Tensor

    def holds(self, kind: Any) -> bool:
        """Whether this serves a call of that kind now."""
        return (
            kind == self.kind
            and self.generation == self.forward.generation
            and self.network.tracker.unchanged()
            and all(snapshot.holds() for snapshot in self.snapshots)
        )


class FastLoop(Replacement):
    """Replaces a policy's ``conditional_sample``: the whole loop by :class:`DiffusionSampler`.

    What it cannot run as the original does, the original runs, on the accelerated network. The
    first call of each kind, and the first after the policy, its configuration, its scheduler or its
    network changed in any attribute, runs both loops and returns the original's result.
    """

    METHOD, OWNER = "conditional_sample", "policy"
    KEPT = ("policy", "network", "options")
    policy: nn.Module
    network: str
    options: Options

    def forget(self) -> None:
        """Find everything anew and compare again."""
        name = f"the accelerated {type(self.policy).__name__}.conditional_sample"
        self.shadow = ShadowRun(name, self.options.fallback)
        self.refused: str | None = None
        self._routes: list[Route] = []
        self._found: tuple[Any, Any] = (None, None)
        self._misses = 0
        self._signature: inspect.Signature | None = None
        self._thread = threading.local()  # the generator and the route of a thread's call

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Sample, with the arguments of the method that this one replaces."""
        forward = self._forward()
        if forward is None:
            return self.original(*args, **kwargs)
        try:
            call = self._arguments(args, kwargs, forward.weight)
            route = None if call is None else self._find(forward, call.pop("options"))
            if call is not None and call["generator"] is None:
                call["generator"] = getattr(self._thread, "generator", None)
        except (TypeError, ValueError) as error:
            self._refuse(str(error))
            return self.original(*args, **kwargs)
        if route is None:
            return self.original(*args, **kwargs)
        passed = self.shadow.passed(route)
        if passed is None:
            return self._run_both(route, call, args, kwargs)
        if not passed:
            return self.original(*args, **kwargs)
        self.leave_timesteps(route)
        self._thread.route = route
        return _sample(route.sampler, call, forward.weight.dtype)

    def watched(self, run: Callable[[], Any]) -> tuple[Any, Route | None]:
        """Return what ``run()`` gives, and the route by which the loop ran in it as one op."""
        self._thread.route = None
        result, route = run(), self._thread.route
        return result, route if route is not None and route.sampler.packed is not None else None

    @contextmanager
    def drawing_from(self, generator: torch.Generator | None) -> Iterator[None]:
        """Let this thread's calls that are given no generator draw from this one."""
        self._thread.generator = generator
        try:
            yield
        finally:
            self._thread.generator = None

    def runs(self, route: Route) -> bool:
        """Whether a call that ran by this route would run by it again."""
        forward = self._forward()
        if forward is not route.forward or not self.shadow.passed(route):
            return False
        weight = forward.weight
        kind = (weight.device, weight.dtype, forward.precision(), route.kind[-1])
        return route.holds(kind)

    def _unet(self) -> nn.Module | None:
        unet = getattr(self.policy, self.network, None)
        unet = getattr(unet, "_orig_mod", unet)
        return unet if isinstance(unet, nn.Module) else None

    def fallback_reason(self) -> str | None:
        """Return why the network's part keeps this loop from running, or None."""
        unet = self._unet()
        forward = None if unet is None else replaced_forward(unet)
        if not isinstance(forward, FastForward):
            return f"its {self.network} is not accelerated"
        return forward.fallback_reason()

    def _forward(self) -> FastForward | None:
        """Return what runs the network, or None where the loop has to run as it is."""
        unet = self._unet()
        if unet is None:
            return None
        found = vars(unet).get("forward")
        if found is not self._found[0]:
            self._found = (found, replaced_forward(unet))
        forward = self._found[1]
        if torch.compiler.is_compiling() or not isinstance(forward, FastForward):
            return None
        if unet.training or torch.is_grad_enabled() or is_observed():
            return None
        network = forward.network
        if network is None or not network.tracker.unchanged() or forward.bypassed:
            return None if forward.fallback_reason() is not None else forward
        return None if network.tracker.hooked() else forward

    def _run_both(
        self, route: Route, call: dict[str, Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Tensor:
        """Run both loops on the same random numbers; return the original's result."""
        forward = route.forward
        weight = forward.weight
        mask = call.get("condition_mask")
        takes_generator = "generator" in self._parameters() and not self._is_dp3()

        def original(own: torch.Generator | None) -> Tensor:
            bound = self._signature.bind(self.policy, *args, **kwargs)
            if own is not None:  # however the caller gave one, or none
                bound.arguments["generator"] = own
            with forward.bypass():
                return self.original(*bound.args[1:], **bound.kwargs)

        def tells(result: Tensor) -> bool:
            free = result if mask is None else result[~mask]
            head = route.network.parameters()["final_conv.1.weight"]
            return proves(free) and proves(head)

        result = self.shadow.run_both(
            route,
            forward.limit(LOOP_LIMITS, forward.precision()),
            original,
            lambda own: _sample(
                route.sampler, call | {"generator": own or call["generator"]}, weight.dtype
            ),
            stream=call["generator"] or generator_on(weight.device, None),
            tells=tells,
            private=takes_generator,
            weights=forward.basis,
        )
        route.timesteps = self.policy.noise_scheduler.timesteps
        if self.shadow.passed(route):
            self._thread.route = route
        return result

    def leave_timesteps(self, route: Route) -> None:
        """Set the scheduler's timesteps as the loop does: users read them afterwards."""
        scheduler = self.policy.noise_scheduler
        if scheduler.timesteps is not route.timesteps:
            scheduler.set_timesteps(self.policy.num_inference_steps)
            route.timesteps = scheduler.timesteps

    def _refuse(self, why: str) -> None:
        if why != self.refused:
            name = f"{type(self.policy).__name__}.conditional_sample"
            say_fallback(name, f"cannot be accelerated: {why}", self.options.fallback)
        self.refused = why

    def _find(self, forward: FastForward, options: dict[str, Any]) -> Route:
        """Return the route for the policy as it is now and for options of its step, or raise."""
        weight = forward.weight
        kind = (weight.device, weight.dtype, forward.precision(), options)
        for place, route in enumerate(self._routes):
            if route.forward is forward and route.holds(kind):
                if place:
                    self._routes.insert(0, self._routes.pop(place))
                self._misses = 0
                break
        else:
            self._misses += 1
            if self._misses > _MISSES:
                raise ValueError("its attributes change from call to call")
            route = self._make(forward, kind, options)
            self._routes.insert(0, route)
        for old in self._routes[_KEPT:]:
            self.shadow.errors.pop(old, None)
        del self._routes[_KEPT:]
        if isinstance(route.sampler, str):
            raise ValueError(route.sampler)
        self.refused = None
        return route

    def _make(self, forward: FastForward, kind: Any, options: dict[str, Any]) -> Route:
        """Make a sampler that does what the loop does."""
        policy, precision = self.policy, forward.precision()
        scheduler, network = policy.noise_scheduler, forward.prepare()
        if network is None:
            raise ValueError(forward.refused)
        config = getattr(policy, "config", None)
        of_policy = [policy, config] if hasattr(config, "__dict__") else [policy]
        snapshots = Snapshot(*of_policy, but=_NO_SETTINGS), Snapshot(scheduler, but=OF_A_LOOP)
        sampler: DiffusionSampler | str
        try:
            check_kind(scheduler)  # others may change in ways that no attribute shows
            sampler = self._sampler(forward, scheduler, precision, dict(options))
        except (AttributeError, TypeError, ValueError) as error:
            sampler = str(error)
        return Route(
            forward, network, forward.generation, snapshots, kind, sampler, scheduler.timesteps
        )

    def _sampler(
        self,
        forward: FastForward,
        scheduler: Any,
        precision: torch.dtype,
        options: dict[str, Any],
    ) -> DiffusionSampler:
        if (why := why_replaced(scheduler)) is not None:
            raise ValueError(why)
        horizon = options.pop("horizon", None)
        table = from_diffusers(scheduler, self.policy.num_inference_steps, **options)
        packed = forward.packed(forward.options.dtype or precision)
        unet = forward.layers if packed is None else forward.unet
        if unet is None:
            raise ValueError("the network cannot be run layer by layer")
        # Of a multistep solver each forward of the network is one op, and not the loop.
        fused = packed is not None and not isinstance(table, MultistepTable)
        sampler = DiffusionSampler(
            unet,
            table,
            dtype=packed.dtype if fused else None,
            horizon=horizon,
            action_dim=forward.network.arguments["input_dim"],
            fused=fused,
            noise_dtype=precision,  # the scheduler's noise has the output's dtype
            weights=forward.options.weights,
        )
        if fused:
            sampler.packed = packed  # one copy of the weights for every sampler
        return sampler

    def _parameters(self) -> dict[str, inspect.Parameter]:
        if self._signature is None:
            self._signature = inspect.signature(type(self.policy).conditional_sample)
        return dict(self._signature.parameters)

    def _is_dp3(self) -> bool:
        """Whether the loop ignores the generator that it takes."""
        return "condition_data_pc" in self._parameters()

    def _arguments(
        self, args: Sequence[Any], kwargs: dict[str, Any], weight: Tensor
    ) -> dict[str, Any] | None:
        """Translate a call of the policy's into one of the sampler's, or raise ValueError.

        None where the original says what is wrong, or knows what this does not.
        """
        self._parameters()
        try:
            bound = self._signature.bind(self.policy, *args, **kwargs)
        except TypeError:
            return None
        supported = _FURTHER.union(*LOOPS) | {next(iter(self._signature.parameters))}
        if other := sorted(bound.arguments.keys() - supported):
            raise ValueError(f"dpa does not know what it does with {', '.join(other)}")
        bound.apply_defaults()
        given = bound.arguments
        options = dict(given.get("kwargs", {}))
        if other := sorted(options.keys() - _STEP_OPTIONS):
            raise ValueError(f"no fused step takes {', '.join(other)}")
        call: dict[str, Any] = {"options": options, "generator": given.get("generator")}
        call["global_cond"] = given.get("global_cond")
        if isinstance(call["generator"], Sequence):
            raise ValueError("there are several generators")
        if "condition_data" in given:
            data, mask = given["condition_data"], given["condition_mask"]
            if not isinstance(data, Tensor) or not isinstance(mask, Tensor):
                return None
            if data.dtype != weight.dtype:
                raise ValueError(f"condition_data is {data.dtype}, the network {weight.dtype}")
            if mask.dtype != torch.bool or mask.shape != data.shape:
                raise ValueError(f"condition_mask is {mask.dtype}, {tuple(mask.shape)}")
            if self._is_dp3():
                call["generator"] = None
            call["local_cond"] = given.get("local_cond")
            call.update(condition_data=data, condition_mask=mask)
            return call
        noise = given.get("noise")
        if noise is None:
            call["batch_size"] = given.get("batch_size")
            options["horizon"] = getattr(getattr(self.policy, "config", None), "horizon", None)
            if options["horizon"] is None:
                raise ValueError("its config has no horizon")
        elif not isinstance(noise, Tensor):
            return None
        elif noise.dtype != weight.dtype:
            raise ValueError(f"noise is {noise.dtype}, the network {weight.dtype}")
        elif noise.dim() != 3:
            raise ValueError(f"noise is {tuple(noise.shape)}")
        else:
            options["horizon"] = noise.shape[1]
        call["noise"] = noise
        return call


def _sample(sampler: DiffusionSampler, call: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """Sample as a policy does whose parameters have that dtype: it starts and ends in it."""
    if call.get("noise") is None and sampler.noise_dtype != dtype:
        data = call.get("condition_data")
        shape = (call.get("batch_size"), sampler.horizon, sampler.action_dim)
        shape = shape if data is None else tuple(data.shape)
        device = next(sampler.unet.parameters()).device
        call = call | {"noise": draw_normal(shape, call["generator"], device, dtype)}
    return sampler(**call).to(dtype)
