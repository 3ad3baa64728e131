"""The U-Net in PyTorch: eager, and under torch.compile."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import dpa
from dpa.bench.ahead import Process, on_request
from dpa.bench.networks import LOOPS, Network
from dpa.bench.timing import device_us, graphed, latency
from dpa.schedulers.stepping import loop

COMPILED, EAGER = "torch.compile, graph", "eager, graph"
COUNTS = {"DDIM": 10, "DDPM": 100}  # steps of the loops
Row = dict[str, Any]


def compiling(size: Network) -> list[Process]:
    """Processes that compile ``size`` at once, each a dtype and batch; then each answers a row."""
    kinds = (("bfloat16", 1), ("bfloat16", size.many), ("float32", 1))
    return [Process(__name__, size.name, dtype, str(batch)) for dtype, batch in kinds]


def eager(size: Network, unet: nn.Module, dtype: torch.dtype) -> tuple[Row, list[Row]]:
    """The step of the plain network at batch 1, and its loops, step by step."""
    with plain(unet, dtype) as network:
        about = {"batch": 1, "weights": str(dtype).removeprefix("torch.")}
        step = device_us(graphed(_step(size, network, dtype, 1), 1))
        loops = []
        for name, count in COUNTS.items():
            us, p99 = latency(_loop(size, network, dtype, name), 3)
            label = {"loop": f"{name}, {count} steps", "how": "eager, step by step"}
            loops.append(about | label | {"us": us, "p99 us": p99})
        return about | {"how": EAGER, "us": step}, loops


@contextmanager
def plain(unet: nn.Module, dtype: torch.dtype) -> Iterator[nn.Module]:
    """The network of PyTorch's own layers; in float32 without TF32.

    TF32's errors are a hundred times dpa's.
    """
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield dpa.reference.plain(unet).to(dtype)


def scheduler_of(name: str) -> Any:
    """DDIM or DDPM of diffusers, as policies are trained with."""
    import diffusers

    cls = getattr(diffusers, f"{name}Scheduler")
    return cls(num_train_timesteps=100, beta_schedule="squaredcos_cap_v2")


def _step(
    size: Network, network: Callable[..., Tensor], dtype: torch.dtype, batch: int
) -> Callable[[], Tensor]:
    """One forward pass, with the timesteps that the loop hands over."""
    sample, _, cond, _ = (
        x.to(dtype) if x.is_floating_point() else x for x in size.batch(batch, torch.device("cuda"))
    )
    timestep = torch.full((batch,), 50.0, device="cuda")
    return partial(network, sample, timestep, global_cond=cond)


def _loop(
    size: Network, network: Callable[..., Tensor], dtype: torch.dtype, name: str
) -> Callable[[], Tensor]:
    """The loop of the network's forward passes and ``dpa::scheduler_step``, in float32."""
    table = dpa.schedulers.from_diffusers(scheduler_of(name), COUNTS[name])
    table = table.to("cuda", torch.float32)
    cond = torch.randn(1, size.cond_dim, device="cuda", dtype=dtype)
    draw = lambda _: torch.randn(1, size.horizon, size.action_dim, device="cuda")  # noqa: E731

    def predict(sample: Tensor, step: int) -> Tensor:
        return network(sample.to(dtype), table.timesteps[step, None], global_cond=cond).float()

    return lambda: loop(draw(0), table, predict, draw, None)


def _measure(name: str, weights: str, batch: str) -> None:
    """Compile, and measure on request."""
    dtype, count = getattr(torch, weights), int(batch)
    size = next(size for size in LOOPS if size.name == name)
    with plain(size.build().eval(), dtype) as network:
        step = _step(size, torch.compile(network), dtype, count)
        step()
        torch.cuda.synchronize()
        about = {"batch": count, "weights": weights, "how": COMPILED}
        on_request(lambda: about | {"us": device_us(graphed(step, 1))})


if __name__ == "__main__":
    _measure(*sys.argv[1:])
