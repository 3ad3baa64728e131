"""Exchange of gradients and weights between processes: each averages and updates its own shards.

An exchange owns the flat buffer of the weights. A step is, in the same order in every process:
``send`` of each chunk while the backward runs; ``begin``; of each chunk ``receive``, the update of
this process's shard, ``share``; ``finish``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from dpa.training.sharded.layout import Chunk

_LARGE = 1 << 16  # elements from which a piece is copied alone


def exchange_of(chunks: Sequence[Chunk], like: Tensor, group: dist.ProcessGroup) -> Exchange:
    """The exchange for a process group; ``like`` has the weights' dtype and device."""
    kind = _Peers if _reach_one_another(like.device, group) else Exchange
    return kind(chunks, like, group)


def _reach_one_another(device: torch.device, group: dist.ProcessGroup) -> bool:
    """Whether each process has a GPU of its own, all on one machine and joined by NVLink.

    Barriers in another GPU's memory need atomics there, which other connections may not have.
    """
    if device.type != "cuda" or group.size() == 1:
        return False
    if os.environ.get("LOCAL_WORLD_SIZE") != str(dist.get_world_size()):
        return False
    every = torch.tensor([_joined(group.size())], dtype=torch.int32, device=device)
    dist.all_reduce(every, dist.ReduceOp.MIN, group=group)
    return bool(every.item())


def _joined(processes: int) -> bool:
    """Whether this process sees a GPU for each, and NVLink between all of them."""
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _detect_dma_connectivity

    count = torch.cuda.device_count()
    if count < processes:
        return False
    links = _detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix
    return all(links[a][b] for a in range(count) for b in range(count) if a != b)


class Exchange:
    """An exchange of any processes: two torch.distributed collectives a chunk.

    Attributes:
        weights: the flat buffer of the weights.
        average: this process's shards of the averaged gradients.

    """

    def __init__(self, chunks: Sequence[Chunk], like: Tensor, group: dist.ProcessGroup):
        self.group, self.rank, self.ranks = group, group.rank(), group.size()
        self.dtype, self.device = like.dtype, like.device
        self._read: list[list[Tensor]] = []  # by streams that the allocator does not track
        self._allocate(chunks, sum(chunk.ranks * chunk.size for chunk in chunks))

    def _allocate(self, chunks: Sequence[Chunk], total: int) -> None:
        options: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        self.weights, self._gradients = (torch.zeros(total, **options) for _ in range(2))
        self.average = torch.zeros(total // self.ranks, **options)
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def _beside(self) -> contextlib.AbstractContextManager[Any]:
        if self._stream is None:
            return contextlib.nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def send(self, chunk: Chunk, pieces: list[Tensor]) -> None:
        """Send a chunk's gradients, a tensor for each of its pieces, beside the backward."""
        self._read.append(pieces)
        with self._beside():
            targets = [p.among(chunk.shard(self._gradients, p.owner)) for p in chunk.pieces]
            if pieces:
                torch._foreach_copy_(targets, pieces)
            average = chunk.among(self.average)
            dist.reduce_scatter_tensor(average, chunk.of(self._gradients), group=self.group)
            average.div_(self.ranks)

    def begin(self) -> None:
        """Mark that all gradients are sent and that weights may be written."""

    def receive(self, chunk: Chunk) -> None:
        """Wait until this process's shard of a chunk has its average."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def share(self, chunk: Chunk) -> None:
        """Send this process's new weights of a chunk to all others."""
        whole = self.all_gather(chunk.shard(self.weights, self.rank))
        chunk.of(self.weights).copy_(whole)

    def finish(self) -> None:
        """Wait until every process has all new weights."""
        self._read.clear()

    def all_gather(self, shard: Tensor) -> Tensor:
        """The shards of all processes of a chunk, concatenated."""
        whole = shard.new_empty(self.ranks * len(shard))
        dist.all_gather_into_tensor(whole, shard, group=self.group)
        return whole


class _Peers(Exchange):
    """GPUs that access one another's memory: DMA copy engines write to the owner's buffers.

    Each process receives the gradients of each peer in one row; the first row becomes the average.
    """

    def _allocate(self, chunks: Sequence[Chunk], total: int) -> None:
        shards = total // self.ranks
        # Two buffers, since a saved state dict keeps the whole storage of its tensors.
        self._handle, self._weights = self._shared(total)
        self._other_handle, received = self._shared((self.ranks - 1) * shards)
        self._received = [memory.view(-1, shards) for memory in received]
        self.weights, self.average = self._weights[self.rank], self._received[self.rank][0]
        streams = (torch.cuda.Stream(self.device) for _ in range(3))
        self._gradients, self._arrivals, self._updates = streams
        self._sent: dict[int, tuple[torch.cuda.Event, list[tuple[Tensor, Tensor]]]] = {}
        self._targets = {chunk.start: self._targets_of(chunk) for chunk in chunks}

    def _shared(self, size: int) -> tuple[Any, list[Tensor]]:
        """A zeroed symmetric buffer of each process, and the handle that keeps them mapped."""
        memory = symmetric.empty(size, dtype=self.dtype, device=self.device).zero_()
        torch.cuda.current_stream().synchronize()  # before anyone writes to it
        handle = symmetric.rendezvous(memory, self.group)
        others = [handle.get_buffer(r, (size,), self.dtype) for r in range(self.ranks)]
        others[self.rank] = memory  # alive as long as any view of it, such as a weight
        return handle, others

    def _targets_of(self, chunk: Chunk) -> list[Tensor]:
        """The target of each piece: the average for this process's own, else the owner's buffer."""
        row = lambda owner: self._received[owner][self.rank - (self.rank > owner)]  # noqa: E731
        mine = self.rank
        rows = [self.average if owner == mine else row(owner) for owner in range(self.ranks)]
        return [piece.among(chunk.among(rows[piece.owner])) for piece in chunk.pieces]

    def send(self, chunk: Chunk, pieces: list[Tensor]) -> None:
        transfers = list(zip(chunk.pieces, self._targets[chunk.start], pieces, strict=True))
        theirs = [t for t in transfers if t[0].owner != self.rank]
        # The next process's first, as each does: a peer has one writer at a time.
        theirs.sort(key=lambda t: (t[0].owner - self.rank) % self.ranks)
        small = [t for t in theirs if t[0].count < _LARGE]
        self._gradients.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._gradients):
            if small:
                torch._foreach_copy_([to for _, to, _ in small], [x for _, _, x in small])
            for piece, to, x in theirs:
                if piece.count >= _LARGE:
                    to.copy_(x)
        # A stream of its own for the barrier, so that the next chunk is sent without waiting.
        self._arrivals.wait_stream(self._gradients)
        with torch.cuda.stream(self._arrivals):
            self._handle.barrier(channel=0)
            came = torch.cuda.Event()
            came.record()
        self._sent[chunk.start] = came, [(to, x) for p, to, x in transfers if p.owner == self.rank]
        self._read.append(pieces)

    def begin(self) -> None:
        """Order new weights after every process's backward and after all gradients.

        DMA copy engines run the copies of a graph in the graph's order, not as they become ready.
        All barriers come in one order in every process: two unordered ones could each wait behind
        the other's partner in a hardware queue.
        """
        self._updates.wait_stream(torch.cuda.current_stream())
        self._updates.wait_stream(self._arrivals)
        with torch.cuda.stream(self._updates):
            self._handle.barrier(channel=0)

    def receive(self, chunk: Chunk) -> None:
        came, pairs = self._sent[chunk.start]
        torch.cuda.current_stream().wait_event(came)
        targets, own = [to for to, _ in pairs], [x for _, x in pairs]
        if self.ranks == 2:
            if own:
                torch._foreach_lerp_(targets, own, 0.5)
            return
        average = chunk.among(self.average)
        for other in self._received[self.rank][1:]:
            average.add_(chunk.among(other))
        if own:
            torch._foreach_add_(targets, own)
        average.div_(self.ranks)

    def share(self, chunk: Chunk) -> None:
        self._updates.wait_stream(torch.cuda.current_stream())
        mine = chunk.shard(self.weights, self.rank)
        with torch.cuda.stream(self._updates):
            for i in range(1, self.ranks):
                peer = (self.rank + i) % self.ranks  # each peer has one writer at a time
                chunk.shard(self._weights[peer], self.rank).copy_(mine)

    def finish(self) -> None:
        torch.cuda.current_stream().wait_stream(self._updates)
        self._handle.barrier(channel=0)
        self._sent.clear()
        self._read.clear()
