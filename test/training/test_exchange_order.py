"""The exchange between GPUs on simulated streams: its events order all accesses to a memory."""

import contextlib
import itertools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpa.training.sharded import exchange
from dpa.training.sharded.layout import lay_out

_SIZES = (3, 200, 70, 1000, 64, 5, 300)  # of the parameters


class _Node:
    """Work of one process on a stream: what it accesses, and what is done before it begins."""

    def __init__(self, rank, after, run, reads=(), writes=(), barrier=None):
        self.rank, self.after, self.run, self.barrier = rank, list(after), run, barrier
        self.reads, self.writes = [[_place(x) for x in tensors] for tensors in (reads, writes)]

    def conflicts(self, other):
        """Whether one writes what the other accesses."""
        pairs = (self.writes, other.reads + other.writes), (self.reads, other.writes)
        return any(a < d and c < b for x, y in pairs for a, b in x for c, d in y)


def _place(tensor):
    assert tensor.is_contiguous()
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


class _Stream:
    """The work that the next of a stream comes after; an event is such a list too."""

    def __init__(self, device=None):
        self.last = []

    def record_event(self):
        event = _Stream()
        event.last = list(self.last)
        return event

    def wait_event(self, event):
        self.last += event.last

    wait_stream = wait_event

    def synchronize(self):
        pass


class _Machine(TorchDispatchMode):
    """GPUs that do nothing yet: an op that writes becomes a node of the current stream.

    Attributes:
        rank: the process that calls.
        nodes: of all processes.

    """

    def __init__(self, ranks):
        super().__init__()
        self.rank, self.nodes, self._barriers = 0, [], [0] * ranks
        self.mains = [_Stream() for _ in range(ranks)]
        self._current, self._memories, self._made = None, {}, [0] * ranks

    def current_stream(self, device=None):
        return self._current or self.mains[self.rank]

    @contextlib.contextmanager
    def stream(self, stream):
        before, self._current = self._current, stream
        yield
        self._current = before

    def event(self):
        event = _Stream()
        event.record = lambda: event.last.extend(self.current_stream().last)
        return event

    def add(self, *args, **options):
        stream = self.current_stream()
        self.nodes.append(_Node(self.rank, stream.last, *args, **options))
        stream.last = [self.nodes[-1]]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not func._schema.is_mutable:
            return func(*args, **kwargs)
        found = {True: [], False: []}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            found[written] += [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]
        self.add(lambda: func(*args, **kwargs), found[False], found[True])
        return args[0] if func._schema.returns else None

    def memory(self, number, rank, size):
        return self._memories.setdefault((number, rank), torch.zeros(size))

    def empty(self, size, dtype, device):
        return self.memory(self._made[self.rank], self.rank, size)

    def rendezvous(self, memory, group):
        number, rank = self._made[group.rank()], group.rank()
        self._made[rank] += 1

        def barrier(channel):
            self.add(lambda: None, barrier=self._barriers[rank])
            self._barriers[rank] += 1

        get = lambda peer, size, dtype: self.memory(number, peer, size[0])  # noqa: E731
        return SimpleNamespace(barrier=barrier, get_buffer=get)

    def patched(self):
        cuda = {"Stream": _Stream, "Event": self.event, "stream": self.stream}
        stack = contextlib.ExitStack()
        for where, names in (
            (torch.cuda, cuda | {"current_stream": self.current_stream}),
            (symmetric, {"empty": self.empty, "rendezvous": self.rendezvous}),
            (exchange, {"_LARGE": 64}),
        ):
            stack.enter_context(mock.patch.multiple(where, **names))
        return stack

    def before(self):
        """By node: all that is done before it begins, as the bits of numbers; in an order to run.

        A barrier begins in all processes before it ends in any.
        """
        together = {}
        for node in self.nodes:
            if node.barrier is not None:
                together.setdefault(node.barrier, []).append(node)
        bits = {node: 1 << i for i, node in enumerate(self.nodes)}
        found, left = {}, list(self.nodes)
        while left:
            waiting = []
            for node in left:
                same = [node] if node.barrier is None else together[node.barrier]
                after = [each for one in same for each in one.after]
                if all(each in found for each in after):
                    found[node] = 0
                    for each in after:
                        found[node] |= found[each] | bits[each]
                else:
                    waiting.append(node)
            assert len(waiting) < len(left), "processes wait for one another"
            left = waiting
        return found, bits


def _train(machine, teams, chunks, steps, pipelined, dropped):
    """Steps of every process, one after another; the gradients of each."""
    drawn = torch.Generator().manual_seed(0)
    count = len(teams)
    gradients = [
        [[torch.randn(n, generator=drawn) for n in _SIZES] for _ in range(count)]
        for _ in range(steps)
    ]
    for step, (rank, team) in itertools.product(range(steps), enumerate(teams)):
        machine.rank = rank
        grads = [torch.zeros(n) for n in _SIZES]
        with machine:
            torch.empty_like(team.weights).copy_(team.weights)  # the forward reads them
            for chunk in chunks:
                for i in chunk.parameters:
                    grads[i].copy_(gradients[step][rank][i])
                team.send(chunk, [piece.of(grads[piece.parameter]) for piece in chunk.pieces])
            torch.empty_like(team.weights).copy_(team.weights)  # the rest of the backward
            if dropped == step:
                for chunk in chunks:
                    team.receive(chunk)
            team.begin()
            for part in () if dropped == step else [[c] for c in chunks] if pipelined else [chunks]:
                for chunk in part:
                    team.receive(chunk)
                for chunk in part:
                    chunk.shard(team.weights, rank).sub_(chunk.among(team.average))
                for chunk in part:
                    team.share(chunk)
            team.finish()
            for grad in grads:  # its memory is used for something else
                grad.zero_()
    return gradients


@pytest.mark.parametrize("dropped", [None, 1], ids=["", "a step dropped"])
@pytest.mark.parametrize("pipelined", [True, False], ids=["chunk by chunk", "at once"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_events_order_all_accesses(ranks, pipelined, dropped):
    machine, steps = _Machine(ranks), 3
    like = [torch.zeros(n) for n in _SIZES]
    chunks = lay_out(like, [0] * len(like), range(len(like)), ranks, 3)
    teams = []
    with machine.patched():
        for machine.rank in range(ranks):
            group = SimpleNamespace(rank=lambda rank=machine.rank: rank, size=lambda: ranks)
            teams.append(exchange._Peers(chunks, like[0], group))
        gradients = _train(machine, teams, chunks, steps, pipelined, dropped)
    before, bits = machine.before()
    for node, other in itertools.combinations(machine.nodes, 2):
        ordered = before[node] & bits[other] or before[other] & bits[node]
        assert ordered or not node.conflicts(other), "a memory is accessed in any order"
    for rank, main in enumerate(machine.mains):
        own = [node for node in machine.nodes if node.rank == rank]
        (last,) = main.last
        # A graph's capture ends with every stream joined.
        assert all(before[last] & bits[node] for node in own if node is not last)
        barriers = [node for node in own if node.barrier is not None]
        assert all(before[b] & bits[a] for a, b in itertools.pairwise(barriers))
    for node in before:
        node.run()
    for team, chunk in itertools.product(teams, chunks):
        found = dict(chunk.views(chunk.of(team.weights), like))
        for i, weights in found.items():
            kept = [gradients[step] for step in range(steps) if step != dropped]
            expected = -sum(sum(each[i] for each in of) / ranks for of in kept)
            torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-5)
