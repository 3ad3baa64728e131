"""Modules of TorchScript are compared by what their C++ modules hold."""

import copy
import io

import pytest
import torch
from torch import nn

from dpa.tracking import ModuleState, Tracker


class Scale(nn.Module):
    """Multiplies by a number and a tensor that are no parameters."""

    def __init__(self):
        super().__init__()
        self.factor, self.offset, self.powers = 2.0, torch.ones(2), [1, 2]

    def forward(self, x):
        return x.pow(self.powers[0]) * self.factor + self.offset


def _scripted():
    inner = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    return torch.jit.script(nn.Sequential(inner, nn.BatchNorm1d(2), Scale()))


def _loaded():
    file = io.BytesIO()
    torch.jit.save(_scripted(), file)
    file.seek(0)
    return torch.jit.load(file)


KINDS = {
    "scripted": _scripted,
    "loaded": _loaded,
    "inside": lambda: nn.Sequential(nn.Linear(2, 2), *_scripted().children()),
    "traced": lambda: torch.jit.trace(nn.Sequential(nn.Linear(2, 2), Scale()), torch.rand(3, 2)),
    "frozen": lambda: torch.jit.freeze(_scripted().eval()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_unchanged_module_is_found_unchanged(kind):
    module = KINDS[kind]()
    tracker, state = Tracker(module), ModuleState(module)
    for _ in range(2):
        assert tracker.unchanged() and state.holds()
        module(torch.rand(3, 2))


def _part(root, path):
    return dict(root.named_modules())[path]


def _swap(root):
    setattr(_part(root, "0"), "0", copy.deepcopy(_part(root, "0.0")))


CHANGES = {
    "number": lambda root: setattr(_part(root, "2"), "factor", 3.0),
    "tensor": lambda root: setattr(_part(root, "2"), "offset", torch.zeros(2)),
    "written tensor": lambda root: _part(root, "2").offset.mul_(2),
    "list": lambda root: setattr(_part(root, "2"), "powers", [2, 2]),
    "module": _swap,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("make", [_scripted, _loaded])
def test_a_changed_module_is_found_changed(make, change):
    module = make()
    inner, outer = Tracker(module), Tracker(nn.Sequential(module))
    CHANGES[change](module)
    assert not inner.unchanged() and not outer.unchanged()


def test_modes_and_places_count():
    for change in (
        nn.Module.eval,
        lambda root: setattr(_part(root, "1"), "weight", nn.Parameter(torch.ones(2))),
    ):
        module = _scripted()
        tracker, state = Tracker(module), ModuleState(module)
        assert all(tracker.modes())
        change(module)
        assert tracker.unchanged() and not state.holds()
