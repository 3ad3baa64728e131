"""What :func:`dpa.accelerate` puts in the place of a U-Net's forward."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn, promote_types

from dpa.acceleration.shadow_run import Options, ShadowRun, say_fallback
from dpa.library.compiling import constant_in_graphs
from dpa.nn.family import Network, NotInFamily, recognise, run_network
from dpa.nn.plain import is_exporting
from dpa.packed.agreement import STEP_LIMITS, example, limit
from dpa.packed.config import runs_packed
from dpa.packed.unet import PackedUnet
from dpa.sampling.forwards import Forwards
from dpa.tracking import find, is_observed, stamp_of
from dpa.tracking.replacing import Replacement, class_of

_PACKABLE = (torch.float32, torch.float16, torch.bfloat16)
_DEVICES = ("cpu", "cuda")
_CONDITIONS = ("local_cond", "global_cond")
_MISSES, _UNSTEADY = 32, "its attributes change from call to call"  # so many in a row
OBSERVED = "torch.func transforms it, or torch.jit.trace records it"


class Bypass(threading.local):
    """Whether this thread runs the original of a network."""

    on = False


class Denoiser:
    """What a loop asks of a network, whether dpa has kernels for it or not.

    Attributes:
        unet: the module.
        options: of :func:`dpa.accelerate`.
        generation: another number after whatever made comparisons void.
        home: what holds one of its floating parameters, and the name there.
        bypass: ``on`` where this thread runs the original: its loop is being compared with.

    """

    unet: nn.Module
    options: Options
    generation = 0
    home: tuple[dict[str, Any], str]

    @property
    def weight(self) -> Tensor:
        """One of the network's parameters, for its device and dtype."""
        held, name = self.home
        return held[name]

    def precision(self) -> torch.dtype:
        """Return the dtype that the network computes in: the weights', or autocast's."""
        kind, dtype = self.weight.device.type, self.weight.dtype
        if torch.is_autocast_enabled(kind) and dtype != torch.float64:
            return torch.get_autocast_dtype(kind)
        return dtype

    def packed_dtype(self, precision: torch.dtype) -> torch.dtype:
        """Return the dtype of what stands in for the network."""
        return precision

    def limit(self, table: dict[torch.dtype, float], precision: torch.dtype) -> float:
        """Return the error that passes: as the user chose, or a table allows."""
        dtypes = precision, self.packed_dtype(precision)
        return self.options.tolerance or limit(table, dtypes, self.weight.device)


def _may_read() -> bool:
    """Whether nothing records or captures operations now, so that results can be read."""
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    return not capturing and torch._C._len_torch_dispatch_stack() == 0


def _is_recorded() -> bool:
    """Whether somebody records what a call does, and may expect the same of it again."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None or not _may_read()


def _as_it_is(saved: Tensor) -> Tensor:
    return saved


class FastForward(Replacement, Denoiser):
    """Replaces the forward of one U-Net: equal results, by dpa's ops.

    On packed weights in evaluation where no gradient is needed and the device has the kernels,
    else layer by layer on the network's own parameters, with gradients.
    The first call of each kind runs both and returns the original's result.

    Attributes:
        network: what the U-Net was recognised as; None where it is none of the family any more.
        layers: dpa's layers on its parameters, or None where dpa has none like them.
        shadow: what comparisons with the original found.
        refused: why it is none of the family, or None.

    """

    OWNER, KEPT = "unet", ("unet", "options")

    def __init__(self, unet: nn.Module, options: Options, network: Network | None = None):
        super().__init__(unet, options)
        if network is not None:
            self._take(network)

    def forget(self) -> None:
        """Read the network again, at the first call: it may be half restored now."""
        self.bypass = Bypass()
        name = f"the accelerated {type(self.unet).__name__}"
        self.shadow = ShadowRun(name, self.options.fallback, self.basis)
        self._reset()
        self._called = self.generation  # at the last call
        self._misses = 0  # calls in a row that found a change

    def basis(self) -> Any:
        """Return what a write of weights changes."""
        return None if self.network is None else stamp_of(list(self.network.parameters().values()))

    def _reset(self) -> None:
        self.network: Network | None = None
        self.layers: nn.Module | None = None
        self.repack()

    def _take(self, network: Network) -> None:
        self.network, self.layers = network, network.layers()
        self.called_alike = network.called_alike
        module, name = next(iter(network.slots.values()))
        self.home = module._parameters, name
        self._multiple = 2 ** (len(network.arguments["down_dims"]) - 1)  # of horizons
        self._powers = network.variant.powers_of_two

    def repack(self) -> None:
        """Drop what was packed and compared: weights were written in a way that is not tracked.

        A network that was none of the family is recognised again.
        """
        self.refused: str | None = None
        self.generation += 1
        self.shadow.forget()
        self._packed: dict[torch.dtype, PackedUnet | None] = {}
        self._forwards = Forwards()
        self._placed: tuple[torch.device, torch.dtype] | None = None
        self._channels_first = False

    def prepare(self) -> Network | None:
        """Return the network as it is now; None where it is no longer one of the family."""
        if self.network is not None and not self.network.tracker.unchanged():
            self._reset()
        if self.network is None and self.refused is None:
            try:
                self._take(recognise(self.unet))
            except NotInFamily as error:
                self.refused = f"has changed: {error}"
                say_fallback(type(self.unet).__name__, self.refused, self.options.fallback)
        return self.network

    def fallback_reason(self) -> str | None:
        """Return why the original runs now, whatever it is called with; None where dpa's may."""
        if self.bypass.on:
            return "it is being compared with"
        if is_observed():
            return OBSERVED
        if self._misses > _MISSES:
            return _UNSTEADY
        network = self.prepare()
        if network is None:
            return self.refused
        if self.unet.training and find(self.unet, "config.gradient_checkpointing"):
            return "it recomputes activations to save memory, as its gradient_checkpointing says"
        if (why := network.tracker.no_one_op()) is not None:
            return why
        if self.weight.device.type not in _DEVICES:
            return f"it is on {self.weight.device}"
        return None

    def original(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the forward that this one replaces."""
        if torch.compiler.is_compiling():  # which cannot trace the forward of an object's own class
            return self._class.forward(self.unet, *args, **kwargs)
        forward = class_of(self.unet).forward
        if self.network is None:
            return forward(self.unet, *args, **kwargs)
        return run_network(lambda: forward(self.unet, *args, **kwargs), self.weight)

    def packed(self, dtype: torch.dtype) -> PackedUnet | None:
        """Return the network on packed weights, or None where it cannot be packed."""
        weight = self.weight
        if self._placed != (placed := (weight.device, weight.dtype)):
            self._packed.clear()  # made of weights that are gone
            self._placed = placed
        if dtype not in self._packed:
            self._packed[dtype] = self._pack(dtype)
        return self._packed[dtype]

    def _pack(self, dtype: torch.dtype) -> PackedUnet | None:
        free = self.options.mode != "chain" and dtype in _PACKABLE
        if not free or not runs_packed(self.weight.device):
            return None
        try:
            return PackedUnet(self.unet, dtype, weights=self.options.weights, network=self.network)
        except ValueError:  # the ops run none like it
            return None

    def precision(self) -> torch.dtype:
        """Return the dtype that the original computes in: the weights', autocast's, or lowered."""
        return self.lowered() or super().precision()

    def packed_dtype(self, precision: torch.dtype) -> torch.dtype:
        """Return the dtype of packed weights."""
        return self.options.dtype or precision

    def lowered(self) -> torch.dtype | None:
        """Return the dtype that a call made now trains in, where the trainer's is float32."""
        if self.options.training_dtype is None or not self.unet.training:
            return None
        weight = next(self.unet.parameters())
        own = torch.is_autocast_enabled(weight.device.type)
        plain = weight.dtype == torch.float32 and torch.is_grad_enabled() and not own
        return self.options.training_dtype if plain else None

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the network, with the arguments of the forward that this one replaces."""
        lowered = self.lowered()
        if lowered is None:
            return self._call(*args, **kwargs)
        with torch.autocast(next(self.unet.parameters()).device.type, lowered):
            return self._call(*args, **kwargs).float()

    def _call(self, *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return self._trace(*args, **kwargs)
        why = self.fallback_reason()
        if why is not None and why is self.refused and not self.options.fallback:
            say_fallback(type(self.unet).__name__, why, False)
        if why is not _UNSTEADY:
            self._misses = 0 if self.generation == self._called else self._misses + 1
            self._called = self.generation
            if self._misses > _MISSES:
                why = _UNSTEADY
                say_fallback(type(self.unet).__name__, why, self.options.fallback)
        call = None if why is not None else self._arguments(args, kwargs)
        if call is None:
            return self.original(*args, **kwargs)
        sample, _, given = call
        kind = self._kind()
        _, own, precision, trains = kind
        # Conditions are joined to an embedding: those that are no wider take its dtype.
        wide = any(x.dtype != own and promote_types(x.dtype, own) != own for x in given.values())
        if precision == own:
            mixed = wide or sample.dtype != own
        else:  # autocast leaves float64 alone
            mixed = any(x.dtype == torch.float64 for x in (sample, *given.values()))
        exact = own if precision == own else None
        if mixed or not sample.is_floating_point() or not self._takes_local(sample, given, exact):
            return self.original(*args, **kwargs)  # which says what is wrong
        if sample.dim() == 3 and not self._takes_horizon(sample.shape[1]):
            return self.original(*args, **kwargs)  # whose result has another one, or which raises
        if self.network.arguments.get("local_cond_dim") and "local_cond" not in given:
            kind = (*kind, "no local_cond")  # which says nothing of calls that have some
        passed = self.shadow.passed(kind)
        recorded = passed is None and _is_recorded()
        if recorded and trains:
            passed = self._check_apart()
        if passed:
            try:
                return self._run(*call, precision, trains)
            except NotInFamily:  # a parameter of another shape, which packing finds
                self._reset()
                return self._call(*args, **kwargs)
        if passed is False:
            self.shadow.leave()
        if passed is False or recorded:
            return self.original(*args, **kwargs)
        # In the caller's own mode: without gradients the network would keep weights packed for it.
        return self.shadow.run_both(
            kind,
            self.limit(STEP_LIMITS, precision),
            lambda _: self._seen(self.original(*args, **kwargs)),
            lambda _: self._run(*call, precision, trains),
        )

    def _takes_horizon(self, horizon: int) -> bool:
        return horizon % self._multiple == 0 and not (self._powers and horizon & (horizon - 1))

    def _takes_local(
        self, sample: Tensor, given: dict[str, Tensor], exact: torch.dtype | None
    ) -> bool:
        """Whether local conditions are the network's: a convolution reads them as they are."""
        local, arguments = given.get("local_cond"), self.network.arguments
        if local is None:
            return True
        shape = (*sample.shape[:2], arguments.get("local_cond_dim"))
        beside = ("global_cond" in given) == bool(arguments["global_cond_dim"])
        return beside and tuple(local.shape) == shape and exact in (None, local.dtype)

    def _seen(self, result: Tensor) -> Tensor:
        """Remember the order in memory of a result of the original."""
        if isinstance(result, Tensor) and result.dim() == 3:
            self._channels_first = result.stride(1) == 1 and not result.is_contiguous()
        return result

    def _arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor | int, dict[str, Tensor]] | None:
        """Return sample, timestep and conditions, or None where only the original takes them."""
        inputs = self.network.inputs
        call = dict(zip(inputs, args, strict=False), **kwargs)
        if len(call) != len(args) + len(kwargs) or any(name not in inputs for name in call):
            return None
        sample = call.pop(inputs[0], None)
        variant = self.network.variant
        try:
            call = {variant.inputs[name]: value for name, value in call.items()}
            if variant.condition is not None:
                call["global_cond"] = variant.condition(self.unet, call)
        except (AttributeError, KeyError, RuntimeError, TypeError):
            return None
        timestep = call.pop("timestep", None)
        conditions = {name: call[name] for name in _CONDITIONS if call.get(name) is not None}
        # Subclasses trace or distribute; a timestep that is a float, the original may truncate.
        if type(sample) is not Tensor or not isinstance(timestep, (Tensor, int)):
            return None
        one_each = isinstance(timestep, Tensor) and timestep.shape == sample.shape[:1]
        right = one_each or variant.one_for_all
        if isinstance(timestep, Tensor):  # no layer takes an embedding that is wider than it is
            kinds = torch.float32, sample.dtype
            right = right and promote_types(timestep.dtype, torch.float32) in kinds
        return (sample, timestep, conditions) if right else None

    def _kind(self) -> tuple[Any, ...]:
        """Return what calls have in common that one comparison stands for."""
        weight = self.weight
        return weight.device.type, weight.dtype, self.precision(), self._trains()

    def is_compared(self) -> bool:
        """Whether a call like one made now was compared with the original."""
        return self.shadow.passed(self._kind()) is not None

    def _check_apart(self) -> bool:
        """Compare the layers on numbers of their own, where the caller's call must run only once.

        Returns:
            Whether the layers agree with the original in the precision that is due.

        """
        kind, possible = (*self._kind()[:3], True), self.network.called_alike and _may_read()
        if self.shadow.passed(kind) is None and self.layers is not None and possible:
            sample, timestep, conditions = example(self.network, self.weight)
            with torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
                self.shadow.run_both(
                    kind,
                    self.limit(STEP_LIMITS, kind[2]),
                    lambda _: self.original(sample, timestep, **conditions),
                    lambda _: self.layers(sample, timestep, **conditions),
                )
        return bool(self.shadow.passed(kind))

    @constant_in_graphs
    def _may_trace(self) -> bool:
        """Check the network itself at compile time, outside of what is compiled."""
        self._class = class_of(self.unet)
        if is_exporting() or self.fallback_reason() is not None or self.layers is None:
            return False
        if self.network.tracker.read_beside:  # compilers watch what they trace alone
            return False
        return self._check_apart()

    def _trace(self, *args: Any, **kwargs: Any) -> Tensor:
        """Under torch.compile: dpa's layers as one graph, as long as they are the network's."""
        ready = self._may_trace() and self.shadow.failed is None
        same = ready and not self.network.changed_in_trace(self.unet)
        call = self._arguments(args, kwargs) if same else None
        if call is None:
            return self.original(*args, **kwargs)
        sample, timestep, conditions = call
        return self.layers(sample, timestep, **conditions)

    def _run(
        self,
        sample: Tensor,
        timestep: Tensor | int,
        conditions: dict[str, Tensor],
        precision: torch.dtype,
        trains: bool,
    ) -> Tensor:
        packed = None if trains else self.packed(self.packed_dtype(precision))
        if packed is None:
            run = self.original if self.layers is None else self.layers
            return run(sample, timestep, **conditions)
        batch = sample.shape[0]
        if isinstance(timestep, int) or (timestep.device.type == "cpu" and timestep.dim() == 0):
            steps = torch.full((batch,), float(timestep), dtype=torch.float32, device=sample.device)
        else:
            steps = timestep.to(sample.device)
            steps = steps.expand(batch) if steps.dim() < 2 else steps
        # ``torch.randn_like`` of it takes random numbers in the original's order; views need it.
        packed = packed.sized(batch, sample.shape[1])
        out = self._forwards.run(packed, sample, steps, conditions, self._channels_first)
        return out.to(precision)

    def _trains(self) -> bool:
        """Whether gradients may be needed, or weights are about to change again."""
        duals = torch.autograd.forward_ad._current_level >= 0
        return self.unet.training or torch.is_grad_enabled() or duals
