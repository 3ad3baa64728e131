"""Weights that stay packed from call to call, where no gradient is wanted.

A forward pass of the U-Net in 16 bits reads its weights in the order of the GEMMs of
``kernels/cuda/conv1d``. Training packs them anew in every pass, for they change in between.
Without gradients they are packed once and stay, by module and dtype, outside of the module: no
state dict, copy or pickle of it shows them, and they go when it goes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dpa.library.holding import holding
from dpa.nn.plain import FoundLayers
from dpa.tracking import stamp_of

_COMPARED = 8192  # at most, elements of a weight (kernels/plans/conv1d/changes.h)

_promise = threading.local()


def fixed_weights() -> AbstractContextManager[None]:
    """Promise that weights stay as they are, for whatever is captured in this context.

    A CUDA graph of a network's forward pass packs the weights in every replay, since they may have
    changed since the last. Captured in this context it reads the packed weights that the module
    keeps, of the last call outside of a capture: call the network once before the capture, and,
    outside of this context, once after weights have changed, which brings the packed ones, and so
    the graph, up to date. The module must live as long as the graph.

    In this context calls outside of captures see changes that count as versions of a parameter, but
    do not check for others: through ``parameter.data``, or by the replay of a graph.
    """
    return holding(_promise, given=True)


def forward(
    unet: nn.Module,
    template: Callable[[], nn.Module],
    config: list[int],
    sample: Tensor,
    timesteps: Tensor,
    global_cond: Tensor | None,
    dtype: torch.dtype,
) -> Tensor | None:
    """Run the network on packed weights: (B, T, Da) of ``dtype``, or None where it cannot be.

    It cannot where a gradient may be wanted, or a layer is replaced, hooked, sharded or set up in
    another way than in ``template``.
    """
    network = _NETWORKS.get(unet)
    if network is None or not network.layers.tracker.unchanged():
        network = _NETWORKS[unet] = _Network(unet, template(), config)
    parameters = network.layers.parameters()
    if parameters is None or _wants_gradients(parameters, sample, global_cond):
        return None
    packed = network.packed(parameters, dtype)
    return torch.ops.dpa.unet1d_batch(
        sample, timesteps, global_cond, parameters, packed, network.config
    )


def _wants_gradients(parameters: list[Tensor], *inputs: Tensor | None) -> bool:
    if torch.autograd.forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return True
    if not torch.is_grad_enabled():
        return False
    return any(x is not None and x.requires_grad for x in (*inputs, *parameters))


class _Network:
    """A module's parameters in the op's order, and its packed weights by dtype."""

    def __init__(self, unet: nn.Module, template: nn.Module, config: list[int]):
        self.config = config
        self._packs: dict[torch.dtype, _Pack] = {}
        names: list[str] = torch.ops.dpa.unet1d_weight_names(config)
        modules = {path: module for path, module in template.named_modules() if path}
        paths = {path: (type(module),) for path, module in modules.items()}
        slots = [name.rpartition(".")[::2] for name in names]
        self.layers = FoundLayers(unet, paths, slots, len(slots))
        self.layers.plain = self.layers.plain and _described(unet) == _described(template)
        dimensions = {name: p.dim() for name, p in template.named_parameters()}
        is_packed = [dimensions[n] > 1 or n.endswith("cond_encoder.1.bias") for n in names]
        self._packed_places = [i for i, packed in enumerate(is_packed) if packed]

    def packed(self, parameters: list[Tensor], dtype: torch.dtype) -> Tensor:
        """Return the packed weights as they are now."""
        pack = self._packs.setdefault(dtype, _Pack(self.config, dtype))
        return pack.current(parameters, [parameters[i] for i in self._packed_places])


def _described(unet: nn.Module) -> tuple[dict[str, torch.Size], dict[str, str]]:
    """Return the shapes of parameters and the settings of layers."""
    shapes = {name: parameter.shape for name, parameter in unet.named_parameters()}
    return shapes, {name: layer.extra_repr() for name, layer in unet.named_modules() if name}


class _Pack:
    """One network's packed weights, in one place in memory as long as the device stays."""

    def __init__(self, config: list[int], dtype: torch.dtype):
        self._config, self._dtype = config, dtype
        self._packed: Tensor | None = None
        self._lock = threading.Lock()

    def current(self, parameters: list[Tensor], weights: list[Tensor]) -> Tensor:
        # Of threads on streams of their own each waits for what another has begun to pack.
        with self._lock:
            versions = stamp_of(weights)
            fresh = self._packed is not None and versions == self._versions
            fixed = getattr(_promise, "given", False)
            if torch.cuda.is_current_stream_capturing():
                if fixed and fresh:
                    return self._packed
                return torch.ops.dpa.unet1d_batch_pack(parameters, self._config, self._dtype)
            stream = torch.cuda.current_stream(weights[0].device)
            if fresh and stream != self._stream:
                stream.wait_event(self._ready)
                self._packed.record_stream(stream)
                self._seen.record_stream(stream)
            if not (fresh and fixed):
                with torch.inference_mode(False), torch.no_grad():
                    self._follow(parameters, len(weights), fresh)
                self._versions = versions
            self._stream, self._ready = stream, stream.record_event()
            return self._packed

    def _follow(self, parameters: list[Tensor], count: int, fresh: bool) -> None:
        """Pack what has changed: all, unless ``fresh``, which misses writes through ``data``."""
        given = (parameters, self._config, self._dtype)
        if self._packed is None or self._packed.device != parameters[0].device:
            self._packed = torch.ops.dpa.unet1d_batch_pack(*given)
            self._seen = torch.zeros(
                count, _COMPARED, dtype=torch.int32, device=self._packed.device
            )
        elif not fresh:
            torch.ops.dpa.unet1d_batch_pack.out(*given, out=self._packed)
        torch.ops.dpa.unet1d_batch_pack.out(*given, self._seen, out=self._packed)


_NETWORKS: WeakKeyDictionary[nn.Module, _Network] = WeakKeyDictionary()
