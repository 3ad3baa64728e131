"""Integers at the ends of 64 bits: an op answers, or says what is wrong, at once."""

import faulthandler

import pytest
import torch

_OPS = torch.ops.dpa


@pytest.fixture(autouse=True)
def _no_hang():
    """C++ does not return to Python's handlers: what takes longer than this ends the process."""
    faulthandler.dump_traceback_later(60, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("where", ["cpu", "meta"])
@pytest.mark.parametrize("stride, padding", [(1, 2**63 - 1), (1, 2**62), (2**63 - 1, 2**63 - 1)])
def test_a_length_beyond_64_bits(where, stride, padding, transposed):
    x, weight = torch.randn(1, 2, 5, device=where), torch.randn(2, 2, 3, device=where)
    with pytest.raises(RuntimeError, match=r"dpa::conv1d: stride and padding must give a length"):
        _OPS.conv1d(x, weight, None, stride, padding, transposed)


@pytest.mark.parametrize("where", ["cpu", "meta"])
@pytest.mark.parametrize("padding", [2**61, 2**58])
def test_bytes_beyond_64_bits(where, padding):
    x, weight = torch.randn(1, 2, 5, device=where), torch.randn(2, 2, 3, device=where)
    with pytest.raises(RuntimeError, match="dpa::conv1d: stride and padding must give tensors"):
        _OPS.conv1d(x, weight, None, 1, padding, False)


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_a_stride_beyond_64_bits(where):
    x, weight = torch.randn(1, 2, 5, device=where), torch.randn(2, 2, 3, device=where)
    with pytest.raises(RuntimeError, match=r"dpa::conv1d: stride and padding must give a length"):
        _OPS.conv1d(x, weight, None, 2**62, 0, True)


@pytest.mark.parametrize("rows", [2**62, 2**63 - 1])
def test_many_draws_of_nothing(device, rows):
    like = torch.empty(0, device=device)
    assert _OPS.normal_draws(like, rows, rows).shape == (rows, 0)
    out = like.new_empty(rows, 0)
    _OPS.normal_draws.out(rows, out=out)
    _OPS.loop_inputs_([], [], out, rows)


@pytest.mark.parametrize("groups", [2**31, 2**62, 2**63 - 1])
def test_many_groups_of_no_channels(device, groups):
    """Any number divides the channels of an input that has none."""
    x = torch.randn(3, 0, 4, device=device, requires_grad=True)
    out = _OPS.group_norm_mish(x, groups)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert out.shape == grad.shape == x.shape
    tangent = torch.func.jvp(lambda x: _OPS.group_norm_mish(x, groups), (x,), (x,))[1]
    assert tangent.shape == x.shape


def test_steps_of_a_parallel_sweep():
    """Refused by the shared rule of shapes, which Meta runs as a GPU does."""
    new = lambda *shape: torch.empty(shape, device="meta")  # noqa: E731
    position = torch.empty(1, dtype=torch.long, device="meta")
    for steps in (-3, -(2**63), 2**63 - 1):
        with pytest.raises(RuntimeError, match=r"dpa::parallel_move_: steps must be 0 to the rows"):
            _OPS.parallel_move_(
                new(2, 1, 2, 3), position, new(1), new(2, 1, 2, 3), new(1, 6), None, None, None,
                steps, 1.0, 0.1,
            )  # fmt: skip
