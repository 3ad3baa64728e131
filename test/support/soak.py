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


class _Soak:
    """One loop's calls, each compared with the first, and what they have taken."""

    def __init__(self, device: torch.device):
        self.device, self._start = device, time.perf_counter()
        self._call = _call_of_a_loop(device)
        self._bits = self._call().clone().view(torch.int32)
        self._different = torch.zeros(
            (_STREAMS, *self._bits.shape), dtype=self._bits.dtype, device=device
        )
        self.once(), self.once()  # on a GPU the second captures the loop
        self.many: Callable[[], None] | None = None
        if device.type == "cuda":
            works = [functools.partial(self.once, stream) for stream in range(_STREAMS)]
            self.many = _captured(works, _TOGETHER // _STREAMS)
        for _ in range(1000 if self.many else 20):
            self.once()
        if self.many:
            self.many()
        # The first count loads the kernels that count, 71 MB on the host.
        self._count()
        self._files, self._reserved = _files(), self._reserved_bytes()
        self.readings: list[dict[str, float]] = []

    def once(self, stream: int = 0) -> None:
        """One call, and its comparison."""
        self._different[stream].bitwise_or_(self._call().view(torch.int32) ^ self._bits)

    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self._start

    def read(self, made: int) -> None:
        """Take a reading after so many calls, and tell it on stderr. Waits for the device."""
        reading = {"replays": made, "seconds": round(self.elapsed(), 1), "different": self._count()}
        reading |= {"host": round(_resident_mb(), 1), "device": round(_taken_mb(self.device), 1)}
        self.readings.append(reading)
        print(json.dumps(reading), file=sys.stderr, flush=True)

    def _count(self) -> int:
        return int(self._different.count_nonzero())

    def _reserved_bytes(self) -> int:
        """Of this process alone, while what is taken is the device's, with its other users'."""
        return torch.cuda.memory_reserved() if self.device.type == "cuda" else 0

    def report(self, one_by_one: int) -> dict[str, Any]:
        """What drifted or leaked from the first reading to the last."""
        first, last = self.readings[0], self.readings[-1]
        middle = self.readings[len(self.readings) // 2]
        cuda = self.device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name() if cuda else "CPU",
            "replays": last["replays"],
            "one by one": one_by_one,
            "seconds": round(self.elapsed(), 1),
            "different": last["different"],
            "MB on the host": round(last["host"] - first["host"], 1),
            "MB on the host in the second half": round(last["host"] - middle["host"], 1),
            "MB on the device": round(last["device"] - first["device"], 1),
            "bytes reserved": self._reserved_bytes() - self._reserved,
            "files": _files() - self._files,
            "MB": self.readings,
        }


def _call_of_a_loop(device: torch.device) -> Callable[[], torch.Tensor]:
    from diffusers import DDIMScheduler

    torch.manual_seed(0)
    unet = dpa.nn.ConditionalUnet1D(
        2, global_cond_dim=8, diffusion_step_embed_dim=16, down_dims=(128,)
    )
    sampler = dpa.DiffusionSampler(
        unet.to(device).eval(), DDIMScheduler(100), num_inference_steps=2, horizon=8, fused=True
    )
    cond, noise = torch.randn(1, 8, device=device), torch.randn(1, 8, 2, device=device)
    return lambda: sampler(global_cond=cond, noise=noise)


def run(device: torch.device, replays: int, limit: float = math.inf) -> dict[str, Any]:
    """Sample the same actions ``replays`` times and compare all with the first, bit for bit.

    It ends after ``limit`` seconds with the replays that it has made. Memory is read at the
    beginning, after the calls one by one, and at each tenth; each reading is printed to stderr.
    """
    soak, made = _Soak(device), 0
    singly: int | None = None
    due = [replays * i // 10 for i in range(11)]
    while True:
        over = soak.elapsed() >= limit
        one_by_one = soak.many is None or (made < _CALLS and soak.elapsed() < limit / 4)
        end_of_calls = singly is None and not one_by_one
        if end_of_calls:
            singly = made
        if over or end_of_calls or made >= due[0]:
            due = [at for at in due if at > made]
            soak.read(made)
        if over or made >= replays:
            return soak.report(made if singly is None else singly)
        if one_by_one:
            soak.once()
            made += 1
        else:
            soak.many()
            made += _TOGETHER
            if made // _TOGETHER % 16 == 0:
                torch.cuda.synchronize()  # what waits in the device's queue counts as time, too


if __name__ == "__main__":
    gpu = torch.cuda.is_available()
    replays = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000 if gpu else 20_000
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else math.inf
    print(json.dumps(run(torch.device("cuda" if gpu else "cpu"), replays, seconds), indent=2))
