"""The small ops beside eager PyTorch, torch.compile and the floor, on the GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import dpa
from dpa.bench.ahead import on_request
from dpa.bench.timing import device_us_alternated, graph_us, host_us_alternated

_Runs = dict[str, Callable[[], object]]
_SIZES = (2**20, 2**26)  # of the element-wise ops
_CELLS = ((16, 32, 128), (256, 256, 1024))  # batch, features and state of lltm


def _relu_add(a: Tensor, b: Tensor) -> Tensor:
    return torch.relu(a) + b


_ELEMENTWISE = {
    "fused_relu_add": (dpa.ops.fused_relu_add, _relu_add),
    "elementwise_mult": (dpa.ops.elementwise_mult, torch.mul),
}
# A kernel for each size, so that the order of compilation does not matter.
_compiled = functools.cache(functools.partial(torch.compile, dynamic=False))


def elementwise(size: int) -> list[dict[str, Any]]:
    """fused_relu_add and elementwise_mult at ``size`` floats, and a copy of as many bytes."""
    # At small sizes the data stays in the L2 cache between calls, for every row and the copy alike.
    x, y = torch.randn(2, size, device="cuda").unbind()
    source = torch.randn(size * 3 // 2, device="cuda")
    target = torch.empty_like(source)
    rows = []
    for name, (ours, plain) in _ELEMENTWISE.items():
        compiled = _compiled(plain)
        runs: _Runs = {
            "copy": lambda: target.copy_(source),
            "eager": lambda plain=plain: plain(x, y),
            "torch.compile": lambda compiled=compiled: compiled(x, y),
            "dpa": lambda ours=ours: ours(x, y),
        }
        runs["torch.compile"]()
        small = size <= 2**20
        graph = graph_us(runs, *((200, 100) if small else (20, 5)))
        host = host_us_alternated(runs) if small else {}
        for how in runs:
            row = {"op": name, "floats": size, "how": how, "graph": graph[how].median}
            row |= {"from": graph[how].low, "to": graph[how].high}
            rows.append(row | {"host": host[how].median if small else None})
    return rows


def _lltm_args(batch: int, features: int, state: int) -> list[Tensor]:
    new = lambda *shape: torch.randn(shape, device="cuda") / state**0.5  # noqa: E731
    args = [new(batch, features), new(3 * state, state + features), new(3 * state)]
    return [*args, new(batch, state), new(batch, state)]


def _train(cell: Callable, args: list[Tensor]) -> Callable[[], object]:
    """Forward and backward as in a training step; gradients are returned, not accumulated."""

    def run() -> tuple[Tensor, ...]:
        h, c = cell(*args)
        return torch.autograd.grad(h.sum() + c.sum(), args)

    return run


def lltm(batch: int, features: int, state: int) -> list[dict[str, Any]]:
    """The cell forward, and forward with backward, each called and in a graph."""
    args = _lltm_args(batch, features, state)
    leaves = [x.clone().requires_grad_() for x in args]
    cells = {
        "eager": dpa.reference.lltm,
        "torch.compile": _compiled(dpa.reference.lltm),
        "dpa": torch.ops.dpa.lltm,
    }

    forwards = {how: lambda cell=cell: cell(*args) for how, cell in cells.items()}
    both = {how: _train(cell, leaves) for how, cell in cells.items()}
    with torch.no_grad():
        columns = {
            "forward, graph": graph_us(forwards, 100, 50),
            "forward, call": device_us_alternated(forwards, 40, inner=20),
            "forward, host": host_us_alternated(forwards),
        }
    columns["both, graph"] = graph_us(both, 40, 20)
    columns["both, call"] = device_us_alternated(both, 40, inner=20)
    sizes = f"lltm {batch} x {features} x {state}"
    return [
        {"op": sizes, "how": how} | {name: times[how].median for name, times in columns.items()}
        for how in cells
    ]


def call_cost() -> list[dict[str, Any]]:
    """Host time of each op, called from Python, beside an aten op of as many tensors."""
    new = lambda *shape: torch.randn(shape, device="cuda")  # noqa: E731
    aten, ours = torch.ops.aten, torch.ops.dpa
    x, y, v = new(16, 8), new(16, 8), new(8)
    index = torch.zeros((), dtype=torch.long, device="cuda")
    signal, kernel = new(2, 8, 16), new(8, 8, 3)
    table, constants, bias = new(4, 6), new(4, 5), new(32)
    gates, cell = (new(16, 32), new(16, 32), new(16, 8)), (x, new(24, 16), new(24), y, y)
    norm = lambda x: aten.native_group_norm.default(x, v, v, 2, 8, 16, 4, 1e-5)  # noqa: E731
    runs = {
        "elementwise_mult": lambda: ours.elementwise_mult(x, y),
        "mul": lambda: aten.mul(x, y),
        "fused_relu_add": lambda: ours.fused_relu_add(x, y, 0.5),
        "add": lambda: aten.add(x, y),
        "lltm": lambda: ours.lltm(*cell),
        "_thnn_fused_lstm_cell": lambda: aten._thnn_fused_lstm_cell(*gates, bias, bias),
        "scheduler_step": lambda: ours.scheduler_step(x, y, table, index, y, 1.0),
        "denoise": lambda: ours.denoise(x, y, constants, index, y),
        "native_batch_norm": lambda: aten.native_batch_norm(x, v, v, v, v, False, 0.1, 1e-5),
        "group_norm_mish": lambda: ours.group_norm_mish(signal, 4, v, v),
        "native_group_norm": lambda: norm(signal),
        "conv1d_gnm": lambda: ours.conv1d_gnm(signal, kernel, v, v, v, 4),
        "convolution, native_group_norm": lambda: norm(
            aten.convolution(signal, kernel, v, [1], [1], [1], False, [0], 1)
        ),
    }
    beside = {
        "elementwise_mult": "mul",
        "fused_relu_add": "add",
        "lltm": "_thnn_fused_lstm_cell",
        "scheduler_step": "native_batch_norm",
        "denoise": "native_batch_norm",
        "group_norm_mish": "native_group_norm",
        "conv1d_gnm": "convolution, native_group_norm",
    }
    with torch.no_grad():
        host = {name: us.median for name, us in host_us_alternated(runs).items()}
    return [
        {"op": op, "host": host[op], "aten": other, "its host": host[other]}
        | {"ratio": host[op] / host[other]}
        for op, other in beside.items()
    ]


def promises(results: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The requirements of the small ops, the figures of this run, and whether they hold."""
    rows = []

    def at_most(what: str, got: float, bound: float) -> None:
        rows.append({"promise": what, "figure": got, "at most": bound, "holds": got <= bound})

    for op in ("fused_relu_add", "elementwise_mult"):
        us = {(r["floats"], r["how"]): r["graph"] for r in results["elementwise"] if r["op"] == op}
        large, small = 2**26, 2**20
        at_most(f"{op}, 2^26: 1.05 of a copy", us[large, "dpa"], 1.05 * us[large, "copy"])
        at_most(f"{op}, 2^20, graph: torch.compile", us[small, "dpa"], us[small, "torch.compile"])
    sizes = dict.fromkeys(row["op"] for row in results["lltm"])
    for size, op in zip(("small", "large"), sizes, strict=True):
        by_how = {row["how"]: row for row in results["lltm"] if row["op"] == op}
        ours, eager, compiled = by_how["dpa"], by_how["eager"], by_how["torch.compile"]
        if size == "small":
            at_most(f"{op}, forward, graph: 5 us", ours["forward, graph"], 5)
            at_most(f"{op}, forward, host: 15 us", ours["forward, host"], 15)
        for column in ours:
            if ", " not in column or column == "forward, host":
                continue
            best = min(eager[column], compiled[column])
            if size == "small" and column.startswith("both"):
                at_most(f"{op}, {column}: a third of eager", ours[column], eager[column] / 3)
            at_most(f"{op}, {column}: the best other", ours[column], best)
    for row in results["host time of a call"]:
        at_most(f"{row['op']}: 1.3 of {row['aten']}", row["host"], 1.3 * row["its host"])
    return rows


def run() -> dict[str, Any]:
    """Every table."""
    results: dict[str, Any] = {
        "elementwise": [row for size in _SIZES for row in elementwise(size)],
        "lltm": [row for sizes in _CELLS for row in lltm(*sizes)],
        "host time of a call": call_cost(),
    }
    return results | {"promises": promises(results)}


def _compile() -> None:
    """Compile first, which takes longer than all measurements."""
    for size in _SIZES:
        for _, plain in _ELEMENTWISE.values():
            _compiled(plain)(*torch.randn(2, size, device="cuda").unbind())
    for sizes in _CELLS:
        args = _lltm_args(*sizes)
        with torch.no_grad():
            _compiled(dpa.reference.lltm)(*args)
        _train(_compiled(dpa.reference.lltm), [x.requires_grad_() for x in args])()
    torch.cuda.synchronize()


if __name__ == "__main__":
    _compile()
    on_request(run)
