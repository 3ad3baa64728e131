"""PyTorch's own ways to run the U-Net: eager, and through torch.compile."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

import dpa
from dpa.bench.timing import device_spread_us, graphed

BATCHES = (1, 16)  # at which they are measured
_REDUCED, _TUNED = "reduce-overhead", "max-autotune-no-cudagraphs"


def ahead(network: str, autotune: bool) -> None:
    """Compile in a process each, at once, into the cache that torch.compile looks into.

    One after the other they take minutes. A process that fails costs time alone.
    """
    kinds = [(_REDUCED, "bfloat16", b) for b in BATCHES] + [(_REDUCED, "float32", 1)]
    kinds += [(_TUNED, dtype, 1) for dtype in ("bfloat16", "float32") if autotune]
    start = [sys.executable, "-m", "dpa.bench.compiled", network]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    running = [subprocess.Popen([*start, *map(str, kind)], **quiet) for kind in kinds]
    for process in running:
        process.wait()


@torch.no_grad()
def steps(
    unet: nn.Module, dtype: torch.dtype, batch: int, autotune: bool
) -> Iterable[tuple[str, float, float]]:
    """The plain network's forward pass: eager and compiled, in graphs, and compiled as called.

    In float32 its convolutions do not use TF32, whose errors are a hundred times dpa's.
    """
    plain = dpa.reference.plain(unet).to(dtype)
    call = _caller(dtype, batch)
    with torch.backends.cudnn.flags(
        enabled=True, allow_tf32=False
    ):  # float32 is what its name says
        yield "eager, graph", *device_spread_us(graphed(call(plain), 1))
        reduced = torch.compile(plain, mode=_REDUCED)
        yield "torch.compile reduce-overhead", *device_spread_us(call(reduced))
        torch._dynamo.reset()
        if autotune:
            tuned = torch.compile(plain, mode=_TUNED)
            call(tuned)()
            yield "torch.compile max-autotune, graph", *device_spread_us(graphed(call(tuned), 1))
            torch._dynamo.reset()


def _caller(
    dtype: torch.dtype, batch: int
) -> Callable[[Callable[..., Tensor]], Callable[[], Tensor]]:
    """Return what makes a call without arguments of a network."""
    from dpa.bench.sampler import ACTION_DIM, COND_DIM, HORIZON

    new = lambda *shape: torch.randn(shape, device="cuda", dtype=dtype)  # noqa: E731
    sample, cond = new(batch, HORIZON, ACTION_DIM), new(batch, COND_DIM)
    timestep = torch.full((batch,), 50, device="cuda")
    return lambda module: lambda: module(sample, timestep, None, cond)


@torch.no_grad()
def _compile(network: str, mode: str, dtype: str, batch: str) -> None:
    from dpa.bench.sampler import SIZES

    size = next(size for size in SIZES if size.name == network)
    kind = getattr(torch, dtype)
    plain = dpa.reference.plain(size.build()).to(kind)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        _caller(kind, int(batch))(torch.compile(plain, mode=mode))()


if __name__ == "__main__":
    _compile(*sys.argv[1:])
