"""Packages of AOTInductor, made and opened without what takes PyTorch most of the time.

PyTorch asks what vectors the CPU has by compiling and running up to eleven programs, each of which
imports PyTorch: half a minute here, minutes on a large server. A policy on packed weights, or on a
GPU, leaves nothing to the CPU that vectors would speed up.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .policy import LayeredLoop


def compile_package(policy: nn.Module, arguments: tuple[Tensor, ...]) -> bytes:
    """Compile a policy for the machine and device here and return its package."""
    program = torch.export.export(policy, arguments)
    on_cpu = arguments[0].device.type == "cpu"
    buffer = io.BytesIO()
    # There is one file to compile: headers compiled beforehand, and processes to share the
    # kernels among, would take longer than they save.
    options = {"aot_inductor.precompile_headers": False, "compile_threads": 1}
    with _vectors(asked=on_cpu and isinstance(policy, LayeredLoop)):
        torch._inductor.aoti_compile_and_package(
            program, package_path=buffer, inductor_configs=options
        )
    return buffer.getvalue()


def open_package(path: Path) -> Any:
    """Open a package, to be called as the policy was."""
    with _vectors(asked=False):
        return torch._inductor.aoti_load_package(str(path))


@contextmanager
def _vectors(asked: bool) -> Iterator[None]:
    """Let PyTorch ask what vectors the CPU has, or have it take none for granted."""
    from torch._inductor import cpu_vec_isa

    ask = cpu_vec_isa.valid_vec_isa_list
    if not asked:
        cpu_vec_isa.valid_vec_isa_list = list
    try:
        yield
    finally:
        cpu_vec_isa.valid_vec_isa_list = ask
