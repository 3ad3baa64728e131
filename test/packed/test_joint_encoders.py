"""Encoders' calls that wait for one another: they run together, and nobody sees that they wait."""

import types

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dpa.packed import joint_encoders
from dpa.packed.encoder_program import EncoderProgram
from dpa.packed.joint_encoders import EncoderCall, JointEncoders
from dpa.tracking import is_dispatched


@pytest.fixture
def runs(monkeypatch):
    """How many calls ran together, each time. Programs make means of images times a weight."""
    found = []

    def run_alike(calls):
        assert len({call.kind for call in calls}) == 1
        found.append(len(calls))
        return [call.images.mean((2, 3)) for call in calls]

    monkeypatch.setattr(joint_encoders, "run_alike", run_alike)
    return found


def _call(weight, size=4, config=(3, 1), constants=(0.0,), images=None):
    program = types.SimpleNamespace(
        config=list(config), result=lambda x, _, out: out.copy_(x * weight)
    )
    images = torch.rand(2, 3, size, size) if images is None else images
    packed = torch.tensor(float(weight))
    call = EncoderCall(program, images, packed, list(constants), torch.float32, None, None)
    return call, images.mean((2, 3)) * weight


def _put_off(joint, call):
    return joint.put_off(call, torch.full((2, 3), torch.nan))


def test_calls_of_a_kind_run_together(runs):
    calls = [_call(k) for k in (2, 3, 4)]
    with JointEncoders() as joint:
        assert JointEncoders.entered() is joint
        found = torch.cat([_put_off(joint, call).flatten(1) for call, _ in calls])
    assert runs == [3]
    assert torch.equal(found, torch.cat([want for _, want in calls]))
    assert JointEncoders.entered() is None


@pytest.mark.parametrize("other", [{"size": 5}, {"config": (3, 2)}, {"constants": (1e-5,)}])
def test_other_kinds_run_by_themselves(runs, other):
    calls = [_call(2), _call(3, **other), _call(4)]
    with JointEncoders() as joint:
        found = [_put_off(joint, call) for call, _ in calls]
        assert not runs
    assert sorted(runs) == [1, 2]
    assert all(torch.equal(x, want) for x, (_, want) in zip(found, calls, strict=True))


def test_a_reader_ends_the_waiting(runs):
    first, second = _call(2), _call(3)
    with JointEncoders() as joint:
        features = _put_off(joint, first[0])
        view = features[:, 1:].transpose(0, 1)
        torch.ones(3) + 1
        assert not runs
        doubled = view * 2
        assert runs == [1]
        found = _put_off(joint, second[0])
    assert runs == [1, 1]
    assert torch.equal(doubled, first[1][:, 1:].T * 2)
    assert torch.equal(found, second[1])


@pytest.mark.parametrize("victim", ["images", "packed", "features"])
def test_a_write_ends_the_waiting(runs, victim):
    call, want = _call(2)
    with JointEncoders() as joint:
        features = _put_off(joint, call)
        call.images + call.packed  # to read is no harm
        assert not runs
        {"images": call.images[0], "packed": call.packed, "features": features}[victim].zero_()
        assert runs == [1]
    assert torch.equal(features, torch.zeros_like(want) if victim == "features" else want)


def test_an_error_leaves_nothing_waiting(runs):
    with pytest.raises(ValueError, match="mine"), JointEncoders() as joint:
        _put_off(joint, _call(2)[0])
        raise ValueError("mine")
    assert not runs and JointEncoders.entered() is None


@pytest.mark.parametrize("hooked", [False, True])
def test_features_are_written_where_they_are_wanted(hooked):
    linear, relu, calls = torch.nn.Linear(3, 4), torch.nn.ReLU(), []
    program = EncoderProgram([3], tail=[linear, relu])
    if hooked:
        relu.register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(5, 3)
    for grads in (False, True):
        out = torch.full((5, 4), torch.nan)
        with torch.set_grad_enabled(grads):
            assert program.result(x, torch.float32, out) is out
        assert out.requires_grad == grads
        assert torch.equal(out, program.result(x, torch.float32))
        assert (out == 0).any() and (out > 0).any()
    assert len(calls) == 4 * hooked


def test_the_mode_is_no_observer():
    with JointEncoders():
        assert not is_dispatched()
        with FlopCounterMode(display=False):
            assert is_dispatched()
            assert JointEncoders.entered() is None
