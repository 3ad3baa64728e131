"""The fused sampler over and over: soak.py [REPLAYS [SECONDS]]. Prints what drifted or leaked.

On a GPU the loop is a captured graph. After 10,000 calls, or a quarter of the time, many of them
are captured into one graph, each with its comparison, eight at a time, so that a million take about
a minute. The CPU runs it on packed weights.
"""

import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import dpa

_CALLS = 10_000  # one by one, in a quarter of the time at the most
_STREAMS = 8  # of a graph of many calls, on a GPU
_TOGETHER = 400  # calls in that graph


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
    beginning, after the calls one by one, and at each tenth; each reading is told on stderr.
    """
    from diffusers import DDIMScheduler

    start = time.perf_counter()
    elapsed = lambda: time.perf_counter() - start  # noqa: E731
    torch.manual_seed(0)
    unet = dpa.nn.ConditionalUnet1D(
        2, global_cond_dim=8, diffusion_step_embed_dim=16, down_dims=(128,)
    )
    sampler = dpa.DiffusionSampler(
        unet.to(device).eval(), DDIMScheduler(100), num_inference_steps=2, horizon=8, fused=True
    )
    cond, noise = torch.randn(1, 8, device=device), torch.randn(1, 8, 2, device=device)
    call = lambda: sampler(global_cond=cond, noise=noise)  # noqa: E731
    # Of this process alone, while what is taken is the device's, with its other users'.
    reserved = torch.cuda.memory_reserved if device.type == "cuda" else lambda: 0
    bits = call().clone().view(torch.int32)
    different = torch.zeros((_STREAMS, *bits.shape), dtype=bits.dtype, device=device)

    def once(stream: int = 0) -> None:
        different[stream].bitwise_or_(call().view(torch.int32) ^ bits)

    once(), once()  # on a GPU the second captures the loop
    many = None
    if device.type == "cuda":
        works = [functools.partial(once, stream) for stream in range(_STREAMS)]
        many = _captured(works, _TOGETHER // _STREAMS)
    for _ in range(20 if many is None else 1000):
        once()
    if many:
        many()
    # Waits for the device. The first count loads the kernels that count, 71 MB on the host.
    count = lambda: int(different.count_nonzero())  # noqa: E731
    count()

    readings: list[dict[str, float]] = []
    files, reserved_first, made = _files(), reserved(), 0
    singly: int | None = None
    due = [replays * i // 10 for i in range(11)]
    while True:
        over = elapsed() >= limit
        one_by_one = many is None or (made < _CALLS and elapsed() < limit / 4)
        end_of_calls = singly is None and not one_by_one
        if end_of_calls:
            singly = made
        if over or end_of_calls or made >= due[0]:
            due = [at for at in due if at > made]
            reading = {"replays": made, "seconds": round(elapsed(), 1), "different": count()}
            reading |= {"host": round(_resident_mb(), 1), "device": round(_taken_mb(device), 1)}
            readings.append(reading)
            print(json.dumps(reading), file=sys.stderr, flush=True)
        if over or made >= replays:
            break
        if one_by_one:
            once()
            made += 1
        else:
            many()
            made += _TOGETHER
            if made // _TOGETHER % 16 == 0:
                torch.cuda.synchronize()  # what waits in the device's queue counts as time, too
    first, last = readings[0], readings[-1]
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "replays": made,
        "one by one": made if singly is None else singly,
        "seconds": round(elapsed(), 1),
        "different": last["different"],
        "MB on the host": round(last["host"] - first["host"], 1),
        "MB on the host in the second half": round(
            last["host"] - readings[len(readings) // 2]["host"], 1
        ),
        "MB on the device": round(last["device"] - first["device"], 1),
        "bytes reserved": reserved() - reserved_first,
        "files": _files() - files,
        "MB": readings,
    }


if __name__ == "__main__":
    gpu = torch.cuda.is_available()
    replays = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000 if gpu else 20_000
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else math.inf
    print(json.dumps(run(torch.device("cuda" if gpu else "cpu"), replays, seconds), indent=2))
