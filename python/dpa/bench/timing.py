"""How time is taken: device events, warm-up, medians; host time apart from device time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def device_us(run: Callable[[], object], repeats: int = 50, inner: int = 1) -> float:
    """Median microseconds a call of ``run`` takes on the GPU, or on the CPU where there is none.

    Args:
        run: what to time; it works on the current stream.
        repeats: measurements, after a tenth as many to warm up.
        inner: calls a measurement, for work too short for one event pair to resolve.

    """
    for _ in range(max(3, repeats // 10)):
        run()
    if not torch.cuda.is_available():
        return statistics.median(_wall_us(run, inner) for _ in range(repeats))
    return statistics.median(_device_us(run, inner) for _ in range(repeats))


def device_spread_us(run: Callable[[], object], repeats: int = 200) -> tuple[float, float]:
    """Median and 99th percentile of the microseconds that a call of ``run`` takes on the GPU."""
    for _ in range(3):
        run()
    times = sorted(_device_us(run, 1) for _ in range(repeats))
    return statistics.median(times), times[int(0.99 * (repeats - 1))]


def host_us(run: Callable[[], object], repeats: int = 200, inner: int = 20) -> float:
    """Median microseconds that the host spends in a call; the device never falls behind."""
    times = []
    for _ in range(repeats):
        times.append(_wall_us(run, inner))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return statistics.median(times)


def graphed(run: Callable[[], object], copies: int = 20) -> Callable[[], None]:
    """A CUDA graph of ``copies`` calls of ``run``, so that launch costs leave the measurement."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(copies):
            run()
    return graph.replay


def _wall_us(run: Callable[[], object], inner: int) -> float:
    begin = time.perf_counter()
    for _ in range(inner):
        run()
    return (time.perf_counter() - begin) * 1e6 / inner


def _device_us(run: Callable[[], object], inner: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(inner):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / inner
