"""What is left of a capture that failed: nothing that anybody has to know of."""

import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import dpa
from dpa.library import capture
from dpa.library.graphs import GraphCache

CPU = torch.device("cpu")


def test_a_failed_capture_is_kept_and_left(monkeypatch):
    """Each in its place: the graph, the generator, garbage collection, and the first error."""
    left, failed = [], []
    monkeypatch.setattr(capture, "FAILED", failed)
    monkeypatch.setattr(capture, "leave_capture", lambda spare: left.append(spare.numel()))
    with pytest.raises(RuntimeError, match="no such kernel"), capture.leaving_failed(CPU, 1, 2):
        assert not gc.isenabled()
        raise RuntimeError("no such kernel")
    assert gc.isenabled() and failed == [1, 2] and left == [1]
    with capture.leaving_failed(CPU, 3):
        pass
    assert gc.isenabled() and failed == [1, 2] and left == [1]

    def broken(spare):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(capture, "leave_capture", broken)
    with pytest.raises(KeyboardInterrupt), capture.leaving_failed(CPU, 4):
        raise KeyboardInterrupt
    assert failed == [1, 2, 4]


@pytest.mark.parametrize("first, current, chosen", [(None, 1, None), (1, 1, None), (0, 1, 1)])
def test_captures_run_on_a_stream_of_the_current_device(monkeypatch, first, current, chosen):
    """PyTorch's own is of the device that captured first, and captures nothing on another."""
    own = None if first is None else SimpleNamespace(device_index=first)
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", own)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device_index=device))
    monkeypatch.setattr(capture, "_stream_of", capture._stream_of.__wrapped__)
    stream = capture.capture_stream()
    assert (stream and stream.device_index) == chosen


def test_gradients_of_a_failed_capture_are_given_up():
    model, bare = torch.nn.Linear(2, 2), torch.zeros(3, requires_grad=True)
    model.weight.grad = given = torch.ones(2, 2)

    def step():
        model.zero_grad(set_to_none=True)
        (model(torch.ones(1, 2)).sum() + bare.sum()).backward()

    with pytest.raises(RuntimeError, match="failed"), capture.gradients_kept():
        step()
        raise RuntimeError("failed")
    assert model.weight.grad is given and model.bias.grad is None and bare.grad is None
    with capture.gradients_kept():
        step()
    assert model.weight.grad is not given and bare.grad is not None


def test_want_of_memory_is_said_and_tried_again_and_other_failures_are_remembered():
    cache, made = GraphCache(), [torch.OutOfMemoryError(""), "graph", RuntimeError("first\nsecond")]

    def make():
        outcome = made.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    with pytest.warns(UserWarning, match="no memory for a CUDA graph"):
        assert cache.capture("kind", CPU, make) is None
    assert cache.refused == {} and cache.capture("kind", CPU, make) == "graph"
    with pytest.warns(RuntimeWarning, match="runs kernel by kernel: first$"):
        assert cache.capture("other", CPU, make) is None
    assert cache.refused == {"other": "first"}
    assert cache.capture("other", CPU, make) is None and cache.capture("kind", CPU, list) == []


def test_every_capture_leaves_failed_ones():
    """A capture that fails leaves the generator and its memory in order, wherever it is made."""
    root = Path(dpa.__file__).parent
    own = {root / "library" / "capture.py"}
    for file in set(root.rglob("*.py")) - own:
        text = file.read_text()
        assert "torch.cuda.graph(" not in text, file
        assert ("CUDAGraph()" in text) == ("leaving_failed(" in text), file


def _capture_once(cuda):
    x = torch.ones(4, device=cuda)
    graph = torch.cuda.CUDAGraph()
    with capture.leaving_failed(cuda, graph), capture.capturing(graph):
        y = torch.randn_like(x) + x
    graph.replay()
    return y


def test_the_generator_serves_after_a_failed_capture(cuda):
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError),
        capture.leaving_failed(cuda, graph),
        capture.capturing(graph),
    ):
        torch.randn(4, device=cuda).sum().item()
    assert capture.FAILED[-1] is graph
    torch.cuda.manual_seed(1)
    first = torch.randn(4, device=cuda)
    torch.cuda.manual_seed(1)
    assert torch.equal(torch.randn(4, device=cuda), first)
    assert _capture_once(cuda).isfinite().all()
