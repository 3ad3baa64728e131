"""What a network makes of local conditions, apart from a loop: no step's sample changes it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from dpa.library.checks import require
from dpa.nn.unet1d import ConditionalUnet1D

_AT_ONCE = 2**16  # samples by times


class LocalEncoder:
    """Encodes local conditions, for the ops that add a row of it in every step.

    Args:
        layers: the network, of dpa's layers on its own parameters.
        dtype: what a GPU computes in, where that has 16 bits.

    """

    def __init__(self, layers: ConditionalUnet1D, dtype: torch.dtype):
        self._layers, self._dtype = layers, dtype

    def at(self, timesteps: Tensor, global_cond: Tensor | None, local_cond: Tensor) -> Tensor:
        """Encode (B, T, Dl) at a timestep each, (B,): (B, T, C), in float32 or in ``dtype``."""
        layers = self._layers
        self._check(global_cond, local_cond)
        given = local_cond.to(next(layers.parameters()).dtype)
        halves = given.is_cuda and self._dtype.itemsize == 2
        # A capture keeps no casts of parameters: each replay reads them as they are.
        autocast = torch.autocast("cuda", self._dtype if halves else None, halves, False)
        with torch.no_grad(), autocast:
            cond = layers.embed(given, timesteps)
            if global_cond is not None:
                cond = torch.cat([cond, global_cond.to(cond.dtype)], dim=-1)
            made = layers.local_cond_encoder[0](given.transpose(1, 2), cond).transpose(1, 2)
        return made if halves else made.float()

    def at_each(self, timesteps: Tensor, global_cond: Tensor | None, local_cond: Tensor) -> Tensor:
        """Encode (B, T, Dl) at each of S timesteps, (S,): (S, B, T, C)."""
        self._check(global_cond, local_cond)
        samples, made = len(local_cond), []
        # As many steps at once as fill a GPU; what lies between the block's layers is as large.
        together = max(1, _AT_ONCE // max(1, samples * local_cond.shape[1]))
        for steps in timesteps.split(together):
            count = len(steps)
            cond = None if global_cond is None else global_cond.repeat(count, 1)
            local = local_cond.repeat(count, 1, 1)
            rows = self.at(steps.repeat_interleave(samples), cond, local)
            made.append(rows.unflatten(0, (count, samples)))
        return torch.cat(made)

    @staticmethod
    def filled_up(rows: Tensor, channels: int, groups: int) -> Tensor:
        """Return rows in float32 of the first level's channels as packed: groups filled up."""
        more = (channels - rows.shape[-1]) // groups
        if more:
            rows = functional.pad(rows.unflatten(-1, (groups, -1)), (0, more)).flatten(-2)
        return rows.float().contiguous()

    def _check(self, global_cond: Tensor | None, local_cond: Tensor) -> None:
        """Refuse conditions of other widths than the network's."""
        local, wide = self._layers.local_cond_dim, self._layers.global_cond_dim
        given = tuple(local_cond.shape)
        require(given[2:] == (local,), "local_cond", f"be (B, T, {local})", given)
        width = 0 if global_cond is None else global_cond.shape[1]
        got = None if global_cond is None else tuple(global_cond.shape)
        require(width == wide, "global_cond", f"be (B, {wide})", got)
