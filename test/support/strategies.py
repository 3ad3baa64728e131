"""Hypothesis strategies: tensors of any size and layout, hostile values."""

import math

import torch
from hypothesis import strategies as st
from proofs import DTYPES, OpProofs, Sample
from torch import Tensor

SIZES = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 13, 16, 31, 33])
DENORMAL = 1e-40


def _layout(x: Tensor, kind: str) -> Tensor:
    """The values of ``x`` (of one slice of it, where expanded) in another layout."""
    if x.dim() == 0 or kind == "contiguous":
        return x
    if kind == "reversed":
        return x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))
    if kind == "channels-last" and x.dim() == 3:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "expanded" and x.shape[0] > 0:
        return x[:1].expand_as(x)
    if kind == "gaps":
        storage = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 1), math.nan)
        return storage[..., 1::2].copy_(x)
    # One element into its storage: aligned to the dtype's own size alone.
    storage = x.new_full((x.numel() + 1,), math.nan)
    return storage[1:].view(x.shape).copy_(x)


LAYOUTS = st.sampled_from(["contiguous", "channels-last", "reversed", "expanded", "gaps", "offset"])


class Draw:
    """What a call's tensors share: device, dtype, random stream, and whether values are hostile."""

    def __init__(
        self, data: st.DataObject, device: torch.device, dtype: torch.dtype, hostile: bool
    ):
        self.data, self.device, self.dtype, self.hostile = data, device, dtype, hostile
        self._random = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32), label="seed"))

    def __call__(self, strategy, label=None):
        return self.data.draw(strategy, label=label)

    def tensor(
        self,
        *shape: int,
        low: float | None = None,
        high: float | None = None,
        infinite: bool = True,
    ) -> Tensor:
        """Normal values, or uniform ones in [low, high], in a layout drawn at random."""
        x = torch.randn(shape, generator=self._random, dtype=torch.float64)
        if low is not None and high is not None:
            x = torch.rand(shape, generator=self._random, dtype=torch.float64)
            x = low + (high - low) * x
        elif self.hostile and x.numel() > 0:
            infinities = (math.inf, -math.inf) if infinite else ()
            for value in (math.nan, *infinities, DENORMAL, 0.0, -0.0):
                if self(st.booleans()):
                    x.view(-1)[self(st.integers(0, x.numel() - 1))] = value
        return _layout(x.to(self.dtype).to(self.device), self(LAYOUTS, "layout"))

    def convolved(self, *shape: int, **limits: float) -> Tensor:
        """The input of a convolution. On a GPU cuDNN takes most in float16: it makes 0 of -inf."""
        infinite = self.dtype != torch.float16 or self.device.type != "cuda"
        return self.tensor(*shape, infinite=infinite, **limits)

    def shape(self, least: int = 0, most: int = 4) -> list[int]:
        """Any sizes, empty ones included, of a rank between ``least`` and ``most``."""
        return self(st.lists(SIZES, min_size=least, max_size=most), "shape")

    def index(self, batch: int, rows: int) -> Tensor:
        """A row of a table for each sample, or one for all."""
        count = batch if self(st.booleans()) else 1
        values = self(st.lists(st.integers(0, rows - 1), min_size=count, max_size=count))
        dtype = self(st.sampled_from([torch.int32, torch.int64, torch.uint8]))
        return torch.tensor(values, dtype=dtype, device=self.device)

    def normalisation(self, batch: int, channels: int) -> dict[str, Tensor | None]:
        """Each of the four or None. Factors are finite: rounding decides whether 0 * inf arises."""
        film = (batch, channels)
        drawn = {
            "weight": self.tensor(channels, low=-2.0, high=2.0),
            "bias": self.tensor(channels),
            "scale": self.tensor(*film, low=-2.0, high=2.0),
            "shift": self.tensor(*film),
        }
        return {name: x if self(st.booleans(), name) else None for name, x in drawn.items()}


def roundoff(sample: Sample, accumulated: bool = False) -> float:
    """The relative error of one rounding to the dtype of the sample, or of its accumulator."""
    dtype = sample.floating()[0].dtype
    return torch.finfo(torch.promote_types(dtype, torch.float32) if accumulated else dtype).eps


def magnified(x: Tensor, groups: int) -> float:
    """The most that a normalisation of (B, C, ...) makes of one rounding of its input.

    A group's values minus their mean are right to a rounding of the values themselves; with a
    standard deviation of ``sqrt(eps)`` at the least, the division makes that 316 times as much.
    """
    parts = x.reshape(x.shape[0] * groups, -1).nan_to_num(0, 0, 0)
    deviation = (parts.var(1, correction=0) + 1e-5).sqrt()
    return (parts.abs().amax(1) / deviation).max().item()


def sample(data: st.DataObject, proofs: type[OpProofs], device: torch.device, hostile: bool):
    """A valid call of the op that has these proofs."""
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    return proofs.drawn(Draw(data, device, dtype, hostile))
