"""Hypothesis strategies: tensors of any size and layout, hostile values, calls of each op."""

import math

import torch
from hypothesis import strategies as st
from proofs import DTYPES, Sample
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


def elementwise_mult(d: Draw) -> Sample:
    shape = d.shape()
    return Sample((d.tensor(*shape), d.tensor(*shape)))


def fused_relu_add(d: Draw) -> Sample:
    shape = d.shape()
    return Sample((d.tensor(*shape), d.tensor(*shape), d(st.floats(-2, 2))))


def lltm(d: Draw) -> Sample:
    batch, features, state = d(SIZES), d(SIZES), d(SIZES)
    bias = (3 * state,) if d(st.booleans()) else (1, 3 * state)
    input = d.tensor(batch, features)
    # Processors' products of bfloat16 take denormal numbers for zero, and an infinite weight makes
    # NaN of zero.
    limits = {"low": -2.0, "high": 2.0} if d.dtype == torch.bfloat16 else {}
    weights = d.tensor(3 * state, state + features, **limits)
    return Sample((input, weights, *(d.tensor(*s) for s in (bias, *[(batch, state)] * 2))))


def _index(d: Draw, batch: int, rows: int) -> Tensor:
    count = batch if d(st.booleans()) else 1
    values = d(st.lists(st.integers(0, rows - 1), min_size=count, max_size=count))
    dtype = d(st.sampled_from([torch.int32, torch.int64, torch.uint8]))
    return torch.tensor(values, dtype=dtype, device=d.device)


def denoise(d: Draw) -> Sample:
    shape, rows = d.shape(least=1), d(st.integers(1, 9))
    # A division by less would magnify the rounding of what it divides.
    constants = d.tensor(rows, 5, low=0.2, high=1.0)
    x = [d.tensor(*shape) for _ in range(3)]
    return Sample((x[0], x[1], constants, _index(d, shape[0], rows), x[2]))


def scheduler_step(d: Draw) -> Sample:
    shape, rows = d.shape(least=1), d(st.integers(1, 9))
    table = d.tensor(rows, 6, low=-1.0, high=1.0)
    noise = d.tensor(*shape) if d(st.booleans()) else None
    clip = d(st.sampled_from([0.0, 0.7, 1.0, math.inf]))
    args = (d.tensor(*shape), d.tensor(*shape), table, _index(d, shape[0], rows), noise, clip)
    return Sample(args)


def _normalisation(d: Draw, batch: int, channels: int) -> dict[str, Tensor | None]:
    """Each of the four or None. Factors are finite: rounding decides whether 0 * inf arises."""
    film = (batch, channels)
    drawn = {
        "weight": d.tensor(channels, low=-2.0, high=2.0),
        "bias": d.tensor(channels),
        "scale": d.tensor(*film, low=-2.0, high=2.0),
        "shift": d.tensor(*film),
    }
    return {name: x if d(st.booleans(), name) else None for name, x in drawn.items()}


def group_norm_mish(d: Draw) -> Sample:
    batch, groups, width = d(SIZES), d(st.integers(1, 5)), d(st.sampled_from([1, 2, 3, 5, 8, 24]))
    channels = groups * width
    shape = (batch, channels, *d.shape(most=2))
    input = d.tensor(*shape)
    options = _normalisation(d, batch, channels)
    options["residual"] = d.tensor(*shape) if d(st.booleans()) else None
    return Sample((input, groups), options)


def conv1d_gnm(d: Draw) -> Sample:
    batch, length = d(SIZES), d(st.integers(1, 17))
    groups, width, inputs = (d(st.integers(1, 5)) for _ in range(3))
    channels, taps = groups * width, d(st.sampled_from([1, 3, 5]))
    n = _normalisation(d, batch, channels)
    bias = d.tensor(channels) if d(st.booleans()) else None
    # Whether an infinite weight meets the padding, and so gives NaN, differs between convolutions.
    weight = d.tensor(channels, inputs, taps, low=-2.0, high=2.0)
    args = (d.convolved(batch, inputs, length), weight, bias, n["weight"], n["bias"], groups)
    return Sample(args, {"scale": n["scale"], "shift": n["shift"]})


def conv1d(d: Draw) -> Sample:
    """Every stride and padding; inputs long enough for one output."""
    batch, inputs, outputs = d(SIZES), d(st.integers(1, 9)), d(st.integers(1, 9))
    taps, stride, padding = d(st.integers(1, 5)), d(st.integers(1, 3)), d(st.integers(0, 2))
    transposed = d(st.booleans(), "transposed")
    least = 1 + max(0, 2 * padding - taps + stride) // stride if transposed else taps
    length = d(st.integers(least, least + 16))
    shape = (inputs, outputs, taps) if transposed else (outputs, inputs, taps)
    weight = d.tensor(*shape, low=-2.0, high=2.0)
    bias = d.tensor(outputs) if d(st.booleans()) else None
    # As with lltm: PyTorch's convolutions in bfloat16, which the CPU takes, make NaN of infinity.
    limits = {"low": -3.0, "high": 3.0} if d.dtype == torch.bfloat16 else {}
    input = d.convolved(batch, inputs, length, **limits)
    return Sample((input, weight, bias, stride, padding, transposed))


def residual_block1d(d: Draw) -> Sample:
    batch, length = d(SIZES), d(st.integers(1, 17))
    groups, width, inputs = (d(st.integers(1, 5)) for _ in range(3))
    channels, taps = groups * width, d(st.sampled_from([1, 3, 5]))
    finite = lambda *shape: d.tensor(*shape, low=-1.0, high=1.0)  # noqa: E731
    parameters = []
    for count in (inputs, channels):
        # The weights' sums stay below 2, the bound that rounding is multiplied by.
        weight = d.tensor(channels, count, taps, low=-2 / (count * taps), high=2 / (count * taps))
        parameters += [weight, finite(channels), finite(channels), finite(channels)]
    plain = inputs == channels and d(st.booleans())
    parameters += [None, None] if plain else [finite(channels, inputs, 1), finite(channels)]
    film = [finite(batch, channels) if d(st.booleans()) else None for _ in range(2)]
    return Sample((d.convolved(batch, inputs, length), *parameters, groups, 1e-5, *film))


def joint_linear(d: Draw) -> Sample:
    """One to five layers on one input."""
    batch, inputs = d(SIZES), d(SIZES)
    outputs = d(st.lists(SIZES, min_size=1, max_size=5), "outputs")
    # As with lltm: processors' products of bfloat16.
    limits = {"low": -2.0, "high": 2.0} if d.dtype == torch.bfloat16 else {}
    others = d(st.sampled_from([0, 1, 8]), "columns of rest")
    weights = [d.tensor(count, inputs + others, **limits) for count in outputs]
    rest = d.tensor(batch, others, **limits) if others else None
    input, biases = d.tensor(batch, inputs, **limits), [d.tensor(count) for count in outputs]
    return Sample((input, weights, biases, rest))


CALLS = {
    call.__name__: call
    for call in (
        elementwise_mult,
        fused_relu_add,
        lltm,
        denoise,
        scheduler_step,
        group_norm_mish,
        conv1d_gnm,
        conv1d,
        residual_block1d,
        joint_linear,
    )
}


def sample(data: st.DataObject, name: str, device: torch.device, hostile: bool) -> Sample:
    """A valid call of the op ``name``."""
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    return CALLS[name](Draw(data, device, dtype, hostile))
