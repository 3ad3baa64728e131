"""A wheel's libraries: the kernels once, and beside them the ops for each minor version of torch.

``dpa/lib`` holds ``libdpa_kernels.so`` and a folder such as ``torch2.11-cuda`` or ``torch2.11-cpu``
for each library of ops. A library that was built for one torch lies in ``dpa/lib`` itself, kernels
and all.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
from pathlib import Path

import torch

from dpa.library.files import cache_folder
from dpa.library.machine_code import built_for

NAME = "libdpa.so"
KERNELS = "libdpa_kernels.so"
_FOLDER = re.compile(r"torch(\d+)\.(\d+)-(cpu|cuda)")


class NoOpsForTorch(FileNotFoundError):
    """A wheel has ops for other versions of torch; they can be built for this one."""

    def __init__(self, lib: Path, has: list[str]) -> None:
        super().__init__(
            f"this wheel has ops for torch {', '.join(has)}, and this is torch {torch.__version__}"
        )
        self.lib = lib
        self.has = has


def fitting(lib: Path) -> Path | None:
    """The library for this torch, of a package whose libraries are in the folder ``lib``."""
    names = [f"torch{minor(torch.__version__)}-{kind}" for kind in kinds(lib)]
    paths = [lib / NAME, *(lib / name / NAME for name in names)]
    if (lib / KERNELS).is_file():
        paths.append(built_here(lib))
    # Not Path.is_file, which raises where another user's home may not be searched.
    return next((path for path in paths if os.path.isfile(path)), None)


def built_here(lib: Path) -> Path:
    """Where the ops for this torch lie once they are built on this machine."""
    kernels = (lib / KERNELS).stat()
    key = f"{lib} {kernels.st_size} {kernels.st_mtime_ns}"
    name = f"torch-{torch.__version__}-{kinds(lib)[0]}-ops-"
    return cache_folder() / (name + hashlib.sha256(key.encode()).hexdigest()[:12]) / NAME


def kinds(lib: Path) -> tuple[str, ...]:
    """Which libraries may serve here, the best first: with CUDA where torch has it.

    The kernels hold CUDA's runtime, so torch's may be another; the driver must be new enough for
    the kernels' own.
    """
    cuda = kernels_cuda(lib)
    if torch.version.cuda is None or cuda is None or 0 < driver_cuda() < cuda:
        return ("cpu",)
    return ("cuda", "cpu")


def driver_cuda() -> int:
    """The newest major version of CUDA that the driver here takes; 0 without a driver."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value // 1000


def kernels_cuda(lib: Path) -> int | None:
    """The major version of CUDA that a wheel's kernels are built with; None for the CPU alone."""
    found = re.search(r"CUDA (\d+)", built_for(lib) or "")
    return int(found[1]) if found else None


def torches(lib: Path) -> list[str]:
    """The minor versions of torch that a wheel has ops for, from old to new."""
    found = (_FOLDER.fullmatch(path.parent.name) for path in lib.glob(f"torch*/{NAME}"))
    numbers = {(int(match[1]), int(match[2])) for match in found if match}
    return [f"{major}.{least}" for major, least in sorted(numbers)]


def minor(version: str) -> str:
    """The minor version: 2.11 of 2.11.0+cu130."""
    return ".".join(version.split(".")[:2])
