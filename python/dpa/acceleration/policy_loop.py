"""What :func:`dpa.accelerate` puts in the place of a policy's denoising loop."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpa.acceleration.scheduler_step import attributes_of, state_of, why_replaced
from dpa.acceleration.unet_forward import (
    FastForward,
    can_tell,
    compare,
    run_original,
    say_fallback,
)
from dpa.sampling.rng import draw_normal, generator_on
from dpa.sampling.sampler import DiffusionSampler
from dpa.schedulers.conversion import MultistepTable, check_kind
from dpa.training.graphed_calls import replaced_forward

# Relative error in the norm, of the whole loop, beyond which the original runs: that of a step,
# which the steps add up.
_LOOP = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}
_KEPT = 8  # samplers: one for each scheduler, number of steps and kind of call


class FastLoop:
    """Stands in for a policy's ``conditional_sample``: the whole loop by :class:`DiffusionSampler`.

    It reads the policy's network, scheduler and ``num_inference_steps`` at every call. What it
    cannot run as the original does, the original runs, on the accelerated network.
    """

    def __init__(self, policy: nn.Module, network: str):
        self.policy = policy
        self.network = network
        self._forget()

    def _forget(self) -> None:
        self.errors: dict[Any, float] = {}
        self.refused: str | None = None
        self.failed: str | None = None
        self._samplers: dict[Any, tuple[Any, ...]] = {}
        self._signature: inspect.Signature | None = None
        self._set: tuple[Any, Any] = (None, None)
        self._placed: tuple[torch.device, torch.dtype, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is made again: a copy has its own."""
        return {"policy": self.policy, "network": self.network}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def original(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the loop that this one replaces."""
        return type(self.policy).conditional_sample(self.policy, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Sample, with the arguments of the method that this one replaces."""
        prepared = self._prepare(args, kwargs)
        if prepared is None:
            return self.original(*args, **kwargs)
        key, forward, sampler, precision, call = prepared
        limit = forward.limit(_LOOP, precision)
        if key not in self.errors:
            return self._compare(key, limit, forward, sampler, call, args, kwargs)
        if self.errors[key] > limit:
            return self._original(forward.weight, call, args, kwargs)
        scheduler = self.policy.noise_scheduler
        if scheduler.timesteps is not self._set[0] or sampler is not self._set[1]:
            scheduler.set_timesteps(self.policy.num_inference_steps)  # users look there afterwards
            self._set = (scheduler.timesteps, sampler)
        return _sample(sampler, call, forward.weight.dtype)

    def _original(
        self, weight: Tensor, call: dict[str, Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Tensor:
        """Run the original on the random numbers that are due, 16-bit weights included."""
        generator = call["generator"] or generator_on(weight.device, None)
        before = generator.get_state()

        def run() -> Tensor:
            generator.set_state(before)
            return self.original(*args, **kwargs)

        return run_original(run, weight)

    def _compare(
        self,
        key: Any,
        limit: float,
        forward: FastForward,
        sampler: DiffusionSampler,
        call: dict[str, Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Run both loops on the same random numbers; return the original's result.

        Where agreeing with that proves nothing, the next call is the first.
        """
        weight = forward.weight
        generator = call["generator"] or generator_on(weight.device, None)
        before = generator.get_state()
        forward.bypassed = True
        try:
            expected = self._original(weight, call, args, kwargs)
        finally:
            forward.bypassed = False
        mask = call.get("condition_mask")
        free = expected if mask is None else expected[~mask]
        head = forward.prepare().parameters()["final_conv.1.weight"]
        if not can_tell(free) or not can_tell(head):
            return expected
        after = generator.get_state()
        generator.set_state(before)
        error, why = compare(lambda: _sample(sampler, call, weight.dtype), expected, limit)
        if error < float("inf") and not torch.equal(generator.get_state(), after):
            error, why = float("inf"), "draws other random numbers than the original"
        generator.set_state(after)
        if why is not None:
            self._say("the accelerated ", why, forward)
            self.failed = why
        self.errors[key] = error
        return expected

    def _say(self, which: str, why: str, forward: FastForward) -> None:
        name = f"{which}{type(self.policy).__name__}.conditional_sample"
        say_fallback(name, why, forward.options.fallback)

    def _prepare(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """Return all that a fast run needs, or None where the original must run."""
        policy = self.policy
        unet = getattr(policy, self.network, None)
        unet = getattr(unet, "_orig_mod", unet)
        forward = replaced_forward(unet) if isinstance(unet, nn.Module) else None
        if torch.compiler.is_compiling() or not isinstance(forward, FastForward):
            return None
        trains = forward.unet.training or torch.is_grad_enabled()
        if trains or forward.why_original() is not None:
            return None
        if self._signature is None:
            self._signature = inspect.signature(type(policy).conditional_sample)
        try:
            bound = self._signature.bind(policy, *args, **kwargs).arguments
        except TypeError:
            return None  # the original says what is wrong
        try:
            call = self._arguments(bound, forward.weight)
            found = self._find(forward, call.pop("options"))
        except (TypeError, ValueError) as error:
            if str(error) != self.refused:
                self._say("", f"cannot be accelerated: {error}", forward)
                self.refused = str(error)
            return None
        self.refused = None
        return (*found, call)

    def _find(self, forward: FastForward, options: dict[str, Any]) -> tuple[Any, ...]:
        """Return a sampler for the scheduler and the network as they are now, and what it is."""
        policy, weight = self.policy, forward.weight
        precision = forward.precision(weight.device, weight.dtype)
        scheduler, steps = policy.noise_scheduler, policy.num_inference_steps
        check_kind(scheduler)  # others may change in ways that state_of takes for somebody's
        placed = (weight.device, weight.dtype, forward.generation)
        made = (id(scheduler), state_of(scheduler), steps, precision)
        key = (*made, *placed, tuple(sorted(options.items())))
        if self._placed != placed:
            self._samplers.clear()  # made of weights that are gone
            self.errors.clear()
            self._placed = placed
        if key not in self._samplers:
            try:
                sampler = self._make(forward, scheduler, steps, precision, options)
            except (AttributeError, TypeError, ValueError) as error:
                sampler = str(error)
            # What the key names by id is kept, so that the id stays its own.
            self._samplers[key] = (sampler, (scheduler, *attributes_of(scheduler).values()))
            if len(self._samplers) > _KEPT:
                oldest = next(iter(self._samplers))
                del self._samplers[oldest]
                self.errors.pop(oldest, None)
        sampler = self._samplers[key][0]
        if isinstance(sampler, str):
            raise ValueError(sampler)
        if not sampler.fused:
            sampler.unet = forward.chain
        return key, forward, sampler, precision

    def _make(
        self,
        forward: FastForward,
        scheduler: Any,
        steps: int,
        precision: torch.dtype,
        options: dict[str, Any],
    ) -> DiffusionSampler:
        if (why := why_replaced(scheduler)) is not None:
            raise ValueError(why)
        dtype = forward.options.dtype or precision
        fused = forward.packed(dtype) is not None
        unet = forward.unet if fused else forward.chain
        if unet is None:
            raise ValueError("the network cannot be run layer by layer")
        sampler = DiffusionSampler(
            unet,
            scheduler,
            steps,
            dtype if fused else None,
            action_dim=forward.prepare().arguments["input_dim"],
            fused=fused,
            noise_dtype=precision,  # the scheduler draws in the dtype of the network's output
            watch=True,
            **options,
        )
        sampler._packed = forward.packed(dtype)  # one copy of the weights for every sampler
        if fused and isinstance(sampler.table, MultistepTable):
            sampler.fused, sampler.dtype = False, None
            if forward.chain is None:
                raise ValueError("the network cannot be run layer by layer")
        return sampler

    def _arguments(self, bound: dict[str, Any], weight: Tensor) -> dict[str, Any]:
        """Translate a call of the policy's into one of the sampler's, or raise ValueError."""
        options = dict(bound.get("kwargs", {}))
        if other := options.keys() - {"eta", "use_clipped_model_output"}:
            raise ValueError(f"no fused step takes {', '.join(sorted(other))}")
        call: dict[str, Any] = {"options": options, "generator": bound.get("generator")}
        call["global_cond"] = bound.get("global_cond")
        if "condition_data" in bound:
            data, mask = bound["condition_data"], bound["condition_mask"]
            if data.dtype != weight.dtype:
                raise ValueError(f"condition_data is {data.dtype}, the network {weight.dtype}")
            if mask.dtype != torch.bool or mask.shape != data.shape:
                raise ValueError(f"condition_mask is {mask.dtype}, {tuple(mask.shape)}")
            if "condition_data_pc" in self._signature.parameters:
                call["generator"] = None  # DP3 ignores it
            call["local_cond"] = bound.get("local_cond")
            call.update(condition_data=data, condition_mask=mask)
        else:
            noise = bound.get("noise")
            if noise is not None and noise.dtype != weight.dtype:
                raise ValueError(f"noise is {noise.dtype}, the network {weight.dtype}")
            if noise is None:
                call["batch_size"] = bound["batch_size"]
                options["horizon"] = getattr(getattr(self.policy, "config", None), "horizon", None)
                if options["horizon"] is None:
                    raise ValueError("its config has no horizon")
            elif noise.dim() != 3:
                raise ValueError(f"noise is {tuple(noise.shape)}")
            else:
                options["horizon"] = noise.shape[1]
            call["noise"] = noise
        if isinstance(call["generator"], Sequence):
            raise ValueError("there are several generators")
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
