"""Packages of AOTInductor, made and opened without what takes PyTorch most of the time.

PyTorch asks what vectors the CPU has by compiling and running up to eleven programs, each of which
imports PyTorch: half a minute here, minutes on a large server. A policy on packed weights, or on a
GPU, leaves nothing to the CPU that vectors would speed up.
"""

from __future__ import annotations

import io
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpa.export.policy import LayeredLoop


def compile_package(policy: nn.Module, arguments: tuple[Tensor, ...]) -> bytes:
    """Compile a policy for the machine and device here and return its package."""
    program = torch.export.export(policy, arguments)
    on_cpu = arguments[0].device.type == "cpu"
    buffer = io.BytesIO()
    # There is one file to compile: headers compiled beforehand, and processes to share the
    # kernels among, would take longer than they save.
    options = {
        "aot_inductor.precompile_headers": False,
        "aot_inductor.custom_op_libs": _shared_libraries(),
        "compile_threads": 1,
    }
    with _vectors(asked=on_cpu and isinstance(policy, LayeredLoop)):
        torch._inductor.aoti_compile_and_package(
            program, package_path=buffer, inductor_configs=options
        )
    return buffer.getvalue()


def open_package(path: Path) -> Any:
    """Open a package, to be called as the policy was."""
    with _vectors(asked=False):
        return torch._inductor.aoti_load_package(str(path))


def _shared_libraries() -> list[str]:
    """C++'s library as PyTorch has it: a compiler's static one beside it cannot parse locales.

    A package that brings a copy along, as those of a gcc built without shared libraries do, ends
    the process that opens it.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler

    name = "libstdc++.so.6"
    command = [get_cpp_compiler(), f"-print-file-name={name}"]
    found = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return [f":{name}"] if Path(found).is_absolute() else []


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
