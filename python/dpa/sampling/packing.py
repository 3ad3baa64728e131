"""The packed network of a sampler: made where the whole loop can be one op."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import nn

from dpa.nn.family import Network
from dpa.packed.agreement import computes_alike
from dpa.packed.config import runs_packed
from dpa.packed.unet import PackedUnet
from dpa.sampling.arguments import Call, check
from dpa.sampling.fused_loop import is_plain
from dpa.schedulers.tables import LiveSteps
from dpa.tracking import Tracker

if TYPE_CHECKING:
    from dpa.sampling.sampler import DiffusionSampler


class Packing:
    """Packs a sampler's network for its calls, and remembers one that cannot be packed."""

    def __init__(self) -> None:
        self._refused: tuple[nn.Module, Tracker] | None = None
        self._tried = WeakKeyDictionary[PackedUnet, tuple[Network, bool]]()

    def __reduce__(self) -> tuple[type[Packing], tuple[()]]:
        return type(self), ()  # a copy finds out by itself

    def find(self, sampler: DiffusionSampler, call: Call) -> PackedUnet | None:
        """Return the network for a fused call; None where the loop runs step by step.

        As ``sampler.packed`` it serves the calls after this one.
        """
        fused = sampler.fused
        if fused is False:
            return None
        unet = getattr(sampler.unet, "_orig_mod", sampler.unet)  # inside torch.compile's wrapper
        reason = _refusal(unet, call, sampler.parallel is not None)
        if fused is None and (reason is not None or not self._may_pack(unet, call.weights_dtype)):
            return None
        try:
            if reason is not None:
                check(False, "fused", *reason)
            packed = sampler.packed = _packed(sampler, unet, call)
            if fused and not packed.network.tracker.unchanged():
                packed.repack()  # or an error that says what was altered
            why = packed.network.tracker.no_one_op()
            check(not fused or why is None, "fused", f"be left out for this network: {why}", True)
            if fused or (is_plain(packed) and self._agrees(packed, call.shape[0] > 1)):
                return packed
        except (RuntimeError, TypeError, ValueError) as error:
            if fused is None:
                self._refused = unet, Tracker(unet)
            elif sampler.fallback and isinstance(error, ValueError):
                warnings.warn(f"{error}: the loop runs step by step instead", stacklevel=2)
            else:
                raise
        return None

    def _agrees(self, packed: PackedUnet, together: bool) -> bool:
        """Whether the network's own forward computes the same, tried once on random numbers."""
        tried, agreed = self._tried.get(packed, (None, False))
        again = not packed.network.tracker.unchanged() if agreed else packed.stale()
        if tried is not packed.network or again:
            agreed = computes_alike(packed, together)
            self._tried[packed] = packed.network, agreed
        return agreed

    def _may_pack(self, unet: object, weights_dtype: torch.dtype) -> bool:
        if not isinstance(unet, nn.Module) or weights_dtype == torch.float64:
            return False
        refused = self._refused
        return refused is None or refused[0] is not unet or not refused[1].unchanged()


def _packed(sampler: DiffusionSampler, unet: nn.Module, call: Call) -> PackedUnet:
    """Return the network that was packed last, or another for such a call."""
    dtype, packed = sampler.dtype or call.weights_dtype, sampler.packed
    made_of = None if packed is None else (packed.dtype, packed.weights.mode)
    if made_of != (dtype, sampler.weights) or packed.unet is not unet:
        packed = PackedUnet(unet, dtype, weights=sampler.weights)
        alike, kind = packed.network.called_alike, type(unet).__name__
        check(alike, "unet", "take global_cond for a loop to be one op", kind)
    together = 1 if sampler.parallel is None else sampler.parallel.window
    return packed.sized(together * call.shape[0], call.shape[1])


def _refusal(unet: nn.Module, call: Call, parallel: bool) -> tuple[str, str] | None:
    """Why a loop cannot be one op, what ``fused`` must and what was received; None where it can."""
    if not runs_packed(call.device):
        return "be left out where no kernel runs packed weights", str(call.device)
    if call.others:
        return f"be left out where there is {next(iter(call.others))}", "both"
    local = call.given["local_cond"] is not None
    if local and parallel:
        return "be left out where there is local_cond and parallel", "all three"
    if local and getattr(unet, "local_cond_encoder", None) is None:
        return "be left out where a network without local conditioning is given local_cond", "both"
    if isinstance(call.table, LiveSteps):
        rule = "be left out of a scheduler that no StepTable expresses"
        return rule, type(call.table).__name__
    return None
