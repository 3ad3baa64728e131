"""Devices by the names that the command line takes."""

from __future__ import annotations

import torch

from dpa.library.checks import require


def choose_device(name: str) -> torch.device:
    """The device of that name; ``auto`` is CUDA where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    right = device is not None and device.type in ("cpu", "cuda")
    require(right, "device", "be auto, cpu, cuda or cuda:N", name)
    count = torch.cuda.device_count()
    here = device.type != "cuda" or (device.index or 0) < count
    require(here, "device", f"be one of the {count} CUDA devices here", name)
    return device


def device_name(device: torch.device) -> str:
    """Return what a device is called."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"
