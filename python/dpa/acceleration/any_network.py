"""A denoiser that dpa has no kernels for: it runs as it is, inside of dpa's loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dpa.acceleration.shadow_run import Options
from dpa.acceleration.unet_forward import OBSERVED, Bypass, Denoiser
from dpa.tracking import Tracker, is_observed, stamp_of


class AnyNetwork(Denoiser):
    """A network that runs as it is: it is its own ``network`` if it has weights."""

    refused: str | None = None

    def __init__(self, unet: nn.Module, options: Options):
        self.unet = unet
        self.options, self.bypass = options, Bypass()
        self._look()

    def _look(self) -> None:
        floating = [
            (module._parameters, name)
            for module in self.unet.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.is_floating_point()
        ]
        self.home = floating[0] if floating else ({}, "")
        self.network = self if floating else None
        self.tracker = Tracker(self.unet)

    def prepare(self) -> AnyNetwork | None:
        """Return the network as it is now."""
        held, name = self.home
        if held.get(name) is None or not self.tracker.unchanged():
            self._look()
            self.generation += 1
        return self.network

    def fallback_reason(self) -> str | None:
        """Return why the original loop runs now; None where dpa's may."""
        if is_observed():
            return OBSERVED
        if self.prepare() is None:
            return "its network has no floating parameters"
        return self.tracker.no_one_op()

    def basis(self) -> Any:
        """Return what a write of weights changes."""
        return stamp_of(list(self.unet.parameters()))

    def packed_dtype(self, precision: torch.dtype) -> torch.dtype:
        """Return the dtype of the loop's steps: the user's on a GPU, where they are captured."""
        chosen = self.options.dtype if self.weight.is_cuda else None
        return chosen if chosen is not None and precision == torch.float32 else precision
