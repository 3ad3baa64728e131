"""The first use of kernels on a GPU that the library has no machine code for."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dpa.library.loader import library_path
from dpa.library.machine_code import built_for, code_of, runs

_SOON = 1.0  # seconds: kernels that the driver has kept are there by then
_said = threading.Event()


@contextmanager
def saying_what_takes_long(device: torch.device) -> Iterator[None]:
    """Say on stderr, once a process, that the driver compiles kernels, if it takes a while here."""
    if device.type != "cuda" or _said.is_set() or _has_code(device.index or 0):
        yield
        return
    timer = threading.Timer(_SOON, _say, [device])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@functools.cache
def _has_code(device: int) -> bool:
    archs, _ = code_of(built_for(library_path().parent) or "")  # built otherwise: nobody knows
    return not archs or runs(archs, torch.cuda.get_device_capability(device))


def _say(device: torch.device) -> None:
    if _said.is_set():
        return
    _said.set()
    where = os.environ.get("CUDA_CACHE_PATH", "~/.nv/ComputeCache")
    print(
        f"dpa: this build has no machine code for {torch.cuda.get_device_name(device)}"
        f", so its driver compiles the kernels of the first call and keeps them in {where}",
        file=sys.stderr,
        flush=True,
    )
