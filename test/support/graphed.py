"""Modules whose calls replay, on the CPU too, and what tests of them count and compare.

On the CPU a fake capture runs the captured function again at each replay, into the same gradients:
ownership of gradients, and when a replay is allowed, are tested without a GPU.
"""

import contextlib
import copy
import types

import pytest
import torch
from torch.nn.utils.stateless import _reparametrize_module
from torch.testing import assert_close

from dpa.training import graphed_calls
from dpa.training.captured_call import CapturedCall


class FakeCapture(CapturedCall):
    """A capture that runs the function again."""

    def _record(self, forward, args, kwargs, parameters, known):
        module = forward.__self__.module
        lent = dict(zip([name for name, _ in module.named_parameters()], parameters, strict=True))
        trained = [x for x in (*self._inputs, *parameters) if x.requires_grad]
        run = None

        def replay():
            nonlocal run
            # A replay writes over the last one's results, and over gradients by its activations.
            for written in (self._output, *self._gradients):
                if written is not None:
                    written.fill_(torch.nan)
            with _reparametrize_module(module, lent), torch.enable_grad():
                run = forward(*args, **kwargs)
            self._output.copy_(run.detach())

        def differentiate():
            new = torch.autograd.grad(run, trained, self._grad, allow_unused=True)
            self._gradients = self._gradients or [g if g is None else g.clone() for g in new]
            for kept, value in zip(self._gradients, new, strict=True):
                if kept is not None:
                    kept.copy_(value)

        with _reparametrize_module(module, lent):
            run = forward(*args, **kwargs)
        self._output, self._grad, self._gradients = run.detach().clone(), torch.ones_like(run), []
        differentiate()
        self._forward = types.SimpleNamespace(replay=replay)
        self._backward = types.SimpleNamespace(replay=differentiate)


@pytest.fixture(autouse=True)
def graphs(device, monkeypatch):
    """Import it, and calls are captured on every device."""
    if device.type == "cuda":
        return
    nothing = types.SimpleNamespace(wait_event=id, wait_stream=id, record=id)
    for name in ("Stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: copy.copy(nothing))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: device.index)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(graphed_calls, "can_capture", lambda _: True)
    monkeypatch.setattr(graphed_calls, "CapturedCall", FakeCapture)


def same_gradients(plain, graphed):
    """Compare the gradients of two modules' parameters."""
    for one, other in zip(plain.parameters(), graphed.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            assert_close(other.grad, one.grad)


def count_replays(monkeypatch):
    """Return a list that grows by one item a replay."""
    count = []
    replay = CapturedCall.replayed
    counted = lambda *args: count.append(1) or replay(*args)  # noqa: E731
    monkeypatch.setattr(CapturedCall, "replayed", counted)
    return count
