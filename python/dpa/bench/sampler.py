"""The U-Net's step and the whole loop beside PyTorch's and the time that reading weights takes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import dpa
from dpa.bench import compiled, parallel
from dpa.bench.bars import bars
from dpa.bench.timing import device_spread_us, device_us, latency
from dpa.profiling import captured_loop, step_us

HORIZON, ACTION_DIM, COND_DIM = 16, 2, 132
Row = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """A network's widths, as the published policies have them."""

    name: str
    down_dims: tuple[int, ...]
    step_dim: int

    def build(self, device: str = "cuda") -> dpa.nn.ConditionalUnet1D:
        """Return the network with random weights."""
        with torch.device(device):
            unet = dpa.nn.ConditionalUnet1D(
                ACTION_DIM,
                global_cond_dim=COND_DIM,
                diffusion_step_embed_dim=self.step_dim,
                down_dims=self.down_dims,
                kernel_size=5,
                n_groups=8,
                cond_predict_scale=True,
            )
        return unet.eval()


SIZES = (Size("80 M", (256, 512, 1024), 256), Size("252 M", (512, 1024, 2048), 128))
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


def read_rate() -> float:
    """Bytes a second that the GPU reads from memory, the best of three plain reductions."""
    data = torch.zeros(2**30, dtype=torch.bfloat16, device="cuda")
    words = data.view(torch.int64)
    tries = (lambda: words.amax(), lambda: data.view(torch.float32).sum(), lambda: words.sum())
    return data.nbytes / (min(device_us(f, 10) for f in tries) * 1e-6)


def conv_bytes(unet: nn.Module, dtype: torch.dtype) -> int:
    """Bytes of the convolutions' weights, which every step must read."""
    return sum(p.numel() for p in unet.parameters() if p.dim() == 3) * dtype.itemsize


@torch.no_grad()
def steps(
    size: Size, unet: nn.Module, batch: int, rate: float, plain: bool, autotune: bool
) -> list[Row]:
    """One step at a batch, every way; dpa's is a step inside the captured loop.

    The 99th percentile of dpa's is that of loops of 40 steps, a fortieth of it. Batches above 1 are
    of bfloat16 alone.
    """
    rows: list[Row] = []
    for label, dtype in DTYPES.items():
        if dtype != torch.bfloat16 and batch > 1:
            continue
        floor = conv_bytes(unet, dtype) / rate * 1e6
        row = {"network": size.name, "batch": batch, "weights": label}
        noise = torch.randn(batch, HORIZON, ACTION_DIM, device="cuda")
        cond = torch.randn(batch, COND_DIM, device="cuda")
        packed = dpa.PackedUnet(unet, dtype)
        ways = []
        if plain and dtype.itemsize > 1:
            ways += compiled.steps(unet, dtype, batch, autotune and batch == 1)
        us = step_us(packed, noise, cond)
        repeats = min(200, max(20, round(4e5 / (40 * us))))
        _, last = device_spread_us(captured_loop(packed, noise, cond, 40), repeats)
        ways.append(("dpa", us, last / 40))
        for how, us, p99 in ways:
            times = {"us": us, "p99 us": p99, "floor us": floor, "x floor": us / floor}
            rows.append(row | {"how": how} | times)
    return rows


@torch.no_grad()
def loops(size: Size, unet: nn.Module, plain: bool = True) -> list[Row]:
    """Whole loops at batch 1, from the call in Python to the result on the device."""
    from diffusers import DDIMScheduler, DDPMScheduler

    cond = torch.randn(1, COND_DIM, device="cuda")
    noise = torch.randn(1, HORIZON, ACTION_DIM, device="cuda")
    rows: list[Row] = []

    def measure(how: str, label: str, network: nn.Module, **options: Any) -> None:
        for scheduler, count in ((DDIMScheduler, 10), (DDPMScheduler, 100)):
            live = scheduler(num_train_timesteps=100, beta_schedule="squaredcos_cap_v2")
            sampler = dpa.DiffusionSampler(network, live, count, horizon=HORIZON, **options)
            begin = time.perf_counter()
            sampler(cond)
            torch.cuda.synchronize()
            first = time.perf_counter() - begin
            again, _ = latency(partial(sampler, cond), 1)
            repeats = round(min(200, max(5, 1e6 / again)))
            median, p99 = latency(partial(sampler, cond), repeats)
            row: Row = {"network": size.name, "loop": f"{scheduler.__name__[:4]}, {count} steps"}
            row |= {
                "weights": label,
                "how": how,
                "us": median,
                "p99 us": p99,
                "first call s": first,
            }
            if options:
                packed = dpa.PackedUnet(unet, options["dtype"])
                row["step us"] = step_us(packed, noise, cond)
                row["steps' time"] = median / row["step us"]
            rows.append(row)

    if plain:
        measure("eager, step by step", "float32", dpa.reference.plain(unet))
    for label, dtype in DTYPES.items():
        measure("dpa", label, unet, fused=True, dtype=dtype)
    return rows


def profile(unet: nn.Module, dtype: torch.dtype) -> dpa.StepProfile:
    """Where the time of a step goes, in a DDIM loop on a network of the benchmark's sizes."""
    from diffusers import DDIMScheduler

    live = DDIMScheduler(num_train_timesteps=100, beta_schedule="squaredcos_cap_v2")
    sampler = dpa.DiffusionSampler(unet, live, 10, dtype, horizon=HORIZON, fused=True)
    return dpa.profile(sampler)


def run(
    networks: Iterable[str] = ("80 M", "252 M"),
    batches: Iterable[int] = (1, 2, 4, 8, 16, 32, 64),
    autotune: bool = False,
    plain: bool = True,
    train_steps: int = parallel.TRAIN_STEPS,
) -> dict[str, Any]:
    """Every table, and what of the bars they say.

    Args:
        networks: names of :data:`SIZES`.
        batches: of the steps.
        autotune: measure torch.compile's max-autotune too, at batch 1.
        plain: measure PyTorch at all: beside the first network, at batches 1 and 16.
        train_steps: of the policy on which parallel sampling is measured; 0 leaves it out.

    """
    chosen = [size for size in SIZES if size.name in set(networks)]
    if plain and chosen:
        compiled.ahead(chosen[0].name, autotune)
    rate = read_rate()
    results: dict[str, Any] = {"read TB/s": rate * 1e-12, "steps": [], "loops": []}
    for size in chosen:
        first, unet = plain and size is chosen[0], size.build()
        for batch in batches:
            beside = first and batch in compiled.BATCHES
            results["steps"] += steps(size, unet, batch, rate, beside, autotune)
        results["loops"] += loops(size, unet, first)
    if train_steps:
        policy = parallel.trained(train_steps)
        results["parallel"] = parallel.rows(policy, torch.bfloat16)
    results["bars"] = bars(results)
    return results
