"""CUDA graph capture: whether it is possible here, the capture, and the end of a failed one.

PyTorch's transformers wait for the device, to see whether a mask is causal; no capture can. What
they found in a call before stands for it (:class:`MaskAnswers`).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import transformer

# What PyTorch asks of masks; who answers in each thread, and in all of them.
_ask = transformer._detect_is_causal_mask
_asking, _asked, _ANSWERING = threading.local(), [], threading.Lock()
# Failed captures. PyTorch's allocator may still query them for their memory.
FAILED: list[torch.cuda.CUDAGraph] = []


def can_capture(device: torch.device) -> bool:
    """Whether a graph may be captured or replayed here and now.

    Not while torch.compile traces, nor inside a capture of the caller's, which records the kernels
    themselves.
    """
    return (
        device.type == "cuda"
        and not torch.compiler.is_compiling()
        and not torch.cuda.is_current_stream_capturing()
    )


def kernel_settings(kind: str = "cuda") -> tuple[Any, ...]:
    """What else decides which kernels run on that kind of device."""
    return (
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        torch.get_default_dtype(),
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.enabled,
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )


@contextlib.contextmanager
def no_autocast_cache() -> Iterator[None]:
    """Let a capture cast weights anew: casts that were cached are freed with their context."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def another_stream() -> torch.cuda.Stream:
    """Return a stream that is not the current one: PyTorch gives out 32 in turns."""
    stream = torch.cuda.Stream()
    while stream == torch.cuda.current_stream():
        stream = torch.cuda.Stream()
    return stream


def capture_stream() -> torch.cuda.Stream | None:
    """Return the stream to capture on; None: PyTorch's own.

    That is one for the process, of the device that captured first. On another device nothing that
    runs there would be captured.
    """
    own, device = torch.cuda.graph.default_capture_stream, torch.cuda.current_device()
    return None if own is None or own.device_index == device else _stream_of(device)


@functools.cache
def _stream_of(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def capturing(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream | None = None, **options: Any
) -> Iterator[None]:
    """Capture what runs inside, as ``torch.cuda.graph`` does; the current stream then waits for it.

    ``stream``: None is one of the current device.

    A capture first writes the seed and offset of random numbers, on its own stream; a replay writes
    its own, on the current one. Nothing else orders the two, and on a busy GPU the capture's may
    come last.
    """
    # Other threads, such as a camera's or a data loader's, go on using CUDA in the meantime.
    options |= {"capture_error_mode": "thread_local", "stream": stream or capture_stream()}
    with torch.cuda.graph(graph, **options):
        beside = torch.cuda.current_stream()
        yield
    torch.cuda.current_stream().wait_stream(beside)


class MaskAnswers:
    """Whether masks of PyTorch's transformers are causal, as a call found: a capture cannot ask."""

    def __init__(self) -> None:
        self._found: dict[tuple[Any, ...], bool] = {}
        self._masks: list[tuple[Tensor, int]] = []

    def holds(self) -> bool:
        """Whether no mask was written since."""
        return all(mask._version == version for mask, version in self._masks)

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Answer this thread's calls from what was found; find what was not."""
        _asking.answers = self
        with _ANSWERING:
            _asked.append(self)
            transformer._detect_is_causal_mask = _is_causal
        try:
            yield
        finally:
            _asking.answers = None
            with _ANSWERING:
                _asked.remove(self)
                if not _asked:
                    transformer._detect_is_causal_mask = _ask

    def answer(self, mask: Tensor, size: int | None) -> bool:
        """Return what was found of a mask, or ask."""
        key = mask.data_ptr(), tuple(mask.shape), mask.stride(), mask.dtype, size
        if key not in self._found:
            self._found[key] = _ask(mask, None, size)
            if not mask.is_inference():
                self._masks.append((mask, mask._version))
        return self._found[key]


def _is_causal(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    answers = getattr(_asking, "answers", None)
    if answers is None or mask is None or is_causal is not None:
        return _ask(mask, is_causal, size)
    return answers.answer(mask, size)


@contextlib.contextmanager
def leaving_failed(device: torch.device, *graphs: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Let captures of these graphs run inside, and leave them where one fails; the error goes on.

    What a failed capture allocated belongs to its graph, which is kept, and the global generator
    is brought out of it.
    """
    spare = torch.empty(1, device=device)
    with collecting_later():
        try:
            yield
        except BaseException:
            FAILED.extend(graphs)
            with contextlib.suppress(RuntimeError):  # the first error says more
                leave_capture(spare)
            raise


@contextlib.contextmanager
def collecting_later() -> Iterator[None]:
    """Collect garbage now rather than inside, during a capture: destroying a graph would end it."""
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def gradients_kept() -> Iterator[None]:
    """Give all parameters the gradients that they have now back, where what runs inside fails.

    Those that a failed capture leaves were never computed.
    """
    tensors = [x for x in gc.get_objects() if issubclass(type(x), Tensor)]
    parameters = [x for x in tensors if x.is_leaf and x.requires_grad]
    before = [parameter.grad for parameter in parameters]
    try:
        yield
    except BaseException:
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad
        raise


def leave_capture(spare: Tensor) -> None:
    """End the global generator's capture state after a failed capture, by a successful one.

    Its one kernel writes to ``spare``: there may be no memory for more.
    """
    with (
        torch.cuda.device(spare.device),
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=capture_stream()),
    ):
        spare.zero_()
