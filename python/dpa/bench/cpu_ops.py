"""Every op on the CPU, forward and as a training step, beside the equivalent PyTorch ops."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpa.bench.timing import in_turns, wall_us

Function = Callable[..., Any]


@dataclass
class Case:
    """An op at a size: both ways to compute it, and what their gradients are taken for."""

    op: str
    size: str
    ours: Function
    plain: Function
    tensors: list[Tensor]


def _lltm(x: Tensor, weights: Tensor, bias: Tensor, h: Tensor, cell: Tensor) -> tuple[Tensor, ...]:
    gates = F.linear(torch.cat([h, x], 1), weights, bias)
    into, out, candidate = gates.chunk(3, 1)
    cell = cell + F.elu(candidate) * torch.sigmoid(into)
    return torch.tanh(cell) * torch.sigmoid(out), cell


def _denoise(output: Tensor, sample: Tensor, table: Tensor, t: Tensor, noise: Tensor) -> Tensor:
    c = table[t]
    x0 = ((sample - c[0] * output) / c[1]).clamp(-1, 1)
    return c[3] * x0 + c[2] * sample + c[4] * noise


def _scheduler_step(
    output: Tensor, sample: Tensor, table: Tensor, i: Tensor, noise: Tensor
) -> Tensor:
    r = table[i]
    x0 = (r[0] * sample + r[1] * output).clamp(-1, 1)
    return r[2] * x0 + r[3] * sample + r[4] * output + r[5] * noise


def group_norm_mish(
    x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, shift: Tensor
) -> Tensor:
    """The composition of PyTorch's ops, of 8 groups."""
    return F.mish(F.group_norm(x, 8, weight, bias)) * scale[..., None] + shift[..., None]


def _conv1d_gnm(x: Tensor, conv: Tensor, conv_bias: Tensor, *norm: Tensor) -> Tensor:
    return group_norm_mish(F.conv1d(x, conv, conv_bias, padding=2), *norm)


def cases(dtype: torch.dtype) -> Iterator[Case]:
    """Every op, small and large."""
    ops = torch.ops.dpa
    step = torch.tensor([7])

    def new(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    for n in (1024, 2**22):
        pair = [new(n), new(n)]
        yield Case("elementwise_mult", f"{n}", ops.elementwise_mult.default, torch.mul, pair)
        plain = lambda x, y: torch.relu(x) + y  # noqa: E731
        yield Case("fused_relu_add", f"{n}", ops.fused_relu_add.default, plain, pair)
    for batch, features, state in ((16, 32, 128), (256, 256, 1024)):
        weights = new(3 * state, state + features) / state**0.5
        given = [
            new(batch, features),
            weights,
            new(3 * state),
            new(batch, state),
            new(batch, state),
        ]
        yield Case("lltm", f"{batch} x {features} x {state}", ops.lltm, _lltm, given)
    for shape in ((1, 16, 2), (256, 16, 128)):
        size = " x ".join(map(str, shape))
        table = (torch.rand(100, 6) + 0.1).to(dtype)
        rows = table[:, :5].contiguous()
        output, sample, noise = new(*shape), new(*shape), new(*shape)
        yield Case(
            "denoise",
            size,
            lambda m, s, z, rows=rows: ops.denoise(m, s, rows, step, z),
            lambda m, s, z, rows=rows: _denoise(m, s, rows, step[0], z),
            [output, sample, noise],
        )
        yield Case(
            "scheduler_step",
            size,
            lambda m, s, z, table=table: ops.scheduler_step(m, s, table, step, z, 1.0),
            lambda m, s, z, table=table: _scheduler_step(m, s, table, step[0], z),
            [output, sample, noise],
        )
    for batch, channels, times in ((1, 256, 16), (64, 1024, 4), (256, 256, 16)):
        size = f"{batch} x {channels} x {times}"
        norm = [new(channels), new(channels), new(batch, channels), new(batch, channels)]
        yield Case(
            "group_norm_mish",
            size,
            lambda x, w, b, g, h: ops.group_norm_mish(x, 8, w, b, 1e-5, g, h),
            group_norm_mish,
            [new(batch, channels, times), *norm],
        )
    for batch, channels, times in ((1, 64, 16), (64, 256, 16)):
        norm = [new(channels), new(channels), new(batch, channels), new(batch, channels)]
        conv = [new(channels, channels, 5) / channels**0.5, new(channels)]
        yield Case(
            "conv1d_gnm",
            f"{batch} x {channels} x {times}, k 5",
            lambda x, c, cb, w, b, g, h: ops.conv1d_gnm(x, c, cb, w, b, 8, 1e-5, g, h),
            _conv1d_gnm,
            [new(batch, channels, times), *conv, *norm],
        )


def _training(function: Function, tensors: list[Tensor]) -> Function:
    leaves = [t.clone().requires_grad_() for t in tensors]
    with torch.no_grad():
        outputs = function(*tensors)
    many = isinstance(outputs, tuple)
    grads = [torch.randn_like(o) for o in (outputs if many else (outputs,))]

    def run() -> None:
        result = function(*leaves)
        torch.autograd.grad(result if many else [result], leaves, grads)

    return run


def _pair_us(one: Function, other: Function, rounds: int) -> tuple[float, float]:
    """Median microseconds of each, in turns, at least 0.2 ms at a time."""
    counted = {}
    for name, run in enumerate((one, other)):
        run()
        counted[name] = run, max(1, int(200 / wall_us(run)))
    times = in_turns(counted, range(rounds + 2), lambda pair: wall_us(*pair), warm_up=2)
    return statistics.median(times[0]), statistics.median(times[1])


def rows(
    rounds: int = 25, dtypes: tuple[torch.dtype, ...] = (torch.float32,)
) -> list[dict[str, Any]]:
    """A row an op, size and pass: microseconds of PyTorch's ops and of ours."""
    found = []
    for dtype in dtypes:
        for case in cases(dtype):
            forward = [lambda f=f, c=case: f(*c.tensors) for f in (case.plain, case.ours)]
            with torch.no_grad():
                times = {"forward": _pair_us(*forward, rounds)}
            both = [_training(f, case.tensors) for f in (case.plain, case.ours)]
            times["forward + backward"] = _pair_us(*both, rounds)
            for what, (plain, ours) in times.items():
                row = {
                    "op": case.op,
                    "size": case.size,
                    "type": str(dtype).split(".")[1],
                    "pass": what,
                }
                found.append(row | {"PyTorch us": plain, "dpa us": ours, "ratio": plain / ours})
    return found
