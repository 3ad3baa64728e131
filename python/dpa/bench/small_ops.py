"""The small ops beside eager PyTorch, torch.compile and the floor, on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import dpa
from dpa.bench.timing import device_us, graphed, host_us

_COPIES = 20


def _in_graph(run: Callable[[], object]) -> float:
    return device_us(graphed(run, _COPIES)) / _COPIES


def elementwise(size: int) -> list[dict[str, Any]]:
    """fused_relu_add and elementwise_mult at ``size`` floats, and a copy of as many bytes."""
    # At small sizes the data stays in the L2 cache between calls, for every row and the copy alike.
    x, y = torch.randn(2, size, device="cuda").unbind()
    source = torch.randn(size * 3 // 2, device="cuda")
    target = torch.empty_like(source)
    copy = _in_graph(lambda: target.copy_(source))
    rows = []
    for name, ours, plain in [
        ("fused_relu_add", dpa.ops.fused_relu_add, lambda a, b: torch.relu(a) + b),
        ("elementwise_mult", dpa.ops.elementwise_mult, torch.mul),
    ]:
        compiled = torch.compile(plain)
        row = {"op": name, "size": size, "copy of as many bytes": copy}
        for label, f in [("eager", plain), ("torch.compile", compiled), ("dpa", ours)]:
            f(x, y)
            row[f"{label}, graph"] = _in_graph(lambda f=f: f(x, y))
            row[f"{label}, host"] = host_us(lambda f=f: f(x, y)) if size <= 2**20 else None
        rows.append(row)
    return rows


def _train(cell: Callable, args: list[Tensor]) -> Callable[[], object]:
    """Forward and backward as a training step runs them; gradients are returned, not added up."""

    def run() -> tuple[Tensor, ...]:
        h, c = cell(*args)
        return torch.autograd.grad(h.sum() + c.sum(), args)

    return run


def lltm(batch: int, features: int, state: int) -> list[dict[str, Any]]:
    """The cell forward, and forward with backward, each called and in a graph."""
    new = lambda *shape: torch.randn(shape, device="cuda") / state**0.5  # noqa: E731
    args = [new(batch, features), new(3 * state, state + features), new(3 * state)]
    args += [new(batch, state), new(batch, state)]
    leaves = [x.clone().requires_grad_() for x in args]
    compiled = torch.compile(dpa.reference.lltm)
    rows = []
    for label, f in [
        ("eager", dpa.reference.lltm),
        ("torch.compile", compiled),
        ("dpa", torch.ops.dpa.lltm),
    ]:
        with torch.no_grad():
            forward = lambda f=f: f(*args)  # noqa: E731
            row = {"op": f"lltm {batch} x {features} x {state}", "how": label}
            row["forward, call"] = device_us(forward, 100, 10)
            row["forward, host"] = host_us(forward)
            row["forward, graph"] = _in_graph(forward)
        both = _train(f, leaves)
        row["both, call"] = device_us(both, 100, 5)
        row["both, graph"] = _in_graph(both)
        rows.append(row)
    return rows


def call_cost() -> dict[str, float]:
    """Host microseconds of a dpa op beside an aten op of the same arity, from Python."""
    x, y = torch.randn(2, 16, device="cuda").unbind()
    return {
        "aten mul": host_us(lambda: torch.ops.aten.mul.Tensor(x, y)),
        "torch.mul": host_us(lambda: torch.mul(x, y)),
        "dpa elementwise_mult": host_us(lambda: torch.ops.dpa.elementwise_mult(x, y)),
        "dpa elementwise_mult.default": host_us(
            lambda: torch.ops.dpa.elementwise_mult.default(x, y)
        ),
        "aten threshold_backward": host_us(lambda: torch.ops.aten.threshold_backward(x, y, 0.0)),
        "dpa fused_relu_add": host_us(lambda: torch.ops.dpa.fused_relu_add(x, y, 0.5)),
    }


def run() -> dict[str, Any]:
    """Every table."""
    return {
        "elementwise": [row for size in (2**20, 2**26) for row in elementwise(size)],
        "lltm": [row for sizes in ((16, 32, 128), (256, 256, 1024)) for row in lltm(*sizes)],
        "host us a call": call_cost(),
    }
