"""How far the results of a network and of what replaces it may differ."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from dpa.nn.family import Network, run_network
from dpa.packed.unet import PackedUnet

# Relative error in the norm of one step beyond which the original runs. 16-bit networks differ by
# their own rounding, which some 30 layers add up.
STEP_LIMITS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# The same of a whole loop, whose steps add theirs up.
LOOP_LIMITS = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}
_VALUES = 32  # of a group of a norm, at least, where a network and what replaces it are compared


def limit(
    table: dict[torch.dtype, float], dtypes: Iterable[torch.dtype], device: torch.device
) -> float:
    """Return the error that a table allows: that of the coarsest arithmetic on either side."""
    # The original's convolutions may round to TF32, which has float16's mantissa.
    tf32 = device.type == "cuda" and torch.backends.cudnn.allow_tf32
    return max(table[dtype] for dtype in (*dtypes, *[torch.float16] * tf32))


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Return the relative error in the norm; infinity for another shape or dtype, or a NaN."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return float("inf")
    got, expected = got.detach().double(), expected.detach().double()
    error = (got - expected).norm() / expected.norm().clamp(min=1e-30)
    return float(torch.nan_to_num(error, nan=float("inf")))


def proves(expected: Tensor) -> bool:
    """Whether agreeing with this proves anything: some value is not zero, all are finite."""
    return 0 < float(expected.detach().double().norm()) < float("inf")


def example(network: Network, like: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return random sample, timesteps and conditions of two calls at once, of a tensor's kind.

    At a horizon at which a norm's groups have values enough: two may be near to each other, and a
    norm turns what little they differ by, rounding included, into a value of its own size.
    """
    generator = torch.Generator("cpu").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=generator, device="cpu").to(like)

    arguments = network.arguments
    dims, groups = arguments["down_dims"], arguments["n_groups"]
    horizon = 2 ** len(dims)
    # Of each level's norms, and of the last one, which has 8 groups whatever n_groups is.
    widths = [*((i, dim // groups) for i, dim in enumerate(dims)), (0, max(1, dims[0] // 8))]
    while min(width * (horizon >> level) for level, width in widths) < _VALUES:
        horizon *= 2
    sample = random(horizon, arguments["input_dim"])
    conditions = {}
    if arguments["global_cond_dim"]:
        conditions["global_cond"] = random(arguments["global_cond_dim"])
    if network.local_cond_dim:
        conditions["local_cond"] = random(horizon, network.local_cond_dim)
    return sample, torch.tensor([1, 50], device=like.device), conditions


@torch.no_grad()
def computes_alike(packed: PackedUnet, together: bool) -> bool:
    """Whether a network computes on packed weights what it does itself, on random numbers.

    ``together``: as a batch, else one after the other, so that what the check runs is what calls of
    a batch, or of one sample, run: some drivers compile a kernel for seconds before its first use.
    """
    if not packed.network.called_alike:
        return False
    packed.follow()
    device, dtype = packed.weights.placement
    sample, steps, conditions = example(packed.network, torch.empty((), device=device, dtype=dtype))
    expected = run_network(lambda: packed.unet(sample, steps, **conditions), sample)
    calls = [slice(None)] if together else [slice(i, i + 1) for i in range(len(sample))]
    results = []
    for part in calls:
        floats = {name: value[part].float() for name, value in conditions.items()}
        results.append(packed(sample[part].float(), steps[part].float(), **floats))
    got = torch.cat(results).to(expected.dtype)
    most = limit(STEP_LIMITS, (dtype, packed.dtype), device)
    return proves(expected) and relative_error(got, expected) <= most
