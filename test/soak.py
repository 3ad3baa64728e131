"""The fused sampler over and over: soak.py [REPLAYS [SECONDS]]. Prints what drifted or leaked.

On a GPU the loop is a captured graph. After 20,000 calls many of them are captured into one graph,
each with its comparison, so that a million take less than a minute. The CPU runs it on packed
weights.
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


def _captured(work: Callable[[], None], times: int) -> Callable[[], None]:
    """Return one graph of so many times the work."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            work()
    return graph.replay


def run(device: torch.device, replays: int, limit: float = math.inf) -> dict[str, Any]:
    """Sample the same actions ``replays`` times and compare all with the first, bit for bit.

    It ends after ``limit`` seconds with the replays that it has made.
    """
    from diffusers import DDIMScheduler

    torch.manual_seed(0)
    unet = dpa.nn.ConditionalUnet1D(
        2, global_cond_dim=8, diffusion_step_embed_dim=16, down_dims=(32, 64)
    )
    sampler = dpa.DiffusionSampler(
        unet.to(device).eval(), DDIMScheduler(100), num_inference_steps=2, horizon=8, fused=True
    )
    cond, noise = torch.randn(1, 8, device=device), torch.randn(1, 8, 2, device=device)
    call = lambda: sampler(global_cond=cond, noise=noise)  # noqa: E731
    bits = call().clone().view(torch.int32)
    different = torch.zeros_like(bits)

    def once() -> None:
        different.bitwise_or_(call().view(torch.int32) ^ bits)

    many = None
    if device.type == "cuda":
        once(), once()  # captures the loop
        many = _captured(once, _TOGETHER)
        many()
    for _ in range(20 if many is None else 1000):
        once()
    before = _resident_mb(), _taken_mb(device), _files()
    start, made = time.perf_counter(), 0
    while made < replays and time.perf_counter() - start < limit:
        if many and made >= _CALLS:
            many()
            made += _TOGETHER
        else:
            once()
            made += 1
    count = int(different.count_nonzero())  # waits for the device
    seconds = time.perf_counter() - start
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "replays": made,
        "seconds": round(seconds, 1),
        "different": count,
        "MB on the host": round(_resident_mb() - before[0], 1),
        "MB on the device": round(_taken_mb(device) - before[1], 1),
        "files": _files() - before[2],
    }


if __name__ == "__main__":
    gpu = torch.cuda.is_available()
    replays = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000 if gpu else 20_000
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else math.inf
    print(json.dumps(run(torch.device("cuda" if gpu else "cpu"), replays, seconds), indent=2))
