"""CUDA graphs, captured without the random number generators of other threads, and kept.

``torch.cuda.graph`` registers the device's generator for every capture: until the capture ends, a
thread that uses random numbers on that device gets an error. The graphs here know no generator.
Memory comes from a pool of PyTorch's allocator, as that of its own graphs does.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from dpa.library.capture import another_stream, capturing, collecting_later, leaving_failed
from dpa.library.checks import first_line
from dpa.library.loader import library_path

_THREAD_LOCAL = 1  # cudaStreamCaptureModeThreadLocal: other threads go on using CUDA
_AUTO_FREE = 1  # cudaGraphInstantiateFlagAutoFreeOnLaunch, as PyTorch's graphs

# Allocated before a capture, and freed: more than a loop of the published networks takes.
_ROOM = 64 << 20

# Captures of one device share a stream, since cuBLAS keeps a workspace for every stream, and so do
# captures inside them.
_streams: dict[tuple[int, bool], tuple[torch.cuda.Stream, threading.Lock]] = {}
_threads = threading.local()  # whose captures take memory on any stream from their pool

Pool = tuple[int, int]


class NotRepeatedError(RuntimeError):
    """A capture that cannot hold a loop of its own."""


class Replayed(Protocol):
    """A captured graph."""

    def replay(self) -> None:
        """Launch it on the current stream."""


def captured(
    device: torch.device,
    *works: Callable[[], Any],
    stream: torch.cuda.Stream | None = None,
    random_numbers: bool = False,
    differentiates: bool = False,
) -> tuple[list[Replayed], list[Any]]:
    """Capture each work, in order; return the graphs, whose memory is shared, and the results.

    Where that fails, as for work that uses random numbers after all, every work runs once more, in
    a capture of ``torch.cuda.graph``, whose error is raised.

    Args:
        device: where works launch kernels.
        works: called without arguments.
        stream: the current one of the captures.
        random_numbers: whether to take ``torch.cuda.graph`` at once.
        differentiates: whether another thread works too, as in a backward: all on ``stream``.

    """
    if not random_numbers:
        try:
            with collecting_later(), _beside(device, stream):
                pool = torch.cuda.graph_pool_handle()
                graphs = [Graph(device, pool, differentiates) for _ in works]
                results = [graph.record(work) for graph, work in zip(graphs, works, strict=True)]
                return list(graphs), results
        except (torch.OutOfMemoryError, NotRepeatedError):
            raise
        except (RuntimeError, AttributeError):  # AttributeError: a PyTorch without these pools
            pass
    theirs, results = [torch.cuda.CUDAGraph() for _ in works], []
    pool = torch.cuda.graph_pool_handle()
    with leaving_failed(device, *theirs):
        for graph, work in zip(theirs, works, strict=True):
            with capturing(graph, pool=pool, stream=stream):
                results.append(work())
    return list(theirs), results


def repeat(body: Callable[[], Any], position: Tensor, end: int, count: Tensor) -> None:
    """Record ``body`` in the capture under way, to be repeated while ``position < end``.

    The device decides, and the host need not know how often. Memory that ``body`` allocates is the
    graph's, so the capture must be one of :func:`captured`.

    Args:
        body: called once; it launches kernels, and copies and fills on the device, and brings
            ``position`` on.
        position: int64, of one element.
        end: where ``position`` ends.
        count: float32, of one element, which grows by one each time.

    Raises:
        NotRepeatedError: there is no such capture, or CUDA cannot repeat what ``body`` launched.

    """
    if not getattr(_threads, "captures", False):
        raise NotRepeatedError("what is repeated needs a capture with a pool for all streams")
    outer = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    numbers = ctypes.c_void_p(position.data_ptr()), ctypes.c_int64(end)
    counted = ctypes.c_void_p(count.data_ptr())
    with _borrowed(position.device, inside=True) as stream:
        if stream.cuda_stream == outer.value:
            stream = another_stream()
        with torch.cuda.stream(stream), _recorded(body) as (graph, _):
            _check(_runtime().dpa_capture_repeat(outer, graph, *numbers, counted), NotRepeatedError)


class Graph:
    """What a capture recorded, to be replayed on the current stream."""

    def __init__(self, device: torch.device, pool: Pool, differentiates: bool):
        self._device, self._pool, self._differentiates = device.index, pool, differentiates
        self._launched = ctypes.c_void_p()

    def record(self, work: Callable[[], Any]) -> Any:
        """Capture what ``work`` launches on the current stream, and return what it returns."""
        cuda, flags = _runtime(), ctypes.c_ulonglong(_AUTO_FREE)
        with self._memory(), _recorded(work) as (graph, result):
            launched = ctypes.byref(self._launched)
            _check(cuda.cudaGraphInstantiateWithFlags(launched, graph, flags))
            _at_end(self, cuda.cudaGraphExecDestroy, ctypes.c_void_p(self._launched.value))
        return result

    @contextmanager
    def _memory(self) -> Iterator[None]:
        """Memory of this thread on any stream, or of any thread on this one, is the pool's."""
        if self._differentiates:
            torch._C._cuda_beginAllocateCurrentStreamToPool(self._device, self._pool)
        else:
            torch._C._cuda_beginAllocateCurrentThreadToPool(self._device, self._pool)
        _at_end(self, torch._C._cuda_releasePool, self._device, self._pool)
        _threads.captures = not self._differentiates
        try:
            yield
        finally:
            _threads.captures = False
            torch._C._cuda_endAllocateToPool(self._device, self._pool)

    def replay(self) -> None:
        """Launch it on the current stream of its device."""
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        if self._device == torch._C._cuda_getDevice():
            _check(_runtime().cudaGraphLaunch(self._launched, ctypes.c_void_p(stream)))
        else:
            with torch.cuda.device(self._device):
                _check(_runtime().cudaGraphLaunch(self._launched, ctypes.c_void_p(stream)))


class GraphCache:
    """A bounded cache of captured work; the least recently used goes first.

    Calls from several streams or threads are safe: one waits for the other.

    Attributes:
        capacity: how many are kept.
        kept: what is held by its key, the latest used last.

    """

    capacity = 8

    def __init__(self) -> None:
        self.refused: dict[Hashable, str] = {}
        self.kept: OrderedDict[Hashable, Any] = OrderedDict()
        self.lock = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy, or what a pickle brings back, captures anew.
        return type(self), ()

    def __len__(self) -> int:
        """Return how many are held."""
        return len(self.kept)

    def clear(self) -> None:
        """Drop all, and forget what could not be captured."""
        with self.lock:
            self.kept.clear()
            self.refused.clear()

    def find(self, key: Hashable) -> Any:
        """Return what is kept of a key, or None."""
        if key in self.kept:
            self.kept.move_to_end(key)
        return self.kept.get(key)

    def capture(self, key: Hashable, device: torch.device, capture: Callable[[], Any]) -> Any:
        """Keep and return what ``capture()`` captures, or None: the work runs kernel by kernel.

        Where memory is short the next call tries again; what else fails is ``refused`` for good,
        and a warning says why.
        """
        try:
            if key not in self.refused:
                # Without memory a capture would end in pieces; here the error is an ordinary one.
                torch.empty(_ROOM, dtype=torch.uint8, device=device)
                self.kept[key] = capture()
        except torch.OutOfMemoryError:
            warnings.warn(
                "DiffusionSampler: no memory for a CUDA graph of this loop, which runs kernel by "
                "kernel: free some, the next call tries again",
                stacklevel=2,
            )
        except RuntimeError as error:
            self.refused[key] = why = first_line(error)
            why = f"this loop could not be captured and runs kernel by kernel: {why}"
            warnings.warn(f"DiffusionSampler: {why}", RuntimeWarning, stacklevel=2)
        while len(self.kept) > self.capacity:
            self.kept.popitem(last=False)
        return self.kept.get(key)


@contextmanager
def _recorded(work: Callable[[], Any]) -> Iterator[tuple[ctypes.c_void_p, Any]]:
    """Capture what ``work`` launches on the current stream; lend the graph, and what it returns."""
    cuda, stream = _runtime(), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    graph = ctypes.c_void_p()
    try:
        _check(cuda.cudaStreamBeginCapture(stream, _THREAD_LOCAL))
        try:
            result = work()
        except BaseException:
            cuda.cudaStreamEndCapture(stream, ctypes.byref(graph))
            cuda.cudaGetLastError()  # a capture that was broken off
            raise
        _check(cuda.cudaStreamEndCapture(stream, ctypes.byref(graph)))
        yield graph, result
    finally:
        if graph:
            cuda.cudaGraphDestroy(graph)


@contextmanager
def _beside(device: torch.device, stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Let what runs inside use a stream that is no thread's default, after the current one."""
    with torch.cuda.device(device):
        torch.cuda.empty_cache()  # a capture cannot take what the allocator holds unused
        with _borrowed(device) if stream is None else nullcontext(stream) as beside:
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                yield


@contextmanager
def _borrowed(device: torch.device, inside: bool = False) -> Iterator[torch.cuda.Stream]:
    """Lend the stream of the device's captures, or another where a thread has it."""
    shared, lock = _streams.setdefault(
        (device.index, inside), (torch.cuda.Stream(device), threading.Lock())
    )
    mine = lock.acquire(blocking=False)
    try:
        yield shared if mine else torch.cuda.Stream(device)
    finally:
        if mine:
            lock.release()


@functools.cache
def _runtime() -> Any:
    """CUDA's runtime: the one that the library, and so PyTorch, uses."""
    found = ctypes.CDLL(str(library_path()))
    found.cudaGetErrorString.restype = ctypes.c_char_p
    return found


def _check(status: int, kind: type[RuntimeError] = RuntimeError) -> None:
    if status:
        _runtime().cudaGetLastError()
        raise kind(f"CUDA error: {_runtime().cudaGetErrorString(status).decode()}")


def _at_end(owner: object, call: Callable[..., Any], *arguments: Any) -> None:
    """Call when the owner goes, but not when the process ends, as CUDA does then."""
    weakref.finalize(owner, call, *arguments).atexit = False
