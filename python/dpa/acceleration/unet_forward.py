"""What :func:`dpa.accelerate` puts in the place of a U-Net's forward."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpa.nn.blocks1d import is_exporting
from dpa.nn.family import Network, NotInFamily, recognise, template
from dpa.nn.plain import HOOKS, HOOKS_OF_ALL
from dpa.packed.unet import PackedUnet, runs_packed

SIXTEEN_BITS = (torch.float16, torch.bfloat16)
_PACKABLE = (torch.float32, *SIXTEEN_BITS)
_DEVICES = ("cpu", "cuda")
LOOK_EVERY = 0.01  # seconds; no training fits between two looks
# Relative error in the norm of one step beyond which the original runs. 16-bit networks differ by
# their own rounding, which some 30 layers add up.
STEP_LIMITS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Return the relative error in the norm; infinity for anything that is not a number."""
    if got.shape != expected.shape:
        return float("inf")
    got, expected = got.detach().double(), expected.detach().double()
    error = (got - expected).norm() / expected.norm().clamp(min=1e-30)
    return float(torch.nan_to_num(error, nan=float("inf")))


def run_original(run: Callable[[], Tensor], weight: Tensor) -> Tensor:
    """Run the original, under autocast where 16-bit weights meet its float32 position embedding.

    The originals compute that embedding in float32 whatever the weights are, so in ``.half()`` and
    ``.bfloat16()`` they stop with an error of dtypes unless the caller is in autocast.
    """
    try:
        return run()
    except RuntimeError as error:
        if weight.dtype not in SIXTEEN_BITS or "dtype" not in str(error):
            raise
    with torch.autocast(weight.device.type, weight.dtype):
        return run()


def can_tell(expected: Tensor) -> bool:
    """Whether a comparison with this shows anything: some value is not zero, all are finite."""
    return 0 < float(expected.detach().double().norm()) < float("inf")


def compare(run: Callable[[], Tensor], expected: Tensor, limit: float) -> tuple[float, str | None]:
    """Return the error of what ``run`` gives, and what is wrong with it, or None.

    An exception is no less a difference, for the original has run on the same input.
    """
    try:
        error = relative_error(run(), expected)
    except (RuntimeError, ValueError) as problem:
        return float("inf"), f"raised {str(problem).partition(chr(10))[0]}"
    if error > limit:
        return error, difference(error, limit)
    return error, None


def difference(error: float, limit: float) -> str:
    """Say what a failed self-check found."""
    return f"differs from the original by {error:.1e} (relative), more than {limit:.0e}"


def say_fallback(what: str, why: str, fallback: bool) -> None:
    """Warn that the original runs, and why; raise where the user wants no fallback."""
    if not fallback:
        raise RuntimeError(f"dpa: {what} {why}, and fallback is False")
    warnings.warn(
        f"dpa: {what} {why}, so the original runs; dpa.explain says more",
        RuntimeWarning,
        stacklevel=4,
    )


def chain_of(network: Network) -> nn.Module:
    """Return dpa's network on the same parameters, whatever is put in the place of one later."""
    chain = template(network.arguments).eval()
    for key, (module, _) in network.slots.items():
        vars(chain.get_submodule(key.rpartition(".")[0]))["_parameters"] = module._parameters
    return chain


def _may_look() -> bool:
    """Whether operations run now are seen by nobody, and their results can be read."""
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    return not capturing and torch._C._len_torch_dispatch_stack() == 0


def _is_recorded() -> bool:
    """Whether somebody records what a call does, and may expect the same of it again."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None or not _may_look()


def _as_it_is(saved: Tensor) -> Tensor:
    return saved


@dataclass(frozen=True)
class Options:
    """What :func:`dpa.accelerate` was asked for; its docstring says what each of them means."""

    dtype: torch.dtype | None = None
    mode: str = "loop"
    tolerance: float | None = None
    fallback: bool = True


class FastForward:
    """Stands in for the forward of one U-Net: equal results, by dpa's ops.

    On packed weights in evaluation where no gradient is asked for and the device has the kernels,
    else layer by layer on the network's own parameters, with gradients.
    The first call of each kind runs both and returns the original's result.
    """

    def __init__(self, unet: nn.Module, options: Options):
        self.unet = unet
        self.options = options
        self.bypassed = False
        self.generation = 0
        self._forget()
        self.prepare()

    def _forget(self) -> None:
        self._network: Network | None = None
        self.chain: nn.Module | None = None
        self._hooks: list[Any] = []
        self.repack()

    def repack(self) -> None:
        """Drop what was packed and compared: weights were written where nobody sees it."""
        self.generation += 1
        self.errors: dict[Any, float] = {}
        self.failed: str | None = None
        if self._network is None:
            self.refused: str | None = None
        self._packed: dict[torch.dtype, PackedUnet | None] = {}
        self._placed: tuple[torch.device, torch.dtype] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is made again from the network: a copy has its own."""
        return {"unet": self.unet, "options": self.options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, bypassed=False, generation=0)
        self._forget()  # the network may be half restored now, so it is read at the first call

    def prepare(self) -> Network | None:
        """Read the network: its layers, and a chain of dpa's modules on the same parameters.

        Again after modules were replaced; None where it is then no longer one of the family.
        """
        if self._network is not None and self._network.altered():
            self._forget()
        if self._network is None and self.refused is None:
            try:
                network = recognise(self.unet)
            except NotInFamily as error:
                why = f"was altered: {error}"
                say_fallback(type(self.unet).__name__, why, self.options.fallback)
                self.refused = why
                return None
            if not network.unconditioned:
                self.chain = chain_of(network)
            self._hooks = [getattr(m, name) for m in self.unet.modules() for name in HOOKS]
            self._hooks += HOOKS_OF_ALL
            self._network = network
        return self._network

    def why_original(self) -> str | None:
        """Return why the original runs now, whatever it is called with; None where dpa's may."""
        if self.bypassed:
            return "it is being compared with"
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return "torch.func transforms it"
        if torch.jit.is_tracing():
            return "torch.jit.trace records it"
        if self.prepare() is None:
            return self.refused
        config = getattr(self.unet, "config", None)
        if self.unet.training and getattr(config, "gradient_checkpointing", False):
            return "it recomputes activations to save memory, as its gradient_checkpointing says"
        if any(self._hooks):  # whoever watches the layers would see nothing of a fused run
            return "its layers have hooks"
        if self.weight.device.type not in _DEVICES:
            return f"it is on {self.weight.device}"
        return None

    @property
    def weight(self) -> Tensor:
        """One of the network's parameters, for its device and dtype."""
        module, name = next(iter(self._network.slots.values()))
        return module._parameters[name]

    def original(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the forward that this one replaces."""
        return type(self.unet).forward(self.unet, *args, **kwargs)

    def packed(self, dtype: torch.dtype) -> PackedUnet | None:
        """Return the network on packed weights, or None where it cannot be packed."""
        device = self.weight.device
        chain = self.options.mode == "chain"
        if chain or dtype not in _PACKABLE or not runs_packed(device):
            return None
        if self._placed != (placed := (device, self.weight.dtype)):
            self._packed.clear()  # made of weights that are gone
            self._placed = placed
        if dtype not in self._packed:
            try:
                self._packed[dtype] = PackedUnet(self.unet, dtype)
            except ValueError:  # the ops run none like it
                self._packed[dtype] = None
        return self._packed[dtype]

    def precision(self, device: torch.device, weights: torch.dtype) -> torch.dtype:
        """Return the dtype that the original computes in: the weights', or autocast's."""
        if torch.is_autocast_enabled(device.type) and weights != torch.float64:
            return torch.get_autocast_dtype(device.type)
        return weights

    @property
    def __code__(self) -> Any:
        """Of the forward that this one replaces: torch.export asks where it is written."""
        return type(self.unet).forward.__code__

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the network, with the arguments of the forward that this one replaces."""
        if torch.compiler.is_compiling():
            return self._trace(*args, **kwargs)
        if self.why_original() is not None:
            return self.original(*args, **kwargs)
        call = self._arguments(args, kwargs)
        if call is None:
            return self.original(*args, **kwargs)
        sample, _, conditions = call
        weight = self.weight
        key = self._kind(weight)
        precision = key[2]
        local = self._network.arguments.get("local_cond_dim") is not None
        mixed = sample.dtype != weight.dtype and precision == weight.dtype
        if mixed or not sample.is_floating_point() or ("local_cond" in conditions and not local):
            return self.original(*args, **kwargs)  # which says what is wrong
        recorded = key not in self.errors and _is_recorded()
        if recorded and self._trains():
            self._check_apart()
        if self._passed(key):
            return self._run(*call, precision)
        expected = run_original(lambda: self.original(*args, **kwargs), weight)
        # In the caller's own mode: without gradients the network would keep weights packed for it.
        if key not in self.errors and not recorded:
            self._compare(key, lambda: self._run(*call, precision), expected)
        return expected

    def _arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor | int, dict[str, Tensor]] | None:
        """Return sample, timestep and conditions, or None where only the original takes them."""
        inputs = self._network.inputs
        call = dict(zip(inputs, args, strict=False), **kwargs)
        if len(call) != len(args) + len(kwargs) or any(name not in inputs for name in call):
            return None
        sample = call.pop(inputs[0], None)
        timestep = call.pop("timestep", None)
        # Subclasses trace or distribute; a timestep that is a float, the original may truncate.
        if type(sample) is not Tensor or not isinstance(timestep, (Tensor, int)):
            return None
        return sample, timestep, {name: x for name, x in call.items() if x is not None}

    def _kind(self, weight: Tensor) -> tuple[Any, ...]:
        """Return what calls have in common that one comparison stands for."""
        precision = self.precision(weight.device, weight.dtype)
        return weight.device.type, weight.dtype, precision, self._trains()

    def is_compared(self) -> bool:
        """Whether a call like one made now was compared with the original."""
        return self._kind(self.weight) in self.errors

    def _passed(self, key: tuple[Any, ...]) -> bool:
        """Whether calls of this kind were compared, and agreed."""
        error = self.errors.get(key)
        return error is not None and error <= self.limit(STEP_LIMITS, key[2])

    def _compare(self, key: tuple[Any, ...], run: Callable[[], Tensor], expected: Tensor) -> None:
        """Compare what ``run`` gives with the original's, where that can tell right from wrong."""
        if not can_tell(expected):
            return
        error, why = compare(run, expected, self.limit(STEP_LIMITS, key[2]))
        if why is not None:
            what = f"the accelerated {type(self.unet).__name__}"
            say_fallback(what, why, self.options.fallback)
            self.failed = why
        self.errors[key] = error

    def _check_apart(self) -> bool:
        """Compare the layers on numbers of their own, where the caller's call must run only once.

        Returns:
            Whether the layers agree with the original in the precision that is due.

        """
        weight, arguments = self.weight, self._network.arguments
        key = (*self._kind(weight)[:3], True)
        if key not in self.errors and self.chain is not None and _may_look():
            generator = torch.Generator("cpu").manual_seed(0)

            def draw(*shape: int) -> Tensor:
                return torch.randn(2, *shape, generator=generator, device="cpu").to(weight)

            horizon = 2 ** len(arguments["down_dims"])
            sample = draw(horizon, arguments["input_dim"])
            timestep = torch.tensor([1, 50], device=weight.device)
            conditions = {}
            if arguments["global_cond_dim"]:
                conditions["global_cond"] = draw(arguments["global_cond_dim"])
            if arguments.get("local_cond_dim"):
                conditions["local_cond"] = draw(horizon, arguments["local_cond_dim"])
            with torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
                run = functools.partial(self.original, sample, timestep, **conditions)
                expected = run_original(run, weight)
                self._compare(key, lambda: self.chain(sample, timestep, **conditions), expected)
        return self._passed(key)

    @torch.compiler.assume_constant_result
    def _may_trace(self) -> bool:
        """Look at the network itself while it is compiled, and not in what is compiled."""
        if is_exporting() or self.why_original() is not None or self.chain is None:
            return False
        return self._check_apart()

    def _trace(self, *args: Any, **kwargs: Any) -> Tensor:
        """Under torch.compile: dpa's layers as one graph, as long as they are the network's."""
        ready = not self.bypassed and self._may_trace() and self.failed is None
        if not ready or self._network.altered_in_trace(self.unet):
            return self.original(*args, **kwargs)
        call = self._arguments(args, kwargs)
        if call is None:
            return self.original(*args, **kwargs)
        sample, timestep, conditions = call
        return self.chain(sample, timestep, **conditions)

    def _run(
        self,
        sample: Tensor,
        timestep: Tensor | int,
        conditions: dict[str, Tensor],
        precision: torch.dtype,
    ) -> Tensor:
        packed = None if self._trains() else self.packed(self.options.dtype or precision)
        if packed is None:
            chain = self.chain
            if chain is None:
                return self.original(sample, timestep, **conditions)
            return chain(sample, timestep, **conditions)
        packed.follow(LOOK_EVERY)
        batch = sample.shape[0]
        if isinstance(timestep, int) or (timestep.device.type == "cpu" and timestep.dim() == 0):
            steps = torch.full((batch,), float(timestep), dtype=torch.float32, device=sample.device)
        else:
            steps = timestep.to(sample.device, torch.float32).expand(batch)
        cond = conditions.get("global_cond")
        out = packed(sample.float(), steps, None if cond is None else cond.float())
        return out.to(precision)

    def _trains(self) -> bool:
        """Whether gradients may be asked for, or weights are about to change again."""
        duals = torch.autograd.forward_ad._current_level >= 0
        return self.unet.training or torch.is_grad_enabled() or duals

    def limit(self, table: dict[torch.dtype, float], precision: torch.dtype) -> float:
        """Return the error that a table allows: that of the coarsest arithmetic on either side."""
        if self.options.tolerance is not None:
            return self.options.tolerance
        kinds = [precision, self.options.dtype or precision]
        # The original's convolutions may round to TF32, which has float16's mantissa.
        if next(self.unet.parameters()).is_cuda and torch.backends.cudnn.allow_tf32:
            kinds.append(torch.float16)
        return max(table[kind] for kind in kinds)
