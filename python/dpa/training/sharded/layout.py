"""The layout of all parameters in one flat buffer, and the owner of each part."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

_ALIGNMENT = 64  # elements; parameters and shards begin at whole 128-byte lines in 16 bits too


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class Piece:
    """Neighbouring elements of one parameter, all of which one process updates.

    Attributes:
        parameter: its number.
        shape: of the parameter where the piece is all of it, else the piece's one length.
        start: in the flattened parameter.
        count: of elements.
        owner: the process that updates it.
        place: in the owner's shard of the chunk.

    """

    parameter: int
    shape: tuple[int, ...]
    start: int
    count: int
    owner: int
    place: int

    def of(self, tensor: Tensor) -> Tensor:
        """This piece of a tensor that has the parameter's shape."""
        if tensor.shape == self.shape:
            return tensor
        return tensor.reshape(-1)[self.start : self.start + self.count]

    def among(self, shard: Tensor) -> Tensor:
        """This piece in the owner's shard."""
        return shard[self.place : self.place + self.count].view(self.shape)


@dataclass(frozen=True)
class Chunk:
    """Parameters of one group that are exchanged and updated together.

    Its part of the flat memory is as many shards as there are processes, one after the other.

    Attributes:
        group: the parameters' group.
        parameters: their numbers.
        offsets: of each parameter, in the chunk's part of the flat memory.
        pieces: of all of them.
        start: of the chunk's part of the flat memory, in elements.
        size: of a shard, in elements.
        ranks: how many shards.

    """

    group: int
    parameters: tuple[int, ...]
    offsets: tuple[int, ...]
    pieces: tuple[Piece, ...]
    start: int
    size: int
    ranks: int

    def of(self, flat: Tensor) -> Tensor:
        """This chunk's part of the flat buffer."""
        return flat[self.start : self.start + self.ranks * self.size]

    def shard(self, flat: Tensor, rank: int) -> Tensor:
        """The shard of one process, in the flat buffer."""
        return self.of(flat)[rank * self.size : (rank + 1) * self.size]

    def views(self, part: Tensor, like: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Each parameter's number, and its view of this chunk's part of a flat buffer."""
        for i, offset in zip(self.parameters, self.offsets, strict=True):
            yield i, part[offset : offset + like[i].numel()].view(like[i].shape)

    def among(self, shards: Tensor) -> Tensor:
        """This chunk's shard in a buffer that holds the shards of one process alone."""
        return shards[self.start // self.ranks :][: self.size]


def lay_out(
    parameters: Sequence[Tensor],
    groups: Sequence[int],
    order: Sequence[int],
    ranks: int,
    chunks: int,
) -> list[Chunk]:
    """Cut parameters into chunks, in the order in which their last gradients come.

    ``groups`` are those of the parameters, ``order`` their numbers as gradients come; one group is
    cut into so many ``chunks``.
    """
    most = sum(p.numel() for p in parameters) / chunks
    parts: list[list[int]] = []
    for group in sorted(set(groups)):
        size = most
        for number in (i for i in order if groups[i] == group):
            if size >= most:
                parts.append([])
                size = 0
            parts[-1].append(number)
            size += parameters[number].numel()
    arrival = {number: i for i, number in enumerate(order)}
    parts.sort(key=lambda part: arrival[part[-1]])
    result: list[Chunk] = []
    start = 0
    for part in parts:
        lengths = (_aligned(parameters[number].numel()) for number in part)
        *offsets, end = itertools.accumulate(lengths, initial=0)
        size = _aligned(max(1, -(-end // ranks)))
        pieces = [
            piece
            for number, offset in zip(part, offsets, strict=True)
            for piece in _cut(number, parameters[number], offset, size)
        ]
        found = tuple(part), tuple(offsets), tuple(pieces)
        result.append(Chunk(groups[part[0]], *found, start, size, ranks))
        start += ranks * size
    return result


def _cut(number: int, parameter: Tensor, offset: int, size: int) -> Iterator[Piece]:
    """The pieces of a parameter that lies at ``offset`` in a chunk whose shards have ``size``."""
    count = parameter.numel()
    if count == 0:
        return
    for owner in range(offset // size, (offset + count - 1) // size + 1):
        start, stop = max(offset, owner * size), min(offset + count, (owner + 1) * size)
        shape = tuple(parameter.shape) if stop - start == count else (stop - start,)
        yield Piece(number, shape, start - offset, stop - start, owner, start - owner * size)
