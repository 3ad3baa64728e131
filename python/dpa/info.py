"""What is installed, what it was built for, which ops there are, and whether they work."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

import torch

from dpa import _library, reference

_KEYS = ("CPU", "CUDA", "Meta", "Autograd", "AutocastCPU", "AutocastCUDA")


def op_names() -> list[str]:
    """Every op of the library by its qualified name, backward ops included."""
    names = {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    return sorted(name for name in names if name.startswith("dpa::"))


def op_keys(name: str) -> list[str]:
    """The dispatch keys under which ``name`` has a kernel of its own."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return [key for key in _KEYS if has(name, key)]


def _smoke_test(device: torch.device) -> str:
    """One op against its reference on ``device``: 'ok' or what went wrong."""
    x = torch.randn(2, 8, 16, device=device)
    try:
        got = torch.ops.dpa.group_norm_mish(x, 4)
        torch.testing.assert_close(got, reference.group_norm_mish(x, 4), rtol=1e-4, atol=1e-4)
    except Exception as error:  # whatever it is, the caller wants to read it, not to fail
        return f"{type(error).__name__}: {error}"
    return "ok"


def info() -> dict[str, Any]:
    """Versions, device, architectures, ops with their keys, and a smoke test on each device.

    Returns a plain dictionary, fit for JSON.
    """
    path = _library.library_path()
    built_for = path.with_name("built-for.txt")
    cuda = torch.cuda.is_available()
    devices = [torch.device("cpu")] + [torch.device("cuda", i) for i in range(_cuda_count(cuda))]
    return {
        "dpa": metadata.version("dpa"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda if cuda else None,
        "library": str(path),
        "built for": built_for.read_text().strip() if built_for.is_file() else "unknown",
        "devices": {str(d): _device_name(d) for d in devices},
        "ops": {name: op_keys(name) for name in op_names()},
        "smoke test": {str(d): _smoke_test(d) for d in devices},
    }


def _cuda_count(cuda: bool) -> int:
    return torch.cuda.device_count() if cuda else 0


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{platform.machine()}, {torch.get_num_threads()} threads"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
