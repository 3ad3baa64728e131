"""Timing: CUDA events, warm-up, medians; host time apart from device time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from dpa.library.capture import capturing, leaving_failed

Key, Run, Found = TypeVar("Key"), TypeVar("Run"), TypeVar("Found")


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
        return statistics.median(wall_us(run, inner) for _ in range(repeats))
    return statistics.median(_device_us(run, inner) for _ in range(repeats))


def latency(run: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median and 99th percentile, in microseconds, from the call to its result on the device."""
    warm_up = min(3, (repeats + 1) // 3)
    times = sorted(in_turns({"": run}, range(warm_up + repeats), warm_up=warm_up)[""])
    return statistics.median(times), times[min(len(times) - 1, int(0.99 * len(times)))]


def latency_us(run: Callable[[], object]) -> float:
    """Microseconds of one call, to its result on the device."""
    finish = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    finish()
    return wall_us(lambda: (run(), finish()))


def in_turns(
    runs: Mapping[Key, Run],
    rounds: Iterable[object],
    measure: Callable[[Run], Found] = latency_us,
    warm_up: int = 1,
) -> dict[Key, list[Found]]:
    """Measure all runs, one after the other in every round, but for the rounds to warm up.

    Drift, such as that of the clocks, or of a machine that is busier for a while, affects all of
    them alike, so that differences of a percent are resolved.
    """
    times: dict[Key, list[Found]] = {key: [] for key in runs}
    for number, _ in enumerate(rounds):
        for key, run in runs.items():
            found = measure(run)
            if number >= warm_up:
                times[key].append(found)
    return times


def medians(
    calls: Mapping[Key, Callable[[], object]], seconds: float, warm_up: int = 1
) -> dict[Key, float]:
    """Median milliseconds, after the warm-up in turns for about ``seconds``, thrice at least."""

    def rounds() -> Iterator[int]:
        yield from range(warm_up)
        end = time.perf_counter() + seconds
        for number in range(200):
            if number >= 3 and time.perf_counter() >= end:
                return
            yield number

    times = in_turns(calls, rounds(), warm_up=warm_up)
    return {key: statistics.median(found) / 1e3 for key, found in times.items()}


@dataclass
class Spread:
    """A median, with the 5th and 95th percentiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, times: list[float]) -> Spread:
        """Of measurements."""
        twentieths = statistics.quantiles(times, n=20)
        return cls(statistics.median(times), twentieths[0], twentieths[-1])


def device_us_alternated(
    runs: Mapping[Key, Callable[[], object]], rounds: int, inner: int = 1
) -> dict[Key, Spread]:
    """As :func:`device_us` for several runs, in turns."""
    return _alternated(runs, rounds, lambda run: _device_us(run, inner))


def graph_us(
    runs: Mapping[Key, Callable[[], object]], rounds: int, copies: int = 1
) -> dict[Key, Spread]:
    """A run's time on the GPU inside a CUDA graph of so many copies of it, in turns."""
    graphs = {key: graphed(run, copies) for key, run in runs.items()}
    return _alternated(graphs, rounds, lambda graph: _device_us(graph, 1) / copies)


def host_us_alternated(
    runs: Mapping[Key, Callable[[], object]], rounds: int = 100, inner: int = 20
) -> dict[Key, Spread]:
    """Host microseconds per call; the device queue is empty at the start."""

    def measure(run: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        return wall_us(run, inner)

    return _alternated(runs, rounds, measure)


def _alternated(
    runs: Mapping[Key, Run], rounds: int, measure: Callable[[Run], float]
) -> dict[Key, Spread]:
    warm_up = max(3, rounds // 10)
    times = in_turns(runs, range(warm_up + rounds), measure, warm_up)
    return {key: Spread.of(values) for key, values in times.items()}


def graphed(run: Callable[[], object], copies: int = 20, warm_up: int = 3) -> Callable[[], None]:
    """A CUDA graph of ``copies`` calls of ``run``, so that launch costs leave the measurement."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_up):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with leaving_failed(torch.device("cuda"), graph), capturing(graph):
        for _ in range(copies):
            run()

    def replay(_reads: object = run) -> None:  # keeps the graph's inputs alive
        graph.replay()

    return replay


def wall_us(run: Callable[[], object], inner: int = 1) -> float:
    """Microseconds of the host for a call, the mean of ``inner`` in a row."""
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
