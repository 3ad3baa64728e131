"""A network's weights for many samples: one op a layer, in which every weight serves them all."""

from __future__ import annotations

import torch
from torch import Tensor

_ACTIVATIONS = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.bfloat16,
    torch.float16: torch.float16,
    torch.float8_e4m3fn: torch.float16,
}
_FLOAT32 = ("down_modules.0.0.blocks.0.", "down_modules.0.0.residual", "final_conv.1")


class BatchWeights:
    """What ``unet1d_batch`` reads of a network's weights, in one place in memory.

    Args:
        weights: by the names of ``unet1d_weight_names``, in that order. Those with more than one
            dimension are packed, and read where they lie by what no kernel of packed weights
            serves.
        config: of the network.
        dtype: of the network on packed weights. Weights in e4m3 are rounded as it rounds them, and
            kept in float16.

    """

    def __init__(self, weights: dict[str, Tensor], config: list[int], dtype: torch.dtype):
        self._config, self._dtype, self._kind = config, dtype, _ACTIVATIONS[dtype]
        self._given = [w.clone() if w.dim() == 1 else w for w in self._readable(weights)]
        self.packed = torch.ops.dpa.unet1d_batch_pack(self._given, config, self._kind)

    def _readable(self, weights: dict[str, Tensor]) -> list[Tensor]:
        given = list(weights.values())
        if {w.dtype for w in given} not in ({torch.float32}, {self._kind}):
            given = [w.float() for w in given]
        if self._dtype.itemsize > 1:
            return given
        return [rounded_to_e4m3(n, w) for n, w in zip(weights, given, strict=True)]

    def update(self, weights: dict[str, Tensor]) -> None:
        """Take over other values of the same weights."""
        for ours, weight in zip(self._given, self._readable(weights), strict=True):
            if ours.data_ptr() != weight.data_ptr():
                ours.copy_(weight)
        pack = torch.ops.dpa.unet1d_batch_pack.out
        pack(self._given, self._config, self._kind, out=self.packed)

    def forward(
        self,
        sample: Tensor,
        timesteps: Tensor,
        global_cond: Tensor | None,
        local: Tensor | None,
    ) -> Tensor:
        """One forward pass: (B, T, Da) to (B, T, Da), float32; a timestep each, or one.

        ``local``, (B, T, C), is added to what the first block makes.
        """
        if timesteps.stride(0) == 0:
            timesteps = timesteps[:1]
        given = sample, timesteps, global_cond, *self._weights, local
        return torch.ops.dpa.unet1d_batch(*given).float()

    def film(self, timesteps: Tensor, global_cond: Tensor | None) -> tuple[Tensor, Tensor]:
        """FiLM's parameters of a loop, for ``on_film``: of the timesteps, and of the samples."""
        return torch.ops.dpa.unet1d_batch_film(timesteps, global_cond, *self._weights)

    def on_film(
        self, sample: Tensor, step: Tensor, conds: Tensor, local: Tensor | None = None
    ) -> Tensor:
        """One forward pass on a row of a timestep and the rows of the samples, whose sum counts.

        So they may change places: the one row of an observation and the rows of timesteps.
        """
        return torch.ops.dpa.unet1d_batch_on_film(sample, step, conds, *self._weights, local)

    @property
    def _weights(self) -> tuple[list[Tensor], Tensor, list[int]]:
        return self._given, self.packed, self._config


def kept_in(weights: dict[str, Tensor], dtype: torch.dtype) -> torch.dtype:
    """The type in which a network's weights are packed for the loop in one kernel.

    Below 32 M weights of convolutions a step waits for latencies, not for bytes: widening e4m3
    would cost more than it saves, so that rounded weights are kept in float16.
    """
    if dtype.itemsize > 1 or any(w.device.type == "cpu" for w in weights.values()):
        return dtype  # the CPU refuses e4m3
    small = sum(w.numel() for w in weights.values() if w.dim() > 2) < 32 << 20
    return torch.float16 if small else dtype


def rounded_to_e4m3(name: str, weight: Tensor) -> Tensor:
    """A convolution's weight as it is packed in e4m3: scale * q, a scale an output channel."""
    if weight.dim() < 3 or name.startswith(_FLOAT32):
        return weight
    inputs = 0 if name.startswith("up_modules.") and ".2.conv." in name else 1
    scale = weight.abs().amax((inputs, 2), keepdim=True).float() / 448
    scale = torch.where(scale > 0, scale, 1.0)
    return ((weight / scale).to(torch.float8_e4m3fn).float() * scale).to(weight.dtype)
