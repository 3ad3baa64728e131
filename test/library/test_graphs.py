"""Graphs whose capture other threads do not notice: their random numbers, memory, failures."""

import contextlib
import threading

import pytest
import torch

from dpa.library import capture, graphs
from dpa.library.graphs import Graph, captured

CPU = torch.device("cpu")


def in_thread(call):
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


@pytest.fixture
def fakes(monkeypatch):
    """Captures that run their work, each noted in a list."""
    notes = []
    nothing = lambda *args, **kwargs: contextlib.nullcontext()  # noqa: E731

    class Ours:
        def __init__(self, *args):
            notes.append("ours")

        def record(self, work):
            return work()

    for name in ("_beside", "leaving_failed", "capturing"):
        monkeypatch.setattr(graphs, name, nothing)
    monkeypatch.setattr(graphs, "Graph", Ours)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: notes.append("theirs"))
    return notes


def test_what_fails_runs_again_in_pytorchs_capture(fakes):
    errors = [RuntimeError("it uses random numbers")]

    def work():
        if errors:
            raise errors.pop()
        return 3

    assert captured(CPU, lambda: 1, lambda: 2)[1] == [1, 2] and fakes == ["ours"] * 2
    assert (
        captured(CPU, lambda: 1, work)[1] == [1, 3] and fakes[2:] == ["ours"] * 2 + ["theirs"] * 2
    )
    assert captured(CPU, lambda: 4, random_numbers=True)[1] == [4] and fakes[6:] == ["theirs"]
    errors.append(torch.OutOfMemoryError("full"))
    with pytest.raises(torch.OutOfMemoryError):
        captured(CPU, work)
    errors += [RuntimeError("second"), RuntimeError("first")]
    with pytest.raises(RuntimeError, match="second"):
        captured(CPU, work)


@pytest.mark.parametrize("differentiates", [False, True])
def test_another_thread_draws_during_a_capture(cuda, differentiates):
    """It gets the numbers that it would get otherwise, and the graph has none of its kernels."""
    torch.manual_seed(3)
    want = [torch.randn(4, device=cuda) for _ in range(2)]
    torch.manual_seed(3)
    x, drawn = torch.zeros(1000, device=cuda), []

    def work():
        drawn.append(in_thread(lambda: torch.randn(4, device=cuda)))
        return x + 1

    (graph,), (y,) = captured(cuda, work, differentiates=differentiates)
    assert isinstance(graph, Graph)
    drawn.append(torch.randn(4, device=cuda))
    for value in (0.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert bool((y == value + 1).all())
    assert all(torch.equal(a, b) for a, b in zip(drawn, want, strict=True))


def test_work_that_draws_random_numbers_gets_pytorchs_graph(cuda):
    (graph,), (y,) = captured(cuda, lambda: torch.randn(8, device=cuda))
    assert isinstance(graph, torch.cuda.CUDAGraph)
    seen = []
    for _ in range(2):
        graph.replay()
        seen.append(y.clone())
    assert not torch.equal(*seen)


def test_memory_of_graphs_is_their_own(cuda):
    """Of results and of what was freed inside: nobody else gets it while the graph lives."""
    x = torch.randn(1 << 16, device=cuda)
    made = []

    def forward():
        made[:] = [(x * 2).relu().exp().log1p()]
        return made[0]

    def onwards():
        return (made[0] * 3).sin().cos()

    both, (first, second) = captured(cuda, forward, onwards)
    others = [torch.full((1 << 16,), 7.0, device=cuda) for _ in range(64)]
    for graph in both:
        graph.replay()
    plain = (x * 2).relu().exp().log1p()
    torch.testing.assert_close(first, plain)
    torch.testing.assert_close(second, (plain * 3).sin().cos())
    assert all(bool((other == 7).all()) for other in others)


def test_a_backward_of_other_threads_is_captured(cuda):
    net = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4))).to(cuda)
    x, parameters = torch.randn(8, 32, device=cuda), list(net.parameters())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # cuBLAS is set up
        torch.autograd.grad(net(x).square().sum(), parameters)
    torch.cuda.current_stream().wait_stream(side)
    kept = []
    both, (_, gradients) = captured(
        cuda,
        lambda: kept.append(net(x).square().sum()),
        lambda: torch.autograd.grad(kept.pop(), parameters),
        stream=side,
        differentiates=True,
    )
    assert all(isinstance(graph, Graph) for graph in both)
    others = [torch.full((32, 32), 7.0, device=cuda) for _ in range(256)]
    x.normal_()
    for graph in both:
        graph.replay()
    want = torch.autograd.grad(net(x).square().sum(), parameters)
    for got, expected in zip(gradients, want, strict=True):
        torch.testing.assert_close(got, expected)
    assert all(bool((other == 7).all()) for other in others)


def test_a_capture_that_fails_leaves_the_stream_and_the_generator(cuda):
    x, failed = torch.ones(4, device=cuda), len(capture.FAILED)
    with pytest.raises(RuntimeError):
        captured(cuda, lambda: x.sum().item())
    assert len(capture.FAILED) == failed + 1
    torch.cuda.synchronize()
    (graph,), (y,) = captured(cuda, lambda: x + 1)
    assert isinstance(graph, Graph)
    graph.replay()
    assert bool((y == 2).all()) and torch.randn(8, device=cuda).unique().numel() == 8


def test_memory_of_a_graph_that_is_gone_is_given_back(cuda):
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    (graph,), results = captured(cuda, lambda: torch.ones(1 << 24, device=cuda) * 2)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() >= before + (1 << 26)
    del graph, results
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < before + (1 << 26)
