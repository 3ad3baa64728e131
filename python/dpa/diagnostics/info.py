"""What is installed, what it was built for, which ops there are, and whether they work."""

from __future__ import annotations

import platform
import re
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import torch

from dpa import reference
from dpa.library import html, loader

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
    except Exception as error:  # any failure is reported, not raised
        return f"{type(error).__name__}: {error}"
    return "ok"


class Info(dict[str, Any]):
    """What :func:`info` found: a dictionary fit for JSON, and a table in a notebook."""

    def _repr_html_(self) -> str:
        rows = [(name, value) for name, value in self.items() if isinstance(value, str)]
        for device, name in self["devices"].items():
            result = self["smoke test"][device]
            rows.append((device, f"{name}: {'works' if result == 'ok' else result}"))
        rows += [("to do", line) for line in self["advice"]]
        ops = [(name, " ".join(keys)) for name, keys in self["ops"].items()]
        return html.table(rows) + html.table(ops, ("op", "kernels"))


def info() -> Info:
    """Versions, device, architectures, ops with their keys, and a smoke test on each device.

    ``advice`` has one line for each problem found.
    """
    path = loader.library_path()
    built_for = path.with_name("built-for.txt")
    cuda = torch.cuda.is_available()
    devices = [torch.device("cpu")] + [torch.device("cuda", i) for i in range(_cuda_count(cuda))]
    found = Info(
        {
            "dpa": _version(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cuda": torch.version.cuda if cuda else None,
            "library": str(path),
            "built for": built_for.read_text().strip() if built_for.is_file() else "unknown",
            "devices": {str(d): _device_name(d) for d in devices},
            "ops": {name: op_keys(name) for name in op_names()},
            "smoke test": {str(d): _smoke_test(d) for d in devices},
        }
    )
    capabilities = {str(d): torch.cuda.get_device_capability(d) for d in devices[1:]}
    found["advice"] = advice(found, capabilities, find_spec("diffusers") is not None)
    return found


def advice(
    found: dict[str, Any], capabilities: dict[str, tuple[int, int]], has_diffusers: bool
) -> list[str]:
    """Advise on each problem in ``found``, one line each.

    Args:
        found: what :func:`info` found.
        capabilities: compute capability of each GPU, by device.
        has_diffusers: whether diffusers is installed.

    """
    lines = []
    built_for = found["built for"]
    gpu_kernels = built_for.startswith("the CPU and CUDA")
    if capabilities and not gpu_kernels:
        lines.append("the library has no GPU kernels: rebuild with CUDA=on (make build CUDA=on)")
    elif capabilities:
        archs = re.findall(r"\d+", built_for.partition("architectures")[2])
        for device, (major, minor) in capabilities.items():
            if archs and f"{major}{minor}" not in archs and len(archs) == 1:
                name = f"{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")
                lines.append(
                    f"{device} is not what the library is built for: rebuild with CUDA_ARCHS={name}"
                )
            if major < 8:
                lines.append(f"{device} is older than 8.0: networks run layer by layer, not packed")
    elif found["torch"].endswith("+cpu") and gpu_kernels:
        lines.append("this torch is a CPU build: install torch with CUDA to use the GPU kernels")
    elif gpu_kernels:
        lines.append(
            "PyTorch finds no GPU: if there is one, check nvidia-smi; the CPU works without"
        )
    if not has_diffusers:
        lines.append("diffusers is missing, which schedulers come from: pip install diffusers")
    for device, result in found["smoke test"].items():
        if result != "ok":
            lines.append(
                f"the smoke test failed on {device}: run `make test`, or reinstall ({result})"
            )
    return lines


def _version() -> str:
    try:
        return metadata.version("dpa")
    except metadata.PackageNotFoundError:
        return "not installed: imported from a folder of sources"


def _cuda_count(cuda: bool) -> int:
    return torch.cuda.device_count() if cuda else 0


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{platform.machine()}, {torch.get_num_threads()} threads"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
