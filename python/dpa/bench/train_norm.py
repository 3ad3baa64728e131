"""GroupNorm + Mish + FiLM, forward and backward, as a training step runs them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import dpa
from dpa.bench.cpu_ops import group_norm_mish
from dpa.bench.timing import graph_us

SIZES = ((1024, 512, 16), (4096, 512, 16))


def _ours(x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return dpa.ops.group_norm_mish(x, 8, weight, bias, 1e-5, scale, shift)


def run() -> list[dict[str, Any]]:
    """A row for each size: microseconds in a CUDA graph, bfloat16, all gradients.

    torch.compile has its choice of the order in memory, (B, C, T) or (B, T, C): the faster counts.
    The floor is one read and one write of each tensor at the rate of a copy of the largest.
    """
    compiled = torch.compile(group_norm_mish, dynamic=False)
    rows, rate = [], _copy_us_an_element()
    for batch, channels, length in SIZES:
        new = lambda *size: torch.randn(size, device="cuda", dtype=torch.bfloat16)  # noqa: E731
        x, grad = new(2, batch, channels, length)
        last = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (x, grad)]
        weight, bias = torch.randn(2, channels, device="cuda", dtype=torch.bfloat16)
        scale, shift = new(batch, 2 * channels).chunk(2, dim=1)
        ways = {"torch.compile (B, C, T)": (compiled, x, grad)}
        ways |= {"torch.compile (B, T, C)": (compiled, *last), "dpa": (_ours, *last)}
        runs = {}
        for how, (op, given, grad_out) in ways.items():
            leaves = [t.detach().requires_grad_() for t in (given, weight, bias, scale, shift)]
            runs[how] = lambda op=op, leaves=leaves, grad_out=grad_out: torch.autograd.grad(
                op(*leaves), leaves, grad_out
            )
        us = {how: t.median for how, t in graph_us(runs, 20, copies=10).items()}
        floor = 5 * x.numel() * rate  # x twice and the gradient read, two results written
        rows.append({"B, C, T": f"{batch}, {channels}, {length}"} | us | {"floor": floor})
    return rows


def _copy_us_an_element() -> float:
    """Half of what copying a tensor of the largest size takes."""
    x = torch.randn(max(SIZES), device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(x)
    us = graph_us({"copy": lambda: target.copy_(x)}, 20, copies=10)["copy"]
    return us.median / (2 * x.numel())
