"""Calls of the op ``image_encoder``, and a mode in which calls that are alike become one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpa.library.capture import another_stream
from dpa.packed.encoder_program import EncoderProgram
from dpa.tracking import OwnMode


@dataclass(frozen=True)
class EncoderCall:
    """One encoder's call: the op's arguments, and the program that makes features of its result."""

    program: EncoderProgram
    images: Tensor
    packed: Tensor
    constants: list[float]
    dtype: torch.dtype
    size: tuple[int, ...] | None
    crop: tuple[int, ...] | None

    def run(self) -> Tensor:
        """Return the encoder's features."""
        (result,) = run_alike([self])
        return self.program.result(result, self.images.dtype)

    @property
    def kind(self) -> Hashable:
        """What calls have in common that may be one."""
        images = self.images
        sizes = images.shape, images.dtype, images.device, self.size, self.crop
        return (*self.program.config,), (*self.constants,), self.dtype, sizes


def run_alike(calls: Sequence[EncoderCall]) -> list[Tensor]:
    """Run calls of one kind by one call of the op; return what the programs make features of."""
    first = calls[0]
    tensors = [call.images for call in calls], [call.packed for call in calls]
    options = first.program.config, first.constants, first.dtype, first.size, first.crop
    return torch.ops.dpa.image_encoder(*tensors, *options)


class JointEncoders(OwnMode):
    """Where it is entered, encoders that are called one after the other may run as one.

    A call is put off: what it returns is written when something reads it that is no view of it,
    when something writes to a tensor that the call reads, or when this is left. All calls that are
    waiting then run, those of one kind together. For captures alone: called kernel by kernel, a
    call that waits would leave the GPU without work.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[tuple[EncoderCall, Tensor]] = []
        self._written: set[int] = set()  # storages that waiting calls write
        self._read: set[int] = set()

    @classmethod
    def entered(cls) -> JointEncoders | None:
        """Return the one that sees the operations of this thread, or None."""
        depth = torch._C._len_torch_dispatch_stack()
        top = torch._C._get_dispatch_stack_at(depth - 1) if depth else None
        return top if isinstance(top, cls) else None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Run what still waits."""
        super().__exit__(kind, error, trace)
        if kind is None:
            self._run()

    def put_off(self, call: EncoderCall, features: Tensor) -> Tensor:
        """Return ``features``, which will hold the call's: empty memory of their shape."""
        self._waiting.append((call, features))
        self._written.add(_storage(features))
        self._read.update((_storage(call.images), _storage(call.packed)))
        return features

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run what waits before an operation that meets it."""
        kwargs = kwargs or {}
        if self._waiting and not func.is_view and self._meets(func, args, kwargs):
            self._run()
        return func(*args, **kwargs)

    def _meets(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> bool:
        leaves = pytree.tree_leaves((args, kwargs))
        touched = {_storage(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
        writes = func._schema.is_mutable and not touched.isdisjoint(self._read)
        return writes or not touched.isdisjoint(self._written)

    def _run(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._written, self._read = set(), set()
        kinds: dict[Hashable, list[tuple[EncoderCall, Tensor]]] = {}
        for one in waiting:
            kinds.setdefault(one[0].kind, []).append(one)
        for alike in kinds.values():
            made = run_alike([call for call, _ in alike])
            branch = None
            if len(made) > 1 and made[0].is_cuda:  # a stream behind what is captured so far
                branch = _stream_beside(made[0].device.index)
                branch.wait_stream(torch.cuda.current_stream())
            for i, ((call, features), result) in enumerate(zip(alike, made, strict=True)):
                with torch.cuda.stream(branch if i % 2 else None):
                    call.program.result(result, call.images.dtype, features)
            if branch is not None:
                torch.cuda.current_stream().wait_stream(branch)


@functools.cache
def _stream_beside(device: int) -> torch.cuda.Stream:
    """Return a device's branch, one for all captures: cuBLAS keeps a workspace a stream."""
    with torch.cuda.device(device):
        return another_stream()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
