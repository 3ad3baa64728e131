"""What is installed, what it was built for, which ops there are, and whether they work."""

from __future__ import annotations

import platform
from typing import Any

import torch

from dpa.diagnostics.doctor import advice, examine
from dpa.diagnostics.host import Host, look
from dpa.library import html

_KEYS = ("CPU", "CUDA", "Meta", "Autograd", "AutocastCPU", "AutocastCUDA")


def op_names() -> list[str]:
    """Every op of the library by its qualified name, backward ops included."""
    names = {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    return sorted(name for name in names if name.startswith("dpa::"))


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

    ``advice`` has one line for each problem found, with what mends it.
    """
    return info_of(look())


def info_of(host: Host) -> Info:
    """The same of a machine that was looked at."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    devices = {"cpu": f"{platform.machine()}, {torch.get_num_threads()} threads"}
    for number, (name, (major, minor)) in enumerate(host.gpus):
        devices[f"cuda:{number}"] = f"{name}, compute capability {major}.{minor}"
    return Info(
        {
            "dpa": host.dpa or "not installed: imported from a folder of sources",
            "torch": host.torch,
            "python": host.python,
            "cuda": host.torch_cuda if host.gpus else None,
            "library": host.library,
            "built for": host.built_for or "unknown",
            "devices": devices,
            "ops": {name: [key for key in _KEYS if has(name, key)] for name in op_names()},
            "smoke test": host.smoke,
            "advice": advice(examine(host)),
        }
    )
