"""Training steps of whole networks: eager PyTorch, torch.compile and dpa, time and peak memory."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dpa
from dpa.bench.ahead import Process, answers, on_request
from dpa.bench.networks import LOOPS, NET_80M, NET_252M, Network
from dpa.bench.timing import device_us, graphed
from dpa.library.devices import choose_device
from dpa.training import EMA, AdamW, graph_calls

Row = dict[str, Any]

EAGER, COMPILED, DPA = "eager", "torch.compile", "dpa"
CALLS = "dpa.accelerate"  # PyTorch's network accelerated in place: its calls replay graphs
HALVES = "torch.compile, bfloat16 weights"  # forward alone: weights that stay need no autocast
WAYS = (EAGER, COMPILED, HALVES, DPA, CALLS)


def build(network: Network, way: str, device: torch.device) -> nn.Module:
    """The network in float32, on dpa's ops or on PyTorch's; the same weights each time."""
    torch.manual_seed(0)
    unet: nn.Module = network.build(device)
    if way != DPA:
        unet = dpa.reference.plain(unet)
    if way == CALLS:
        dpa.accelerate(unet)
    if way == HALVES:
        unet = unet.bfloat16()
    if way in (COMPILED, HALVES):
        unet.compile(dynamic=False)
    return unet


@dataclass(frozen=True)
class Case:
    """A network at a batch size, trained or run forward alone.

    Under autocast in bfloat16, or in float32 that is multiplied in TF32.
    """

    network: Network
    batch: int
    backward: bool = True
    tf32: bool = False

    @property
    def what(self) -> str:
        """What is run."""
        passes = "forward + backward" if self.backward else "forward"
        return passes + (", float32 (TF32)" if self.tf32 else "")

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.network.name}, {self.batch}, {self.what}"


_SMALL_DP3 = next(each for each in LOOPS if each.name == "Simple DP3's widths")
_LEROBOT = next(each for each in LOOPS if each.name == "LeRobot, T 64")
CASES = (
    Case(NET_80M, 128),
    Case(NET_252M, 96),
    Case(replace(NET_80M, name="80 M, T 32", horizon=32), 64),
    Case(_SMALL_DP3, 128),
    Case(_LEROBOT, 64),
    *(Case(network, 64, tf32=True) for network in (NET_80M, NET_252M, _LEROBOT)),
    Case(NET_80M, 256, tf32=True),
    *(Case(NET_80M, batch, backward=False) for batch in (64, 256, 1024)),
)
SMALL = (Case(Network("0.3 M", (32, 64), 32, 20), 16),)


def measure(case: Case, way: str, repeats: int = 20) -> Row:
    """Microseconds of a case called and in a CUDA graph, and the peak memory in MiB.

    Called means a plain loop that waits for nothing, the mean of five steps in a row. Gradients are
    set to None at the start of each.

    ``step`` is a whole step in a graph: the pass, AdamW and the averages of all parameters, dpa's
    in one op, the others' by PyTorch's fused and foreach kernels.

    The peak is that of six whole steps with fused AdamW, called and, ``replayed``, with the pass in
    a graph, captures among them. It counts requested bytes. The allocator's blocks are up to 1 MiB
    larger, depending on what was freed before; their sum is ``allocated MiB``, called.
    """
    with _tried(case, way) as (model, work):
        row = _measured(case, way, model, work, repeats)
    del model, work
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return row


@contextlib.contextmanager
def _tried(case: Case, way: str) -> Iterator[tuple[nn.Module, Callable[[], None]]]:
    """The model and what is timed, after its first call."""
    with _allow_tf32(case.tf32):
        model = build(case.network, way, choose_device("auto"))
        work = _work(case, way, model)
        work()
        yield model, work


def _measured(
    case: Case, way: str, model: nn.Module, work: Callable[[], None], repeats: int = 20
) -> Row:
    row: Row = {"network": case.network.name, "batch": case.batch}
    row |= {"what": case.what, "how": way}
    row["called"] = device_us(work, max(repeats // 2, 3), inner=5)
    row |= dict.fromkeys(("graph", "step", "peak MiB", "allocated MiB", "replayed MiB"))
    if not next(model.parameters()).is_cuda:
        return row
    model.zero_grad(set_to_none=True)
    if way == CALLS:  # replay in any case
        graph_calls(model)  # captured anew, so that the captures count
        row["peak MiB"], row["allocated MiB"] = _peak_of_steps(work, model)
        row["replayed MiB"] = row["peak MiB"]
    elif case.backward:
        row["graph"] = device_us(graphed(work, 1), repeats)
        model.zero_grad(set_to_none=True)
        # In an expression, so that the optimizer's memory is free again below.
        row["step"] = device_us(graphed(whole_step(work, model, way), 1), repeats)
        row["peak MiB"], row["allocated MiB"] = _peak_of_steps(work, model)
        row["replayed MiB"], _ = _peak_of_steps(work, model, replayed=True)
    else:
        with dpa.fixed_weights():  # nothing changes weights between two replays
            row["graph"] = device_us(graphed(work, 1), repeats)
    return row


def _work(case: Case, way: str, model: nn.Module) -> Callable[[], None]:
    """What is timed: forward, and backward where the case has it."""
    device = next(model.parameters()).device
    actions, timestep, cond, noise = case.network.batch(case.batch, device)
    if way == HALVES:
        actions, cond = actions.bfloat16(), cond.bfloat16()
    enabled = not case.tf32 and way != HALVES

    def predict() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=enabled):
            return model(actions, timestep, None, cond)

    def forward() -> None:
        with torch.no_grad():
            predict()

    def both() -> None:
        model.zero_grad(set_to_none=True)
        F.mse_loss(predict().float(), noise).backward()

    return both if case.backward else forward


def whole_step(work: Callable[[], None], model: nn.Module, way: str) -> Callable[[], None]:
    """The pass, then AdamW and the moving averages."""
    ema, options = EMA(model), {"lr": 1e-4, "betas": (0.95, 0.999), "weight_decay": 1e-6}
    if way == DPA:
        optimizer: torch.optim.Optimizer = AdamW(model.parameters(), **options, ema=ema)
    else:
        capturable = next(model.parameters()).is_cuda
        optimizer = torch.optim.AdamW(
            model.parameters(), **options, fused=True, capturable=capturable
        )
    parameters = [parameter.detach() for parameter in model.parameters()]

    def step() -> None:
        work()
        optimizer.step()
        if way != DPA:  # a graph holds one decay
            torch._foreach_lerp_(ema.averages, parameters, 1e-4)

    return step


def _peak_of_steps(
    work: Callable[[], None], model: nn.Module, replayed: bool = False
) -> tuple[float, float]:
    """Peak MiB of a step: weights, gradients, AdamW's moments, and the pass.

    Requested bytes, and those of the blocks that hold them, after the caches are emptied. Both
    count until every stream is done with a block; what PyTorch calls allocated counts until the
    host frees it, which may be less.
    """
    model.zero_grad(set_to_none=True)
    # cuBLAS keeps a workspace of 32 MiB for every stream that used it, captures included.
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()
    torch.cuda.empty_cache()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    torch.cuda.reset_peak_memory_stats()
    for i in range(6):
        if replayed and i == 3:
            work = graphed(work, 1)
        work()
        optimizer.step()
    peaks = torch.cuda.memory_stats()
    requested, blocks = (peaks[f"{what}_bytes.all.peak"] for what in ("requested", "active"))
    return requested / 2**20, blocks / 2**20


@contextlib.contextmanager
def _allow_tf32(allow: bool) -> Iterator[None]:
    """Whether GEMMs and convolutions of float32 are multiplied in TF32."""
    backends = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [backend.allow_tf32 for backend in backends]
    for backend in backends:
        backend.allow_tf32 = allow
    try:
        yield
    finally:
        for backend, value in zip(backends, before, strict=True):
            backend.allow_tf32 = value


def measure_compiled() -> list[Row]:
    """Rows of torch.compile, each from a process of its own; they compile at once."""
    runs = [(case, COMPILED) for case in CASES]
    runs += [(case, HALVES) for case in CASES if not case.backward]
    return answers([Process(__name__, case.name, way) for case, way in runs])


def _measure_compiled(name: str, way: str) -> None:
    """Compile, and measure on request."""
    case = next(case for case in CASES if case.name == name)
    with _tried(case, way) as (model, work):
        torch.cuda.synchronize()
        on_request(lambda: _measured(case, way, model, work))


if __name__ == "__main__":
    _measure_compiled(*sys.argv[1:])
