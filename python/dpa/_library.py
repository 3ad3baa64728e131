"""Finds the shared library and loads it once."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import torch


def library_path() -> Path:
    """The shared library that registers ``torch.ops.dpa.*``, for ``torch.ops.load_library``.

    ``DPA_LIBRARY`` in the environment names another one, such as a build that is not installed.

    Raises:
        FileNotFoundError: there is no library, because the package was not built.

    """
    chosen = os.environ.get("DPA_LIBRARY")
    # An editable install leaves the sources here and puts the library where packages are installed.
    folders = [Path(__file__).parent, Path(sysconfig.get_path("platlib")) / "dpa"]
    paths = [Path(chosen)] if chosen else [folder / "lib" / "libdpa.so" for folder in folders]
    for path in paths:
        if path.is_file():
            return path
    origin = "DPA_LIBRARY names" if chosen else "dpa expects its library at"
    raise FileNotFoundError(f"{origin} {paths[0]}, which does not exist: run `make build`")


def is_loaded() -> bool:
    """Whether ``torch.ops.dpa.*`` is registered."""
    return torch._C._dispatch_has_kernel("dpa::denoise")


def load() -> None:
    """Load the library unless its ops are registered already.

    Two libraries that both define the ops would abort the process, so whoever came first stays.
    """
    if not is_loaded():
        torch.ops.load_library(str(library_path()))
