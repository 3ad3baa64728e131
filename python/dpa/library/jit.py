"""Builds the library at run time, for the GPU at hand, or for the CPU alone.

A process holds one library, and ``import dpa`` loads the installed one. So say beforehand that it
shall not::

    import os
    os.environ["DPA_LIBRARY"] = "jit"
    import dpa
    dpa.jit.load()

or start Python with ``DPA_LIBRARY=jit`` in the environment. It needs a C++ compiler, CMake and
Ninja, and CUDA's compiler for GPU kernels; the first build takes minutes, later ones a second.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch

from dpa.library import building, loader
from dpa.library.files import cache_folder

_built: Path | None = None


def load(
    cuda: str = "auto", archs: str = "auto", folder: str | Path | None = None, verbose: bool = False
) -> Path:
    """Compile the library's sources and register ``torch.ops.dpa.*``.

    Args:
        cuda: "auto" (GPU kernels where there is an nvcc), "on" or "off".
        archs: CUDA architectures such as "90a"; "auto" is the GPU here.
        folder: where to build; by default a folder under ``~/.cache/dpa`` (or ``XDG_CACHE_HOME``)
            for each torch, architecture and set of sources. Processes that share it wait for one
            another.
        verbose: show the compiler's output.

    Returns:
        The library. Called again, it returns the library that it has loaded.

    Raises:
        RuntimeError: another library has registered the ops already, or the build has failed.
        FileNotFoundError: the sources, CMake or Ninja are not here.

    """
    global _built
    if loader.is_loaded():
        if _built:
            return _built
        raise RuntimeError(
            "dpa.jit.load: the ops are registered already, by a library built ahead of time, and a "
            "process takes one library: set DPA_LIBRARY=jit in the environment before `import dpa`"
        )
    source = building.source()
    folder = Path(folder) if folder else _cache(source, cuda, archs)
    definitions = {"DPA_CUDA": cuda, "DPA_CUDA_ARCHS": archs}
    _built = building.build(source, folder, definitions, verbose)
    loader.load(_built)
    return _built


def _cache(source: Path, cuda: str, archs: str) -> Path:
    gpu = torch.cuda.is_available()
    device = "sm{}{}".format(*torch.cuda.get_device_capability()) if gpu else "cpu"
    key = hashlib.sha256(f"{source} {cuda} {archs} {sys.prefix}".encode()).hexdigest()[:12]
    return cache_folder() / f"torch-{torch.__version__}-{device}-{key}"
