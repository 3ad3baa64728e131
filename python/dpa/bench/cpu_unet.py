"""One forward pass of the U-Net on the CPU in every engine, side by side; and a denoising loop.

A measurement is one call from Python, inputs ready, to the result: the same for every engine. Their
calls take turns in short rounds, so that a machine that is busier for a while is so for all.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import nn

import dpa
from dpa.bench.cpu_rivals import Call, engines
from dpa.bench.timing import in_turns, wall_us

#: The network of diffusion_policy's low-dimensional tasks, 67 M parameters with this conditioning.
NETWORK = {
    "input_dim": 2,
    "global_cond_dim": 132,
    "down_dims": (256, 512, 1024),
    "cond_predict_scale": True,
}
_HORIZON = 16
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


def _summary(times: list[float]) -> dict[str, float]:
    tenths = statistics.quantiles(times, n=10, method="inclusive")
    return {"median ms": statistics.median(times), "p10 ms": tenths[0], "p90 ms": tenths[-1]}


def _reader(packed: torch.Tensor) -> Call:
    """Reads every byte of the packed weights once, with all threads: no step can be faster."""
    words = packed[: packed.numel() // 8 * 8].view(torch.int64)
    return lambda: words.sum()


def forward_rows(
    unet: nn.Module, batch: int, rounds: int = 6, compiled: bool = True
) -> list[dict[str, Any]]:
    """A row for each engine and precision: times, eager's over them, error against float64."""
    cond_dim, actions = NETWORK["global_cond_dim"], NETWORK["input_dim"]
    inputs = torch.randn(batch, _HORIZON, actions), torch.full((batch,), 5.0)
    inputs += (torch.randn(batch, cond_dim),)
    with torch.no_grad():
        exact = dpa.reference.plain(unet).double()(
            inputs[0].double(), inputs[1], None, inputs[2].double()
        )
        calls = {
            (name, precision): call for name, precision, call in engines(unet, inputs, compiled)
        }
        errors = {
            key: float((call().double() - exact).norm() / exact.norm())
            for key, call in calls.items()
        }
        for dtype in (torch.float32, torch.bfloat16):
            packed = dpa.packed.PackedUnet(unet, dtype).packed
            precision = str(dtype).removeprefix("torch.")
            calls["reading", precision] = _reader(packed)
        times = _milliseconds(calls, rounds)
    eager = statistics.median(times["eager", "float32"])
    return [
        {"batch": batch, "engine": name, "precision": precision}
        | _summary(times[name, precision])
        | {
            "eager / this": eager / statistics.median(times[name, precision]),
            "error": errors.get((name, precision)),
        }
        for name, precision in calls
    ]


def loop_rows(unet: nn.Module, rounds: int = 4) -> list[dict[str, Any]]:
    """Ten DDIM steps from call to result, beside one forward pass of the same packed network."""
    from diffusers import DDIMScheduler

    scheduler = DDIMScheduler(num_train_timesteps=100, beta_schedule="squaredcos_cap_v2")
    cond = torch.randn(1, NETWORK["global_cond_dim"])
    sample, timestep = torch.randn(1, _HORIZON, NETWORK["input_dim"]), torch.full((1,), 5.0)
    calls: dict[Any, Call] = {}
    for dtype in (torch.float32, torch.bfloat16):
        precision = str(dtype).removeprefix("torch.")
        sampler = dpa.DiffusionSampler(
            unet, scheduler, _DDIM_STEPS, horizon=_HORIZON, dtype=dtype, fused=True
        )
        packed = dpa.packed.PackedUnet(unet, dtype)
        calls["step", precision] = lambda packed=packed: packed(sample, timestep, cond)
        calls["loop", precision] = lambda sampler=sampler: sampler(global_cond=cond)
    with torch.no_grad():
        times = _milliseconds(calls, rounds)
    rows = []
    for precision in ("float32", "bfloat16"):
        step, loop = (statistics.median(times[what, precision]) for what in ("step", "loop"))
        row = {
            "precision": precision,
            "one forward pass, ms": step,
            f"{_DDIM_STEPS} DDIM steps, ms": loop,
        }
        rows.append(row | {"loop / pass": loop / step})
    return rows
