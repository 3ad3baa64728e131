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
from dpa.bench.ahead import Process
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


def step_us(
    size: Network, unet: nn.Module, dtype: torch.dtype, batch: int, repeats: int = 31
) -> float:
    """Microseconds of a step inside the loop: (40 steps - 20 steps) / 20, of medians."""
    cond = torch.randn(batch, size.cond_dim, device="cuda")
    long, short = (_sampler(size, unet, dtype, "DDIM", count) for count in (40, 20))
    loops = {"long": partial(long, cond), "short": partial(short, cond)}
    took = device_us_alternated(loops, repeats)  # in turns: a disturbance meets both
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


class Run:
    """A run of the benchmark, in stages that give rows of tables: "steps", "loops", "parallel".

    Args:
        networks: names of :data:`LOOPS`.
        batches: of every network; None is 1 and its ``many``.
        plain: measure PyTorch, too.
        train_steps: of the policy on which parallel sampling is measured; 0 leaves it out.
        others: processes that must be ready, too, before anything is measured.

    """

    def __init__(
        self,
        networks: Sequence[str] = tuple(size.name for size in LOOPS),
        batches: Sequence[int] | None = None,
        plain: bool = True,
        train_steps: int = parallel.TRAIN_STEPS,
        others: Sequence[Process] = (),
    ):
        self._sizes = [size for size in LOOPS if size.name in networks]
        self._batches, self._plain, self._train_steps = batches, plain, train_steps
        self._others = others

    def stages(self) -> dict[str, Callable[[], dict[str, Any]]]:
        """The stages, to be called in order; each can be left out, for a run that goes on."""
        found = {size.name: partial(self._network, size) for size in self._sizes}
        found |= {f"{size.name}, loops": partial(self._loops, size) for size in self._sizes[:1]}
        if self._train_steps:
            found["parallel sampling"] = self._parallel
        return found

    def _network(self, size: Network) -> dict[str, Any]:
        """Compile first, so that nothing else runs where something is measured."""
        theirs = compiled.compiling(size) if self._plain else []
        for process in (*theirs, *self._others):
            process.wait()
        unet = size.build().eval()
        rows = [process.answer() for process in theirs]
        for batch in self._batches or (1, size.many):
            for label, dtype in DTYPES.items():
                if batch == 1 or label != "float32":
                    us = step_us(size, unet, dtype, batch)
                    rows.append({"batch": batch, "weights": label, "how": "dpa", "us": us})
        return {"steps": [self._beside_floor(size, unet, row) for row in rows]}

    def _loops(self, size: Network) -> dict[str, Any]:
        unet = size.build().eval()
        steps, found = [], []
        for label in ("bfloat16", "float32") if self._plain else ():
            step, rows = compiled.eager(size, unet, DTYPES[label])
            steps.append(self._beside_floor(size, unet, step))
            found += rows
        for dtype in DTYPES.values():
            found += loops(size, unet, dtype)
        found = [{"network": size.name} | row for row in found]
        return {"steps": steps, "loops": found, "read TB/s": read_rate() * 1e-12}

    def _parallel(self) -> dict[str, Any]:
        policy = parallel.trained(self._train_steps)
        return {"parallel": parallel.rows(policy, torch.bfloat16)}

    def _beside_floor(self, size: Network, unet: nn.Module, row: Row) -> Row:
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
