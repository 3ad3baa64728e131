"""The fused sampler over and over: soak.py [REPLAYS [SECONDS]]. Prints what drifted or leaked.

On a GPU the loop is a captured graph. After 20,000 calls many of them are captured into one graph,
each with its comparison, two at a time, so that a million take less than a minute. The CPU runs it
on packed weights.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import dpa

_CALLS = 20_000  # one by one
_TOGETHER = 50  # from then on, on a GPU


def _resident_mb() -> float:
    """Memory of this process in MB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _taken_mb(device: torch.device) -> float:
    if device.type != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / 2**20


def _files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _captured(works: list[Callable[[], None]], times: int) -> Callable[[], None]:
    """Return one graph of so many times each work, each on a stream of its own."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        for work in works:
            stream = torch.cuda.Stream()
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                for _ in range(times):
                    work()
            main.wait_stream(stream)
    return graph.replay


def run(device: torch.device, replays: int, limit: float = math.inf) -> dict[str, Any]:
    """Sample the same actions ``replays`` times and compare all with the first, bit for bit.

    It ends after ``limit`` seconds with the replays that it has made. Memory is read at the
    beginning, after the calls one by one, and at each tenth.
    """
    from diffusers import DDIMScheduler

    torch.manual_seed(0)
    unet = dpa.nn.ConditionalUnet1D(
        2, global_cond_dim=8, diffusion_step_embed_dim=16, down_dims=(128,)
    )
    sampler = dpa.DiffusionSampler(
        unet.to(device).eval(), DDIMScheduler(100), num_inference_steps=2, horizon=8, fused=True
    )
    cond, noise = torch.randn(1, 8, device=device), torch.randn(1, 8, 2, device=device)
    call = lambda: sampler(global_cond=cond, noise=noise)  # noqa: E731
    bits = call().clone().view(torch.int32)
    different = torch.zeros((2, *bits.shape), dtype=bits.dtype, device=device)

    def once(stream: int = 0) -> None:
        different[stream].bitwise_or_(call().view(torch.int32) ^ bits)

    once(), once()  # on a GPU the second captures the loop
    many = None
    if device.type == "cuda":
        many = _captured([once, lambda: once(1)], _TOGETHER // 2)
    for _ in range(20 if many is None else 1000):
        once()
    if many:
        many()
    # Waits for the device. The first count loads the kernels that count, 71 MB on the host.
    count = lambda: int(different.count_nonzero())  # noqa: E731
    count()

    readings: list[dict[str, float]] = []
    files, start, made = _files(), time.perf_counter(), 0
    due = sorted({0, min(_CALLS, replays), *(replays * i // 10 for i in range(1, 11))})
    while True:
        if made >= due[len(readings)]:
            count()
            memory = {"host": round(_resident_mb(), 1), "device": round(_taken_mb(device), 1)}
            readings.append({"replays": made, **memory})
        if made >= replays or time.perf_counter() - start >= limit:
            break
        if many and made >= _CALLS:
            many()
            made += _TOGETHER
        else:
            once()
            made += 1
    seconds = time.perf_counter() - start
    first, last = readings[0], readings[-1]
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "replays": made,
        "seconds": round(seconds, 1),
        "different": count(),
        "MB on the host": round(_resident_mb() - first["host"], 1),
        "MB on the host in the second half": round(
            last["host"] - readings[len(readings) // 2]["host"], 1
        ),
        "MB on the device": round(_taken_mb(device) - first["device"], 1),
        "files": _files() - files,
        "MB": readings,
    }


if __name__ == "__main__":
    gpu = torch.cuda.is_available()
    replays = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000 if gpu else 20_000
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else math.inf
    print(json.dumps(run(torch.device("cuda" if gpu else "cpu"), replays, seconds), indent=2))
