"""The U-Net's step and the whole loop beside PyTorch's and the time that reading weights takes."""

from __future__ import annotations

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
from dpa.bench.networks import ACTION_DIM, COND_DIM, HORIZON, SIZES, Network
from dpa.bench.profiling import captured_loop, step_us
from dpa.bench.timing import device_spread_us, device_us, latency

_ORDERED = ("steps", "loops")  # tables to which several ways add rows
Row = dict[str, Any]


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
def measured(size: Network, unet: nn.Module, batch: int) -> list[tuple[str, Row]]:
    """One step inside the captured loop, and loops from the call in Python to the result.

    The 99th percentile of a step is that of loops of 40 steps, a fortieth of it. Batches above 1
    are of bfloat16 alone. Rows of the tables "steps" and "loops".
    """
    rows: list[tuple[str, Row]] = []
    for label, dtype in DTYPES.items():
        if dtype != torch.bfloat16 and batch > 1:
            continue
        about: Row = {"batch": batch, "weights": label, "how": "dpa"}
        noise = torch.randn(batch, HORIZON, ACTION_DIM, device="cuda")
        cond = torch.randn(batch, COND_DIM, device="cuda")
        packed = dpa.PackedUnet(unet, dtype)
        step = step_us(packed, noise, cond)
        repeats = min(200, max(20, round(4e5 / (40 * step))))
        _, last = device_spread_us(captured_loop(packed, noise, cond, 40), repeats)
        rows.append(("steps", about | {"us": step, "p99 us": last / 40}))
        for name, count in compiled.COUNTS.items():
            live = compiled.scheduler_of(name)
            sampler = dpa.DiffusionSampler(unet, live, count, dtype, horizon=HORIZON, fused=True)
            begin = time.perf_counter()
            sampler(cond)
            torch.cuda.synchronize()
            first = time.perf_counter() - begin
            us, p99 = latency(
                partial(sampler, cond), min(200, max(20, round(6e5 / (step * count))))
            )
            loop = {
                "loop": f"{name}, {count} steps",
                "us": us,
                "p99 us": p99,
                "first call s": first,
            }
            rows.append(("loops", about | loop | {"step us": step, "steps' time": us / step}))
    return rows


def profile(unet: nn.Module, dtype: torch.dtype) -> dpa.StepProfile:
    """Where the time of a step goes, in a DDIM loop on a network of the benchmark's sizes."""
    live = compiled.scheduler_of("DDIM")
    sampler = dpa.DiffusionSampler(unet, live, 10, dtype, horizon=HORIZON, fused=True)
    return dpa.profile(sampler)


class Run:
    """A run of the benchmark, in stages that give rows of tables: "steps", "loops", "parallel".

    Args:
        networks: names of :data:`SIZES`.
        batches: of the first network; of the others 1.
        autotune: measure torch.compile's max-autotune too, at batch 1.
        plain: measure PyTorch at all: beside the first network, at batches 1 and 16.
        train_steps: of the policy on which parallel sampling is measured; 0 leaves it out.
        others: processes that must be ready, too, before anything is measured.

    """

    def __init__(
        self,
        networks: Sequence[str] = ("67 M", "252 M"),
        batches: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
        autotune: bool = False,
        plain: bool = True,
        train_steps: int = parallel.TRAIN_STEPS,
        others: Sequence[Process] = (),
    ):
        self._sizes = [size for size in SIZES if size.name in networks]
        self._batches, self._autotune, self._train_steps = batches, autotune, train_steps
        self._others = others
        self._plain = plain and bool(self._sizes)
        self._built: tuple[Network, dpa.nn.ConditionalUnet1D] | None = None
        self._theirs: compiled.Ahead | None = None
        self._policy: Any = None
        self._rate = 0.0

    def stages(self) -> dict[str, Callable[[], dict[str, Any]]]:
        """The stages, to be called in order."""
        found: dict[str, Callable[[], dict[str, Any]]] = {"preparing": self._prepare}
        if self._plain:
            found["torch.compile"] = self._compiled
        ours = {
            f"{size.name}, batch {batch}": partial(self._ours, size, batch)
            for size in self._sizes
            for batch in self._batches
            if batch == 1 or size is self._sizes[0]
        }
        # The rows that requirements depend on come first: a run may be interrupted.
        first = [name for name in ours if name.endswith((" batch 1", " batch 16"))]
        found |= {name: ours[name] for name in first}
        if self._train_steps:
            found["parallel sampling"] = self._parallel
        found |= ours
        if self._plain:
            for label, batch in (("bfloat16", 1), ("bfloat16", 16), ("float32", 1)):
                found[f"eager {label}, batch {batch}"] = partial(self._eager, label, batch)
        return found

    def _prepare(self) -> dict[str, Any]:
        if self._plain:
            self._theirs = compiled.Ahead(self._sizes[0].name, self._autotune)
        # Trained while the others compile.
        if self._train_steps:
            self._policy = parallel.trained(self._train_steps)
        if self._theirs is not None:
            self._theirs.wait()
        for process in self._others:
            process.wait()
        self._rate = read_rate()
        return {"read TB/s": self._rate * 1e-12}

    def _unet(self, size: Network) -> dpa.nn.ConditionalUnet1D:
        if self._built is None or self._built[0] is not size:
            self._built = (size, size.build().eval())
        return self._built[1]

    def _compiled(self) -> dict[str, Any]:
        assert self._theirs is not None
        return self._tables(self._sizes[0], self._theirs.rows())

    def _eager(self, label: str, batch: int) -> dict[str, Any]:
        size = self._sizes[0]
        return self._tables(size, compiled.eager(self._unet(size), DTYPES[label], batch))

    def _ours(self, size: Network, batch: int) -> dict[str, Any]:
        return self._tables(size, measured(size, self._unet(size), batch))

    def _parallel(self) -> dict[str, Any]:
        return {"parallel": parallel.rows(self._policy, torch.bfloat16)}

    def _tables(self, size: Network, found: list[tuple[str, Row]]) -> dict[str, Any]:
        tables: dict[str, Any] = {"steps": [], "loops": []}
        for table, row in found:
            row = {"network": size.name} | row
            if table == "steps":
                read = conv_bytes(self._unet(size), DTYPES[row["weights"]])
                floor = read / self._rate * 1e6
                row |= {"floor us": floor, "x floor": row["us"] / floor}
            tables[table].append(row)
        return tables


def finished(results: dict[str, Any]) -> dict[str, Any]:
    """The tables in their order, and the requirements that they meet."""
    ordered = {name: sorted(results[name], key=_place) for name in _ORDERED if name in results}
    tables = results | ordered
    return tables | {"bars": bars(tables)}


def _place(row: Row) -> tuple[Any, ...]:
    """Where a row stands in its table: as the sizes, dtypes and ways are listed."""
    ways = ("eager", "torch.compile,", "torch.compile reduce", "torch.compile max", "dpa")
    way = next(i for i, name in enumerate(ways) if row["how"].startswith(name))
    names = [size.name for size in SIZES]
    weights = list(DTYPES).index(row["weights"])
    return names.index(row["network"]), row.get("loop", ""), row["batch"], weights, way
