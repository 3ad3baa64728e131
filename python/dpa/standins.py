"""What :func:`dpa.accelerate` puts in the place of a U-Net's forward and of a policy's loop."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .family import Network, recognise, template
from .noise import generator_on
from .packed import PackedUnet, runs_packed
from .sampler import DiffusionSampler
from .schedulers import MultistepTable

_PACKABLE = (torch.float32, torch.float16, torch.bfloat16)
# Relative error in the norm, of one step and of a whole loop, beyond which the original runs.
# 16-bit networks differ by their own rounding, which some 30 layers and then the loop add up.
_STEP = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_LOOP = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}


def _error(got: Tensor, expected: Tensor) -> float:
    """Return the relative error in the norm; infinity for anything that is not a number."""
    if got.shape != expected.shape:
        return float("inf")
    got, expected = got.double(), expected.double()
    error = (got - expected).norm() / expected.norm().clamp(min=1e-30)
    return float(torch.nan_to_num(error, nan=float("inf")))


class FastForward:
    """Stands in for the forward of one U-Net: equal results, by dpa's ops.

    On packed weights where no gradient is asked for and the device has the kernels, else layer by
    layer on the network's own parameters, with gradients. In training mode the original runs.
    The first call of each kind runs both and returns the original's result.
    """

    def __init__(self, unet: nn.Module, dtype: torch.dtype | None, mode: str):
        self.unet = unet
        self.dtype = dtype
        self.mode = mode
        self.bypassed = False
        self._forget()
        self.prepare()

    def _forget(self) -> None:
        self.errors: dict[Any, float] = {}
        self.failed = False
        self._network: Network | None = None
        self._chain: nn.Module | None = None
        self._packed: dict[torch.dtype, PackedUnet] = {}
        self._hooks: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is made again from the network: a copy has its own."""
        return {"unet": self.unet, "dtype": self.dtype, "mode": self.mode}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, bypassed=False)
        self._forget()  # the network may be half restored now, so it is read at the first call

    def prepare(self) -> Network:
        """Read the network: its layers, and a chain of dpa's modules on the same parameters."""
        if self._network is None:
            network = recognise(self.unet)
            if not network.unconditioned:
                self._chain = template(network.arguments).eval()
                self._share(network)
            self._hooks = [
                hooks
                for module in self.unet.modules()
                for hooks in (module._forward_hooks, module._forward_pre_hooks)
            ]
            self._network = network
        return self._network

    @property
    def chain(self) -> nn.Module | None:
        """dpa's network on the live parameters, or None where its layers cannot express it."""
        network = self.prepare()
        if self._chain is not None:
            self._share(network)
        return self._chain

    def _share(self, network: Network) -> None:
        for key, parameter in network.parameters().items():
            path, _, name = key.rpartition(".")
            self._chain.get_submodule(path)._parameters[name] = parameter

    def original(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the forward that this one replaces."""
        return type(self.unet).forward(self.unet, *args, **kwargs)

    def packed(self, dtype: torch.dtype) -> PackedUnet | None:
        """Return the network on packed weights, or None where it cannot be packed."""
        network = self.prepare()
        device = next(iter(network.parameters().values())).device
        local = network.arguments.get("local_cond_dim") is not None
        if self.mode == "chain" or local or dtype not in _PACKABLE or not runs_packed(device):
            return None
        if dtype not in self._packed:
            self._packed[dtype] = PackedUnet(self.unet, dtype)
        return self._packed[dtype]

    def precision(self, device: torch.device, weights: torch.dtype) -> torch.dtype:
        """Return the dtype that the original computes in: the weights', or autocast's."""
        if torch.is_autocast_enabled(device.type):
            return torch.get_autocast_dtype(device.type)
        return weights

    def hooked(self) -> bool:
        """Whether anyone watches the network's layers, who would see nothing of a fused run."""
        return any(self._hooks)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the network, with the arguments of the forward that this one replaces."""
        if torch.compiler.is_compiling():
            return self._trace(*args, **kwargs)
        network = self.prepare()
        call = dict(zip(network.inputs, args, strict=False), **kwargs)
        if (
            self.bypassed
            or self.unet.training
            or self.hooked()
            or len(args) > len(network.inputs)
            or not call.keys() <= set(network.inputs)
        ):
            return self.original(*args, **kwargs)
        sample = call.pop(network.inputs[0], None)
        timestep = call.pop("timestep", None)
        if not isinstance(sample, Tensor) or not isinstance(timestep, (Tensor, int)):
            return self.original(*args, **kwargs)  # a float, which the original may truncate
        conditions = {name: value for name, value in call.items() if value is not None}
        weight = next(iter(network.parameters().values()))
        precision = self.precision(sample.device, weight.dtype)
        key = (weight.device.type, weight.dtype, precision, torch.is_grad_enabled())
        if key in self.errors:
            if self.errors[key] > self.limit(_STEP, precision):
                return self.original(*args, **kwargs)
            return self._run(sample, timestep, conditions, precision)
        expected = self.original(*args, **kwargs)
        with torch.no_grad():
            got = self._run(sample, timestep, conditions, precision)
        self.errors[key] = _error(got, expected.detach())
        if self.errors[key] > (limit := self.limit(_STEP, precision)):
            self.failed = True
            _warn(type(self.unet).__name__, self.errors[key], limit)
        return expected

    def _trace(self, *args: Any, **kwargs: Any) -> Tensor:
        """Under torch.compile: dpa's layers as one graph, unless a check has failed before."""
        ready = self._network is not None and self._chain is not None and not self.failed
        if not ready or self.unet.training:
            return self.original(*args, **kwargs)
        call = dict(zip(self._network.inputs, args, strict=False), **kwargs)
        sample = call.pop(self._network.inputs[0])
        return self._chain(sample, call.pop("timestep"), **call)

    def _run(
        self,
        sample: Tensor,
        timestep: Tensor | int,
        conditions: dict[str, Tensor],
        precision: torch.dtype,
    ) -> Tensor:
        packed = None if torch.is_grad_enabled() else self.packed(self.dtype or precision)
        if packed is None:
            chain = self.chain
            if chain is None:
                return self.original(sample, timestep, **conditions)
            return chain(sample, timestep, **conditions)
        batch = sample.shape[0]
        if isinstance(timestep, int) or (timestep.device.type == "cpu" and timestep.dim() == 0):
            steps = torch.full((batch,), float(timestep), device=sample.device)
        else:
            steps = timestep.to(sample.device, torch.float32).expand(batch)
        cond = conditions.get("global_cond")
        out = packed(sample.float(), steps, None if cond is None else cond.float())
        return out.to(precision)

    def limit(self, table: dict[torch.dtype, float], precision: torch.dtype) -> float:
        """Return the error that a table allows: that of the coarsest arithmetic on either side."""
        kinds = [precision, self.dtype or precision]
        # The original's convolutions may round to TF32, which has float16's mantissa.
        if next(self.unet.parameters()).is_cuda and torch.backends.cudnn.allow_tf32:
            kinds.append(torch.float16)
        return max(table[kind] for kind in kinds)


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
        self._samplers: dict[Any, tuple[Any, ...]] = {}
        self._signature: inspect.Signature | None = None
        self._timesteps: Any = None

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
        key, forward, sampler, call, precision = prepared
        limit = forward.limit(_LOOP, precision)
        if key not in self.errors:
            return self._compare(key, limit, forward, sampler, call, args, kwargs)
        if self.errors[key] > limit:
            return self.original(*args, **kwargs)
        scheduler = self.policy.noise_scheduler
        if scheduler.timesteps is not self._timesteps:
            scheduler.set_timesteps(self.policy.num_inference_steps)  # users look there afterwards
            self._timesteps = scheduler.timesteps
        return sampler(**call)

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
        """Run both loops on the same random numbers; return the original's result."""
        weight = next(iter(forward.prepare().parameters().values()))
        generator = call["generator"] or generator_on(weight.device, None)
        before = generator.get_state()
        forward.bypassed = True
        try:
            expected = self.original(*args, **kwargs)
        finally:
            forward.bypassed = False
        after = generator.get_state()
        generator.set_state(before)
        error = _error(sampler(**call), expected)
        if not torch.equal(generator.get_state(), after):
            error = float("inf")
        generator.set_state(after)
        self.errors[key] = error
        if error > limit:
            _warn(f"{type(self.policy).__name__}.conditional_sample", error, limit)
        return expected

    def _prepare(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """Return all that a fast run needs, or None where the original must run."""
        policy = self.policy
        unet = getattr(policy, self.network, None)
        unet = getattr(unet, "_orig_mod", unet)
        forward = vars(unet).get("forward") if isinstance(unet, nn.Module) else None
        if torch.compiler.is_compiling() or not isinstance(forward, FastForward):
            return None
        if unet.training or torch.is_grad_enabled() or forward.bypassed:
            return None
        weight = next(iter(forward.prepare().parameters().values()))
        if forward.hooked() or weight.dtype not in (torch.float32, torch.float64):
            return None  # 16-bit policies draw 16-bit noise, step by step
        call = self._arguments(args, kwargs, weight)
        if call is None:
            return None
        options = call.pop("options")
        precision = forward.precision(weight.device, weight.dtype)
        scheduler = policy.noise_scheduler
        steps = policy.num_inference_steps
        made = (id(scheduler), id(scheduler.config), steps, weight.device, precision)
        key = (*made, tuple(sorted(options.items())))
        if key not in self._samplers:
            try:
                sampler = self._make(forward, scheduler, steps, precision, options)
            except (TypeError, ValueError) as error:
                self.refused = str(error)
                sampler = None
            # The scheduler is kept, so that its id stays its own.
            self._samplers[key] = (sampler, scheduler, scheduler.config)
        sampler = self._samplers[key][0]
        if sampler is None:
            return None
        if not sampler.fused:
            sampler.unet = forward.chain
        return (key, forward, sampler, call, precision)

    def _make(
        self,
        forward: FastForward,
        scheduler: Any,
        steps: int,
        precision: torch.dtype,
        options: dict[str, Any],
    ) -> DiffusionSampler:
        dtype = forward.dtype or precision
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
            horizon=getattr(getattr(self.policy, "config", None), "horizon", None),
            **options,
        )
        if fused and isinstance(sampler.table, MultistepTable):
            sampler.fused, sampler.dtype = False, None
            if forward.chain is None:
                raise ValueError("the network cannot be run layer by layer")
        return sampler

    def _arguments(
        self, args: Sequence[Any], kwargs: dict[str, Any], weight: Tensor
    ) -> dict[str, Any] | None:
        """Translate a call of the policy's into one of the sampler's."""
        if self._signature is None:
            self._signature = inspect.signature(type(self.policy).conditional_sample)
        try:
            bound = self._signature.bind(self.policy, *args, **kwargs).arguments
        except TypeError:
            return None
        options = dict(bound.get("kwargs", {}))
        if not options.keys() <= {"eta", "use_clipped_model_output"}:
            return None
        call: dict[str, Any] = {"options": options, "generator": bound.get("generator")}
        call["global_cond"] = bound.get("global_cond")
        if "condition_data" in bound:
            data, mask = bound["condition_data"], bound["condition_mask"]
            if data.dtype != weight.dtype or mask.dtype != torch.bool or mask.shape != data.shape:
                return None
            if "condition_data_pc" in self._signature.parameters:
                call["generator"] = None  # DP3 ignores it
            call["local_cond"] = bound.get("local_cond")
            call.update(condition_data=data, condition_mask=mask)
        else:
            noise = bound.get("noise")
            if noise is not None and noise.dtype != weight.dtype:
                return None
            if noise is None:
                call["batch_size"] = bound["batch_size"]
            call["noise"] = noise
        if isinstance(call["generator"], Sequence):
            return None
        horizon = getattr(getattr(self.policy, "config", None), "horizon", None)
        if call.get("noise") is None and "condition_data" not in call and horizon is None:
            return None
        return call


def _warn(what: str, error: float, limit: float) -> None:
    warnings.warn(
        f"dpa: the accelerated {what} differs from the original by {error:.1e} (relative), more "
        f"than {limit:.0e}, so the original runs; dpa.explain says more",
        RuntimeWarning,
        stacklevel=4,
    )
