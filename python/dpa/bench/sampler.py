"""The U-Net's step and the whole loop beside PyTorch's and the time that reading weights takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import dpa
from dpa.bench.timing import device_spread_us, device_us, graphed
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
        unet = dpa.nn.ConditionalUnet1D(
            ACTION_DIM,
            global_cond_dim=COND_DIM,
            diffusion_step_embed_dim=self.step_dim,
            down_dims=self.down_dims,
            kernel_size=5,
            n_groups=8,
            cond_predict_scale=True,
        )
        return unet.to(device).eval()


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


def latency(run: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median and 99th percentile, in microseconds, from the call to its result on the device."""
    times = []
    for i in range(repeats + 3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        if i >= 3:
            times.append((time.perf_counter() - begin) * 1e6)
    times.sort()
    return statistics.median(times), times[min(len(times) - 1, int(0.99 * len(times)))]


def _torch_steps(
    unet: nn.Module, dtype: torch.dtype, batch: int, autotune: bool
) -> Iterable[tuple[str, float, float]]:
    """The plain network's forward pass: eager and compiled, in graphs, and compiled as called.

    In float32 its convolutions do not use TF32, whose errors are a hundred times dpa's.
    """
    plain = dpa.reference.plain(unet).to(dtype)
    new = lambda *shape: torch.randn(shape, device="cuda", dtype=dtype)  # noqa: E731
    sample, cond = new(batch, HORIZON, ACTION_DIM), new(batch, COND_DIM)
    timestep = torch.full((batch,), 50, device="cuda")

    def call(module: Callable[..., Tensor]) -> Callable[[], Tensor]:
        return lambda: module(sample, timestep, None, cond)

    with torch.backends.cudnn.flags(
        enabled=True, allow_tf32=False
    ):  # float32 is what its name says
        yield "eager, graph", *device_spread_us(graphed(call(plain), 1))
        reduced = torch.compile(plain, mode="reduce-overhead")
        yield "torch.compile reduce-overhead", *device_spread_us(call(reduced))
        torch._dynamo.reset()
        if autotune:
            tuned = torch.compile(plain, mode="max-autotune-no-cudagraphs")
            call(tuned)()
            yield "torch.compile max-autotune, graph", *device_spread_us(graphed(call(tuned), 1))
            torch._dynamo.reset()


@torch.no_grad()
def steps(size: Size, batch: int, rate: float, autotune: bool, plain: bool = True) -> list[Row]:
    """One step at a batch, every way; dpa's is a step inside the captured loop.

    The 99th percentile of dpa's is that of loops of 40 steps, a fortieth of it.
    """
    unet = size.build()
    rows: list[Row] = []
    for label, dtype in DTYPES.items():
        floor = conv_bytes(unet, dtype) / rate * 1e6
        row = {"network": size.name, "batch": batch, "weights": label}
        noise = torch.randn(batch, HORIZON, ACTION_DIM, device="cuda")
        cond = torch.randn(batch, COND_DIM, device="cuda")
        packed = dpa.PackedUnet(unet, dtype)
        _, slow = device_spread_us(captured_loop(packed, noise, cond, 40))
        ways = [("dpa", step_us(packed, noise, cond), slow / 40)]
        if plain and dtype.itemsize > 1:
            ways = [*_torch_steps(unet, dtype, batch, autotune and batch == 1), *ways]
        for how, us, p99 in ways:
            times = {"us": us, "p99 us": p99, "floor us": floor, "x floor": us / floor}
            rows.append(row | {"how": how} | times)
    return rows


@torch.no_grad()
def loops(size: Size, plain: bool = True) -> list[Row]:
    """Whole loops at batch 1, from the call in Python to the result on the device."""
    from diffusers import DDIMScheduler, DDPMScheduler

    unet = size.build()
    cond = torch.randn(1, COND_DIM, device="cuda")
    rows: list[Row] = []
    for scheduler, count in ((DDIMScheduler, 10), (DDPMScheduler, 100)):
        live = scheduler(num_train_timesteps=100, beta_schedule="squaredcos_cap_v2")
        ways: list[tuple[str, str, dict[str, Any]]] = [
            ("dpa", label, {"fused": True, "dtype": dtype}) for label, dtype in DTYPES.items()
        ]
        if plain:
            ways.insert(0, ("eager, step by step", "float32", {}))
        for how, label, options in ways:
            network = unet if options else dpa.reference.plain(unet)
            sampler = dpa.DiffusionSampler(network, live, count, horizon=HORIZON, **options)
            run = lambda sampler=sampler: sampler(cond)  # noqa: E731
            median, p99 = latency(run, 200 if options else 5)
            row: Row = {"network": size.name, "loop": f"{scheduler.__name__[:4]}, {count} steps"}
            row |= {"weights": label, "how": how, "us": median, "p99 us": p99 if options else None}
            if options:
                noise = torch.randn(1, HORIZON, ACTION_DIM, device="cuda")
                packed = dpa.PackedUnet(unet, DTYPES[label])
                row["steps' time"] = median / step_us(packed, noise, cond)
            rows.append(row)
    return rows


def profile(unet: nn.Module, dtype: torch.dtype) -> dpa.StepProfile:
    """Where the time of a step goes, in a DDIM loop on a network of the benchmark's sizes."""
    from diffusers import DDIMScheduler

    live = DDIMScheduler(num_train_timesteps=100, beta_schedule="squaredcos_cap_v2")
    sampler = dpa.DiffusionSampler(unet, live, 10, dtype, horizon=HORIZON, fused=True)
    return dpa.profile(sampler)


def run(
    networks: Iterable[str] = ("80 M", "252 M"),
    batches: Iterable[int] = (1, 4, 16, 64),
    autotune: bool = False,
    plain: bool = True,
) -> dict[str, Any]:
    """Every table.

    Args:
        networks: names of :data:`SIZES`.
        batches: of the steps.
        autotune: measure torch.compile's max-autotune too, which takes minutes to compile.
        plain: measure PyTorch at all.

    """
    rate = read_rate()
    chosen = [size for size in SIZES if size.name in set(networks)]
    return {
        "read TB/s": rate * 1e-12,
        "steps": [
            row
            for s in chosen
            for batch in batches
            for row in steps(s, batch, rate, autotune, plain)
        ],
        "loops": [row for s in chosen for row in loops(s, plain)],
    }
