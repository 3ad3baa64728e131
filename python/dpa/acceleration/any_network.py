"""A denoiser that dpa has no kernels for: it runs as it is, inside of dpa's loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dpa.acceleration.shadow_run import Options
from dpa.packed.agreement import limit
from dpa.tracking import Tracker, is_observed, stamp_of


class AnyNetwork:
    """What a loop asks of a network, as :class:`FastForward` answers it for U-Nets of the family.

    Attributes:
        unet: the module.
        layers: the module too: nothing takes its place.
        generation: another number after whatever made comparisons void.

    """

    refused: str | None = None
    bypassed = called_alike = False

    def __init__(self, unet: nn.Module, options: Options):
        self.unet = self.layers = unet
        self.options, self.generation = options, 0
        self.tracker = Tracker(unet)

    @property
    def network(self) -> AnyNetwork:
        """What tells whether the module changed: this."""
        return self

    def prepare(self) -> AnyNetwork:
        """Return the network as it is now."""
        if not self.tracker.unchanged():
            self.tracker, self.generation = Tracker(self.unet), self.generation + 1
        return self

    def fallback_reason(self) -> str | None:
        """Return why the original loop runs now; None where dpa's may."""
        if is_observed():
            return "torch.func transforms it, or torch.jit.trace records it"
        if next(self._tensors(), None) is None:
            return "its network has no floating parameters"
        return "its layers have hooks" if self.prepare().tracker.hooked() else None

    def _tensors(self) -> Iterator[Tensor]:
        return (p for p in self.unet.parameters() if p.is_floating_point())

    @property
    def weight(self) -> Tensor:
        """One of the network's parameters, for its device and dtype."""
        return next(self._tensors())

    def basis(self) -> Any:
        """Return what a write of weights changes."""
        return stamp_of(list(self.unet.parameters()))

    def bypass(self) -> AbstractContextManager[None]:
        """Let the original run, which it does in any case."""
        return nullcontext()

    def packed(self, dtype: torch.dtype) -> None:
        """Return the network on packed weights: there are none."""

    def precision(self) -> torch.dtype:
        """Return the dtype that the network computes in: the weights', or autocast's."""
        kind, dtype = self.weight.device.type, self.weight.dtype
        if torch.is_autocast_enabled(kind) and dtype != torch.float64:
            return torch.get_autocast_dtype(kind)
        return dtype

    def limit(self, table: dict[torch.dtype, float], precision: torch.dtype) -> float:
        """Return the error that passes: as the user chose, or a table allows."""
        if self.options.tolerance is not None:
            return self.options.tolerance
        return limit(table, (precision,), self.weight.device)
