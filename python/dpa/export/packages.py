"""AOTInductor packages, compiled and opened without probing the CPU's vector instructions.

PyTorch probes them by compiling and running up to eleven programs, each of which imports PyTorch:
half a minute on two cores, minutes on a large server. A policy on packed weights, or on a GPU,
leaves no CPU code that vector instructions would speed up.
"""

from __future__ import annotations

import io
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpa.export.policy import LayeredLoop
from dpa.library.checks import require
from dpa.library.holding import holding


def compile_package(policy: nn.Module, arguments: tuple[Tensor, ...]) -> bytes:
    """Compile a policy for the machine and device here and return its package."""
    program = torch.export.export(policy, arguments)
    on_cpu = arguments[0].device.type == "cpu"
    # There is one file to compile: precompiled headers and parallel compile processes would take
    # longer than they save.
    options = {
        "aot_inductor.precompile_headers": False,
        "aot_inductor.custom_op_libs": _shared_libraries(),
        "compile_threads": 1,
    }
    with _vector_probe(enabled=on_cpu and isinstance(policy, LayeredLoop)):
        try:
            return _compiled(program, options)
        except RuntimeError as error:
            # PyTorch 2.11 names the arrays of sizes by the addresses of objects that are gone: now
            # and then an address comes again, and the code uses an array that it does not declare.
            if "int_array_" not in str(error):
                raise
            return _compiled(program, options)


def _compiled(program: torch.export.ExportedProgram, options: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch._inductor.aoti_compile_and_package(program, package_path=buffer, inductor_configs=options)
    return buffer.getvalue()


def open_package(path: Path) -> Any:
    """Open a package, to be called as the policy was."""
    with _vector_probe(enabled=False):
        return torch._inductor.aoti_load_package(str(path))


@dataclass(frozen=True)
class Input:
    """An input of a policy, as its manifest describes it.

    Attributes:
        name: the argument's.
        shape: the one that the policy was compiled for.
        dtype: likewise.

    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(entry: Mapping[str, Any]) -> Input:
        """Read an entry of a manifest's ``inputs``."""
        dtype = getattr(torch, entry["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise TypeError(entry["dtype"])
        return Input(entry["name"], tuple(entry["shape"]), dtype)

    def checked(self, given: Any, device: str) -> Tensor:
        """Return a tensor that fits, contiguous; a package reads any other as if it did.

        Raises:
            ValueError: it does not fit.

        """
        kind = type(given).__name__
        require(isinstance(given, Tensor), self.name, "be a tensor", kind)
        rule = f"be {self.dtype}, {list(self.shape)}"
        require(given.dtype == self.dtype, self.name, rule, given.dtype)
        require(given.shape == self.shape, self.name, rule, list(given.shape))
        require(given.device.type == device, self.name, f"be on {device}", given.device)
        return given.contiguous()


def checking(
    package: Callable[..., Any], inputs: Sequence[Input], device: str
) -> Callable[..., Any]:
    """Return a package that takes these inputs alone, as it checks nothing itself."""
    names = ", ".join(one.name for one in inputs)

    def call(*given: Any) -> Any:
        require(len(given) == len(inputs), "inputs", f"be {names}", f"{len(given)} of them")
        pairs = zip(inputs, given, strict=True)
        return package(*(one.checked(value, device) for one, value in pairs))

    return call


def _shared_libraries() -> list[str]:
    """The shared C++ library that PyTorch links, where the compiler has it.

    A gcc built without shared libraries links a static copy into the package. Two copies in one
    process cannot parse locales, and opening the package ends the process.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler

    name = "libstdc++.so.6"
    command = [get_cpp_compiler(), f"-print-file-name={name}"]
    found = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return [f":{name}"] if Path(found).is_absolute() else []


def _vector_probe(enabled: bool) -> AbstractContextManager[None]:
    """Let PyTorch probe the CPU's vector instructions, or make it assume none."""
    from torch._inductor import cpu_vec_isa

    return nullcontext() if enabled else holding(cpu_vec_isa, valid_vec_isa_list=list)
