"""The U-Net's step and the whole loop beside PyTorch's and the time that reading weights takes."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

import dpa
from dpa.bench import compiled, parallel
from dpa.bench.ahead import Process, answers
from dpa.bench.bars import bars
from dpa.bench.networks import LOOPS, Network
from dpa.bench.timing import device_us, device_us_alternated, latency

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
_WAYS = (compiled.EAGER, "eager, step by step", compiled.COMPILED, "dpa")
Row = dict[str, Any]


@functools.cache
def read_rate() -> float:
    """Bytes a second that the GPU reads from memory, the best of three plain reductions."""
    data = torch.zeros(2**30, dtype=torch.bfloat16, device="cuda")
    words = data.view(torch.int64)
    tries = (lambda: words.amax(), lambda: data.view(torch.float32).sum(), lambda: words.sum())
    return data.nbytes / (min(device_us(f, 10) for f in tries) * 1e-6)


def conv_bytes(unet: nn.Module, dtype: torch.dtype) -> int:
    """Bytes of the convolutions' weights, which every step must read."""
    return sum(p.numel() for p in unet.parameters() if p.dim() == 3) * dtype.itemsize


def step_us(size: Network, unet: nn.Module, dtype: torch.dtype, batch: int) -> float:
    """Microseconds of a step inside the loop: (40 steps - 20 steps) / 20, of medians."""
    cond = torch.randn(batch, size.cond_dim, device="cuda")
    long, short = (_sampler(size, unet, dtype, "DDIM", count) for count in (40, 20))
    loops = {"long": partial(long, cond), "short": partial(short, cond)}
    took = device_us_alternated(loops, 31)  # in turns: a disturbance meets both
    return (took["long"].median - took["short"].median) / 20


def loops(size: Network, unet: nn.Module, dtype: torch.dtype) -> list[Row]:
    """Whole loops of one sample, from the call in Python to the result; the first call apart."""
    cond, rows = torch.randn(1, size.cond_dim, device="cuda"), []
    for name, count in compiled.COUNTS.items():
        sampler = _sampler(size, unet, dtype, name, count)
        begin = time.perf_counter()
        sampler(cond)
        torch.cuda.synchronize()
        first = time.perf_counter() - begin
        us, p99 = latency(partial(sampler, cond), 60)
        row: Row = {"batch": 1, "weights": str(dtype).removeprefix("torch."), "how": "dpa"}
        row |= {"loop": f"{name}, {count} steps", "us": us, "p99 us": p99, "first call s": first}
        rows.append(row)
    return rows


def profile(size: Network, unet: nn.Module, dtype: torch.dtype) -> dpa.StepProfile:
    """Where the time of a step goes, in a DDIM loop on a network of the benchmark's sizes."""
    return dpa.profile(_sampler(size, unet, dtype, "DDIM", 10))


def _sampler(
    size: Network, unet: nn.Module, dtype: torch.dtype, scheduler: str, steps: int
) -> dpa.DiffusionSampler:
    live = compiled.scheduler_of(scheduler)
    return dpa.DiffusionSampler(unet, live, steps, dtype, horizon=size.horizon)


def stages(
    networks: Sequence[str],
    batches: Sequence[int] | None = None,
    plain: bool = True,
    train_steps: int = 0,
    others: Sequence[Process] = (),
) -> dict[str, Callable[[], dict[str, Any]]]:
    """Stages that give rows of "steps", "loops" and "parallel", to be called in order.

    Each can be left out, for a run that goes on.

    Args:
        networks: names of :data:`LOOPS`.
        batches: of every network; None is 1 and its ``many``.
        plain: measure PyTorch, too.
        train_steps: of the policy on which parallel sampling is measured; 0 leaves it out.
        others: processes that must be ready, too, before anything is measured.

    """
    sizes = [size for size in LOOPS if size.name in networks]
    found = {size.name: partial(_steps, size, batches, plain, others) for size in sizes}
    found |= {f"{size.name}, loops": partial(_loops, size, plain) for size in sizes[:1]}
    if train_steps:
        found["parallel sampling"] = lambda: {"parallel": parallel.rows(train_steps)}
    return found


def _steps(
    size: Network, batches: Sequence[int] | None, plain: bool, others: Sequence[Process]
) -> dict[str, Any]:
    """Compile first, so that nothing else runs where something is measured."""
    theirs = compiled.compiling(size) if plain else []
    for process in others:
        process.wait()
    rows = answers(theirs)
    unet = size.build().eval()
    for batch in batches or (1, size.many):
        for label, dtype in DTYPES.items():
            if batch == 1 or label != "float32":
                us = step_us(size, unet, dtype, batch)
                rows.append({"batch": batch, "weights": label, "how": "dpa", "us": us})
    return {"steps": [_beside_floor(size, unet, row) for row in rows]}


def _loops(size: Network, plain: bool) -> dict[str, Any]:
    unet = size.build().eval()
    steps, found = [], []
    for label in ("bfloat16", "float32") if plain else ():
        step, rows = compiled.eager(size, unet, DTYPES[label])
        steps.append(_beside_floor(size, unet, step))
        found += rows
    for dtype in DTYPES.values():
        found += loops(size, unet, dtype)
    found = [{"network": size.name} | row for row in found]
    return {"steps": steps, "loops": found, "read TB/s": read_rate() * 1e-12}


def _beside_floor(size: Network, unet: nn.Module, row: Row) -> Row:
    floor = conv_bytes(unet, DTYPES[row["weights"]]) / read_rate() * 1e6
    return {"network": size.name} | row | {"floor us": floor, "x floor": row["us"] / floor}


def finished(results: dict[str, Any]) -> dict[str, Any]:
    """The tables in their order, and the requirements that they meet."""
    ordered = {
        name: sorted(results[name], key=_place) for name in ("steps", "loops") if name in results
    }
    tables = results | ordered
    return tables | {"bars": bars(tables)}


def _place(row: Row) -> tuple[Any, ...]:
    """Where a row stands in its table: as the sizes, dtypes and ways are listed."""
    names = [size.name for size in LOOPS]
    weights = list(DTYPES).index(row["weights"])
    way = _WAYS.index(row["how"])
    return names.index(row["network"]), row.get("loop", ""), row["batch"], weights, way
