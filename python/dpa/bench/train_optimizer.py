"""AdamW and the averages of a network's parameters, against the bytes that they move."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpa.bench.networks import NET_80M
from dpa.bench.timing import graph_us
from dpa.bench.train import DPA, EAGER, build, whole_step


def run() -> list[dict[str, Any]]:
    """Microseconds in a CUDA graph, of PyTorch's fused AdamW with a foreach EMA and of dpa's.

    The floor is every byte once, at the rate of a copy or of scaling in place, the faster one:
    parameter, gradient, two moments and average are read, all but the gradient are written.
    """
    device = torch.device("cuda")
    runs, parameters = {}, []
    for way in (EAGER, DPA):
        model = build(NET_80M, way, device)
        parameters = list(model.parameters())
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        runs[way] = whole_step(lambda: None, model, way)
    count = sum(parameter.numel() for parameter in parameters)
    us = {name: t.median for name, t in graph_us(runs, 20).items()}
    floor = 9 * 4 * count / _read_write_bytes_a_us(device)
    row = {"what": f"AdamW and EMA of {count / 1e6:.1f} M parameters", "floor": floor}
    return [row | {"PyTorch, fused and foreach": us[EAGER], "dpa": us[DPA]}]


def _read_write_bytes_a_us(device: torch.device) -> float:
    """Bytes read and written in a microsecond by a copy or by scaling in place, the faster."""
    x: Tensor = torch.zeros(2**28, device=device)
    to = torch.empty_like(x)
    ways = {"copy": lambda: to.copy_(x), "in place": lambda: to.mul_(1.5)}
    fastest = min(t.median for t in graph_us(ways, 20).values())
    return 2 * x.nbytes / fastest
