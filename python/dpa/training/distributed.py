"""Data-parallel processes under torchrun: rank and device, and sampling sharded over the ranks."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.nn.parallel import DistributedDataParallel

from dpa.library.checks import require
from dpa.training.graphed_step import release_graphs
from dpa.training.sharded import ShardedOptimizer

__all__ = ["Ranks", "ShardedOptimizer", "ranks", "sample_sharded"]


@dataclass(frozen=True)
class Ranks:
    """This process among those that torchrun started; one of one without it.

    Attributes:
        rank: this process, from 0.
        count: of the processes.
        device: what this process computes on.
        captured: whether steps are to be captured in CUDA graphs.

    """

    rank: int
    count: int
    device: torch.device
    captured: bool = False

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes files and prints."""
        return self.rank == 0

    def shard(self, size: int) -> slice:
        """This process's part of ``size`` things, in order; parts differ by one at most."""
        return slice(size * self.rank // self.count, size * (self.rank + 1) // self.count)

    def mean(self, value: Tensor) -> Tensor:
        """The mean of ``value`` over all processes, of integers too."""
        if not value.is_floating_point() and not value.is_complex():
            value = value.to(torch.get_default_dtype())
        if self.count > 1:
            value = value.clone()
            dist.all_reduce(value)
            value /= self.count
        return value

    def optimizer(
        self, params: Iterable[Any], kind: Callable[..., torch.optim.Optimizer], **options: Any
    ) -> torch.optim.Optimizer:
        """``kind(params, **options)``, sharded where there are several processes.

        Then it is a :class:`ShardedOptimizer`, which exchanges gradients itself: the module needs
        no :meth:`wrap`. It refuses ``max_norm``, ``ema`` and ``clear_grads``.
        """
        if self.count == 1:
            return kind(params, **options)
        return ShardedOptimizer(params, kind, **options)

    def wrap(self, module: nn.Module, **options: Any) -> nn.Module:
        """The module under DDP with these options, or itself where there is one process."""
        if self.count == 1:
            return module
        options = {"gradient_as_bucket_view": True, **options}
        if self.device.type != "cuda":
            return DistributedDataParallel(module, **options)
        # Gradients are taken up on the stream that DDP is made on. A capture cannot wait for the
        # default one; a plain loop is faster on it.
        main = torch.cuda.current_stream(self.device)
        stream = torch.cuda.Stream(self.device) if self.captured else main
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            model = DistributedDataParallel(module, device_ids=[self.device], **options)
        main.wait_stream(stream)
        return model


@contextlib.contextmanager
def ranks(device: torch.device | None = None, captured: bool = False) -> Iterator[Ranks]:
    """Initialise the process group that torchrun started, and destroy it at the end.

    The processes communicate through NCCL on CUDA and Gloo on the CPU. At the end the graphs of
    :class:`dpa.training.GraphedStep` are released. An exception ends this process without waiting
    for the others, and stands in torchrun's report; torchrun ends the others.

    Args:
        device: what to compute on; by default CUDA where there is one, each process on its own
            (``LOCAL_RANK``).
        captured: whether whole steps are to be captured by ``GraphedStep`` (with ``warmup=11``
            under DDP), the gradient exchange included. It turns off NCCL's asynchronous error
            handling.

    """
    kind = device.type if device else "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and (device is None or device.index is None):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    device = device or torch.device("cpu")
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield Ranks(0, 1, device, captured)
        return
    if kind == "cuda":
        torch.cuda.set_device(device)
        if captured:
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    owner = not dist.is_initialized()
    if owner and kind == "cuda":
        dist.init_process_group("nccl", device_id=device)
    elif owner:
        dist.init_process_group("gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), device, captured)
    except Exception as error:
        get_error_handler().record_exception(error)
        if owner and kind == "cuda":
            release_graphs()
            # Destroying NCCL's communicators waits for the other processes, which wait for this.
            dist.distributed_c10d._abort_process_group()
        raise
    finally:
        if owner and dist.is_initialized():
            release_graphs()  # NCCL waits for the end of every graph that it is part of
            dist.destroy_process_group()
            _wait_for_gloo()


def _wait_for_gloo() -> None:
    """Wait until Gloo's threads run nothing.

    A DDP keeps its group, and so these threads, to the end of the process. One that has not yet
    let go of a collective's tensors when the interpreter ends wants its lock, and aborts.
    """
    running = True
    while running:
        time.sleep(0.001)  # without the lock, for those that have come to it
        running = any(_runs(each) for each in Path("/proc/self/task").glob("*/stat"))


def _runs(thread: Path) -> bool:
    """Whether a thread is one of Gloo's and runs, or could."""
    try:
        name, state = thread.read_text().rsplit(") ", 1)
    except OSError:  # it has ended
        return False
    return name.endswith("(pt_gloo_runloop") and state.startswith("R")


def sample_sharded(
    sampler: Any,
    global_cond: Tensor,
    generators: Sequence[torch.Generator],
    team: Ranks,
    **conditions: Tensor,
) -> Tensor:
    """Sample a batch sharded over the processes by rows; each receives all of it.

    Every sample has a random stream of its own, so the result is that of one process that samples
    them all, up to the rounding of GEMMs at another batch size.

    Args:
        sampler: a :class:`dpa.DiffusionSampler` of the same weights in every process.
        global_cond: (B, Dg), the same in every process.
        generators: B of them, seeded alike in every process.
        team: from :func:`ranks`.
        conditions: ``noise``, ``local_cond``, ``condition_data``, ``condition_mask``: (B, ...).

    Returns:
        (B, T, Da), in every process.

    """
    batch, given = global_cond.shape[0], len(generators)
    require(given == batch, "sample_sharded: generators", f"be one a sample, {batch}", given)
    rule = f"have a row for each of {team.count} processes"
    require(batch >= team.count, "sample_sharded: global_cond", rule, batch)
    mine = team.shard(batch)
    part = {name: value[mine] for name, value in conditions.items()}
    own = sampler(global_cond[mine], generator=generators[mine], **part)
    if team.count == 1:
        return own
    most = -(-batch // team.count)  # gathering wants equal sizes
    own = torch.nn.functional.pad(own, (0, 0, 0, 0, 0, most - len(own)))
    everyone = own.new_empty(team.count * most, *own.shape[1:])
    dist.all_gather_into_tensor(everyone, own.contiguous())
    sizes = [Ranks(rank, team.count, team.device).shard(batch) for rank in range(team.count)]
    parts = zip(everyone.split(most), sizes, strict=True)
    return torch.cat([x[: s.stop - s.start] for x, s in parts])
