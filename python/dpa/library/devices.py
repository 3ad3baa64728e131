"""Devices by the names that the command line takes."""

from __future__ import annotations

import torch


def choose_device(name: str) -> torch.device:
    """The device of that name; ``auto`` is CUDA where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {name}")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(f"device must be one of the {count} CUDA devices here, got {name}")
    return device


def device_name(device: torch.device) -> str:
    """Return what a device is called."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"
