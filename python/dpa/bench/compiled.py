"""The U-Net and the loop in PyTorch: eager, and under torch.compile."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import dpa
from dpa.bench.ahead import Process, on_request
from dpa.bench.networks import ACTION_DIM, COND_DIM, HORIZON, SIZES
from dpa.bench.timing import device_spread_us, graphed, latency
from dpa.sampling import stepwise_loop as stepwise

BATCHES = (1, 16)  # at which they are measured
COUNTS = {"DDIM": 10, "DDPM": 100}  # steps of the loops
_DEFAULT, _REDUCED, _TUNED = "default", "reduce-overhead", "max-autotune-no-cudagraphs"
Row = dict[str, Any]
Call = Callable[[], Tensor]


class Ahead:
    """Compiled networks, each in a process of its own, which compile at once and measure in turn.

    Compiled one after the other they take minutes. A process waits, idle, until its turn.

    Args:
        network: the name of one of :data:`dpa.bench.networks.SIZES`.
        autotune: compile with max-autotune too, in bfloat16: a minute alone. In float32 it gains
            nothing.

    """

    def __init__(self, network: str, autotune: bool):
        kinds = [(_REDUCED, "bfloat16", b) for b in BATCHES]
        kinds += [(_DEFAULT, "float32", 1)]
        kinds += [(_TUNED, "bfloat16", 1)] if autotune else []
        self._running = [Process(__name__, network, *map(str, kind)) for kind in kinds]

    def wait(self) -> None:
        """Wait until all have compiled; measurements come after that."""
        for process in self._running:
            process.wait()

    def rows(self) -> list[tuple[str, Row]]:
        """Measure, after :meth:`wait`: rows of the tables "steps" and "loops"."""
        return [(table, row) for process in self._running for table, row in process.answer()]


def eager(unet: nn.Module, dtype: torch.dtype, batch: int) -> list[tuple[str, Row]]:
    """Measure the plain eager network: rows of "steps" and, for one sample, of "loops"."""
    with _plain(unet, dtype) as plain:
        loops = {"eager, step by step": lambda loop: loop} if batch == 1 else {}
        return _rows(plain, dtype, batch, "eager, graph", lambda call: graphed(call, 1), loops, 3)


@contextmanager
def _plain(unet: nn.Module, dtype: torch.dtype) -> Iterator[nn.Module]:
    """The network of PyTorch's own layers; in float32 without TF32.

    TF32's errors are a hundred times dpa's.
    """
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield dpa.reference.plain(unet).to(dtype)


def _rows(
    network: Callable[..., Tensor],
    dtype: torch.dtype,
    batch: int,
    how: str,
    run: Callable[[Call], Callable[[], object]],
    loops: dict[str, Callable[[Call], Callable[[], object]]],
    repeats: int,
) -> list[tuple[str, Row]]:
    """A step and the loops, as what ``run`` and ``loops`` make of their calls; rows of tables."""
    about = {"batch": batch, "weights": str(dtype).removeprefix("torch.")}
    us, p99 = device_spread_us(run(_step(network, dtype, batch)))
    rows: list[tuple[str, Row]] = [("steps", about | {"how": how, "us": us, "p99 us": p99})]
    for scheduler, count in COUNTS.items():
        for name, make in loops.items():
            us, p99 = latency(make(_loop(network, dtype, batch, scheduler)), repeats)
            label = {"loop": f"{scheduler}, {count} steps", "how": name}
            rows.append(("loops", about | label | {"us": us, "p99 us": p99}))
    return rows


def scheduler_of(name: str) -> Any:
    """DDIM or DDPM of diffusers, as policies are trained with."""
    import diffusers

    cls = getattr(diffusers, f"{name}Scheduler")
    return cls(num_train_timesteps=100, beta_schedule="squaredcos_cap_v2")


def _conditioning(dtype: torch.dtype, batch: int, scheduler: str) -> tuple[Any, Tensor]:
    """The step table of a loop, and a random ``global_cond``."""
    table = dpa.schedulers.from_diffusers(scheduler_of(scheduler), COUNTS[scheduler])
    return table.to("cuda", torch.float32), torch.randn(batch, COND_DIM, device="cuda", dtype=dtype)


def _step(network: Callable[..., Tensor], dtype: torch.dtype, batch: int) -> Call:
    """One forward pass, called as the loop calls it, so that it is compiled once."""
    table, cond = _conditioning(dtype, batch, "DDPM")
    sample = torch.randn(batch, HORIZON, ACTION_DIM, device="cuda").to(dtype)
    timestep = table.timesteps[:, None].expand(-1, batch)[5]
    return lambda: network(sample, timestep, global_cond=cond)


def _loop(network: Callable[..., Tensor], dtype: torch.dtype, batch: int, scheduler: str) -> Call:
    """The loop of the network's forward passes and ``dpa::scheduler_step``, in float32."""
    table, cond = _conditioning(dtype, batch, scheduler)
    timesteps = table.timesteps[:, None].expand(-1, batch)
    draw = lambda _: torch.randn(batch, HORIZON, ACTION_DIM, device="cuda")  # noqa: E731

    def predict(sample: Tensor, step: int) -> Tensor:
        return network(sample.to(dtype), timesteps[step], global_cond=cond).float()

    return lambda: stepwise.loop(draw(0), table, predict, draw, {})


def _measure(network: str, mode: str, dtype: str, batch: str) -> None:
    """Compile, and measure on request."""
    kind, count = getattr(torch, dtype), int(batch)
    size = next(size for size in SIZES if size.name == network)
    with _plain(size.build().eval(), kind) as plain:
        compiled = torch.compile(plain, mode=mode)
        _loop(compiled, kind, count, "DDIM")()
        torch.cuda.synchronize()
        if mode != _REDUCED:
            how = "torch.compile max-autotune, graph" if mode == _TUNED else "torch.compile, graph"
            step, loop = lambda call: graphed(call, 1), _graphed
        else:
            how, step, loop = f"torch.compile {mode}", lambda call: call, lambda call: call
        on_request(lambda: _rows(compiled, kind, count, how, step, {how: loop}, 5))


def _graphed(loop: Call) -> Callable[[], None]:
    return graphed(loop, 1, warm_up=1)


if __name__ == "__main__":
    _measure(*sys.argv[1:])
