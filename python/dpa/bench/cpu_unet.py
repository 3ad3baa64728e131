"""One forward pass of the U-Net on the CPU in every engine, side by side; a step of the sampler.

A measurement is one call from Python, inputs ready, to the result: the same for every engine. Their
calls take turns in short rounds, so that a machine that is busier for a while is so for all.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

import dpa
from dpa.bench.compiled import scheduler_of
from dpa.bench.cpu_rivals import ENGINES, Call, Inputs, engines
from dpa.bench.networks import Network
from dpa.bench.timing import in_turns, wall_us

#: The network of diffusion_policy's low-dimensional tasks, 67 M parameters with this conditioning.
NETWORK = Network("67 M", (256, 512, 1024), 256)
_DDIM_STEPS = 10

_EACH = 5  # calls of an engine in a round


def _milliseconds(calls: dict[Any, Call], rounds: int) -> dict[Any, list[float]]:
    """Of each engine's calls, in turns; a turn begins with one that is not counted.

    That one wakes the engine's threads and sees the caches as the others have left them.
    """

    def measure(call: Call) -> list[float]:
        call()
        return [wall_us(call) / 1e3 for _ in range(_EACH)]

    times = in_turns(calls, range(rounds + 1), measure)
    return {key: [ms for turn in turns for ms in turn] for key, turns in times.items()}


def _network(network: Network, batch: int) -> tuple[nn.Module, Inputs]:
    """A network of these sizes, and its inputs."""
    sample, _, cond, _ = network.batch(batch, torch.device("cpu"))
    return network.build("cpu").eval(), (sample, torch.full((batch,), 5.0), cond)


def _reader(packed: torch.Tensor) -> Call:
    """Reads every byte of the packed weights once, with all threads: no step can be faster."""
    words = packed[: packed.numel() // 8 * 8].view(torch.int64)
    return lambda: words.sum()


def forward_rows(
    network: Network, batch: int, rounds: int = 6, wanted: Collection[str] = ENGINES
) -> list[dict[str, Any]]:
    """A row for each engine and precision: times, eager's over them, error against float64."""
    unet, inputs = _network(network, batch)
    with torch.no_grad():
        exact = dpa.reference.plain(unet).double()(
            inputs[0].double(), inputs[1], None, inputs[2].double()
        )
        calls = {(name, precision): call for name, precision, call in engines(unet, inputs, wanted)}
        errors = {
            key: float((call().double() - exact).norm() / exact.norm())
            for key, call in calls.items()
        }
        for dtype in (torch.float32, torch.bfloat16):
            packed = dpa.packed.PackedUnet(unet, dtype).packed
            precision = str(dtype).removeprefix("torch.")
            calls["reading", precision] = _reader(packed)
        times = _milliseconds(calls, rounds)
    eager, rows = statistics.median(times["eager", "float32"]), []
    for (name, precision), ms in times.items():
        p10, *_, p90 = statistics.quantiles(ms, n=10, method="inclusive")
        median = statistics.median(ms)
        row = {"batch": batch, "engine": name, "precision": precision}
        row |= {"median ms": median, "p10 ms": p10, "p90 ms": p90, "eager / this": eager / median}
        rows.append(row | {"error": errors.get((name, precision))})
    return rows


def loop_rows(network: Network, batch: int, rounds: int = 4) -> list[dict[str, Any]]:
    """A step of the default sampler's loop, in each precision, beside OpenVINO's forward pass.

    Ten DDIM steps from call to result, a tenth of them a step. OpenVINO's column is empty where it
    is not installed.
    """
    scheduler = scheduler_of("DDIM")
    unet, inputs = _network(network, batch)
    calls: dict[Any, Call] = {}
    with torch.no_grad():
        for name, precision, call in engines(unet, inputs, ("OpenVINO",)):
            calls[name, precision] = call
        for dtype in (torch.float32, torch.bfloat16):
            sampler = dpa.DiffusionSampler(
                unet, scheduler, _DDIM_STEPS, horizon=network.horizon, dtype=dtype
            )
            calls["loop", str(dtype).removeprefix("torch.")] = lambda sampler=sampler: sampler(
                global_cond=inputs[2]
            )
        times = _milliseconds(calls, rounds)
    rows = []
    for precision in ("float32", "bfloat16"):
        step = statistics.median(times["loop", precision]) / _DDIM_STEPS
        row = {"network": network.name, "batch": batch, "precision": precision, "a step, ms": step}
        if ("OpenVINO", precision) in times:
            rival = statistics.median(times["OpenVINO", precision])
            row |= {"OpenVINO's pass, ms": rival, "OpenVINO / this": rival / step}
        rows.append(row)
    return rows
