"""Any valid call equals the reference, any invalid one raises and says why: drawn at random.

`make test` draws a few cases of each, `make fuzz` ten thousand of each.
"""

import math
import os

import pytest
import strategies
import test_spoilt_calls
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from proofs import Sample, call, poisoned_memory, random_gradients, widened
from tolerances import gradient_tolerance, tolerance
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves

import dpa
from dpa.diagnostics.info import op_names

_CASES = int(os.environ.get("DPA_FUZZ_CASES", "40"))
_NORMALISED = ("group_norm_mish", "conv1d_gnm", "residual_block1d")

cases = settings(
    max_examples=_CASES,
    deadline=None,  # the first call of an op loads kernels
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    derandomize="DPA_FUZZ_CASES" not in os.environ,
)
every_op = pytest.mark.parametrize("name", strategies.CALLS)


def _op(name):
    return getattr(torch.ops.dpa, name)


def _magnified(x: torch.Tensor, groups: int) -> float:
    """The most that a normalisation of (B, C, ...) makes of one rounding of its input."""
    parts = x.reshape(x.shape[0] * groups, -1).nan_to_num(0, 0, 0)
    deviation = (parts.var(1, correction=0) + 1e-5).sqrt()
    return (parts.abs().amax(1) / deviation).max().item()


def _allowed(name: str, sample: Sample, table: dict[str, float]) -> dict[str, float]:
    """The table's tolerance, and what a nearly constant group magnifies where the op normalises.

    A group's values minus their mean are right to a rounding of the values themselves; with a
    standard deviation of ``sqrt(eps)`` at the least, the division makes that 316 times as much.
    A convolution adds the roundings of its terms, which may cancel.
    """
    dtype = sample.floating()[0].dtype
    finite = widened(sample).map(lambda x: x.nan_to_num(0, 0, 0) if x.is_floating_point() else x)
    exact = finite.args
    wide = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    extra = 0.0
    if exact[0].numel() == 0:
        return table
    if name == "conv1d":
        terms = [None if x is None else x.abs() for x in exact[:3]]
        extra = wide * dpa.reference.conv1d(*terms, *exact[3:]).max().item()
    elif name == "group_norm_mish":
        gains = [t.abs().max().item() for t in finite.floating()[1:] if t.numel()]
        extra = 8 * wide * _magnified(exact[0], exact[1]) * max([1.0, *gains]) ** 2
    elif name == "conv1d_gnm":
        x = dpa.reference.conv1d(*exact[:3], 1, exact[1].shape[2] // 2)
        gains = [t.abs().max().item() for t in finite.floating()[1:] if t.numel()]
        # The convolution is kept in the dtype of its input, as two ops in a row would.
        rounding = torch.finfo(dtype).eps
        extra = 8 * rounding * _magnified(x, exact[5]) * max([1.0, *gains]) ** 2
    elif name == "residual_block1d":
        # Weights of the normalisations are at most 1, a row of a convolution's sums to at most 2.
        rounding, padding = torch.finfo(dtype).eps, exact[1].shape[2] // 2
        first = dpa.reference.conv1d(*exact[:3], 1, padding)
        x = dpa.reference.conv1d_gnm(exact[0], *exact[1:5], exact[11], 1e-5, *exact[13:])
        second = dpa.reference.conv1d(x, *exact[5:7], 1, padding)
        once = 1 + _magnified(first, exact[11])
        deviation = second.reshape(len(x) * exact[11], -1).var(1, correction=0).add(1e-5).sqrt()
        twice = _magnified(second, exact[11]) + 2 * once / deviation.min().item()
        extra = 8 * rounding * twice
    return {"rtol": table["rtol"], "atol": table["atol"] + extra}


def _terms(name: str, sample: Sample, grads: list[torch.Tensor]) -> list[float]:
    """How large the terms of each gradient's sums are, where the op makes them cancel.

    The gradients of a normalisation's input add up to zero over each group, and with them what a
    convolution before it makes of equal weights.
    """
    exact = widened(sample)
    if name != "conv1d_gnm":
        return [0.0] * len(exact.floating())
    normalisation = (exact.args[5], *exact.args[3:5], 1e-5, *exact.kwargs.values())
    out = dpa.reference.conv1d(*exact.args[:3], 1, exact.args[1].shape[2] // 2).requires_grad_()
    made = dpa.reference.group_norm_mish(out, *normalisation)
    (grad,) = torch.autograd.grad(made, out, grads[0].double())
    sizes = Sample(tuple(None if x is None else x.abs() for x in exact.args[:3])).requiring_grad()
    summed = dpa.reference.conv1d(*sizes.args, 1, exact.args[1].shape[2] // 2)
    summed.backward(grad.abs())
    terms = [x.grad.max().item() if x.numel() else 0.0 for x in sizes.floating()]
    return terms + [0.0] * (len(exact.floating()) - len(terms))


def _near_a_kink(name: str, sample: Sample) -> bool:
    """Whether rounding decides on which side of a clamp a value lies, and so on its gradient."""
    exact = widened(sample).args
    if name == "denoise":
        c0, c1 = dpa.reference._rows(exact[2].reshape(-1, 5), exact[3], exact[1])[:2]
        terms, clip = (exact[1] / c1, -c0 / c1 * exact[0]), 1.0
    elif name == "scheduler_step":
        r0, r1 = dpa.reference._rows(exact[2], exact[3], exact[1])[:2]
        terms, clip = (r0 * exact[1], r1 * exact[0]), exact[5]
    else:
        return False
    rounding = torch.finfo(torch.promote_types(sample.args[0].dtype, torch.float32)).eps
    distance = ((terms[0] + terms[1]).abs() - clip).abs()
    return bool((distance <= 4 * rounding * (terms[0].abs() + terms[1].abs() + clip)).any())


@every_op
@cases
@given(data=st.data())
def test_values(device, name, data):
    sample = strategies.sample(data, name, device, hostile=True)
    before = sample.map(torch.clone)
    with poisoned_memory():
        got = call(_op(name), sample)
    expected = call(getattr(dpa.reference, name), widened(sample))
    dtype = sample.floating()[0].dtype
    for g, e in zip(got, expected, strict=True):
        assert_close(g, e.to(dtype), equal_nan=True, **_allowed(name, sample, tolerance(dtype)))
    for x, y in zip(sample.floating(), before.floating(), strict=True):
        assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@every_op
@cases
@given(data=st.data())
def test_gradients(device, name, data):
    sample = strategies.sample(data, name, device, hostile=False)
    assume(not _near_a_kink(name, sample))
    dtype = sample.floating()[0].dtype
    ours, exact = sample.requiring_grad(), widened(sample).requiring_grad()
    out, out_exact = call(_op(name), ours), call(getattr(dpa.reference, name), exact)
    grads = random_gradients(out)
    with poisoned_memory():
        torch.autograd.backward(out, grads)
    torch.autograd.backward(out_exact, [g.double() for g in grads])
    allowed = _allowed(name, sample, gradient_tolerance(dtype))
    if name in _NORMALISED:
        # A deviation in the denominator of a gradient magnifies once more.
        assume(allowed["atol"] < 2 * gradient_tolerance(dtype)["atol"])
    terms = _terms(name, sample, grads)
    for a, b, size in zip(ours.floating(), exact.floating(), terms, strict=True):
        scale = max(1.0, size, b.grad.abs().max().item()) if b.grad.numel() else 1.0
        assert a.grad.dtype == dtype
        assert_close(a.grad, b.grad.to(dtype), rtol=allowed["rtol"], atol=allowed["atol"] * scale)


def _broken(tensor: torch.Tensor, how: str) -> torch.Tensor:
    if how == "rank":
        return tensor[(None,) * 3]
    if how == "device":
        return tensor.to("meta")
    if how == "sparse":
        return tensor.detach().clone().to_sparse()
    return tensor.to({"complex": torch.complex64, "bool": torch.bool}[how])


@every_op
@cases
@given(data=st.data())
def test_invalid_calls_raise(device, name, data):
    """One tensor of a valid call is spoilt."""
    sample = strategies.sample(data, name, device, hostile=True)
    tensors = [x for x in tree_leaves((sample.args, sample.kwargs)) if isinstance(x, torch.Tensor)]
    victim = tensors[data.draw(st.integers(0, len(tensors) - 1), label="argument")]
    how = data.draw(st.sampled_from(["rank", "device", "complex", "bool", "sparse"]), label="how")
    assume(not (how == "device" and len(tensors) == 1))
    assume(not (name == "group_norm_mish" and how == "rank" and victim is tensors[0]))
    assume(not (victim.dim() == 0 and how == "rank" and name in ("denoise", "scheduler_step")))
    spoilt = sample.map(lambda x: _broken(x, how) if x is victim else x)
    with pytest.raises((RuntimeError, NotImplementedError), match=rf"dpa::{name}"):
        call(_op(name), spoilt)


@every_op
@cases
@given(data=st.data())
def test_mixed_arguments_never_crash(device, name, data):
    """Tensors of two calls, shuffled: the reference's shapes, or an error that says why."""
    samples = [strategies.sample(data, name, device, hostile=True) for _ in range(2)]
    pick = data.draw(
        st.lists(st.booleans(), min_size=len(samples[0].args), max_size=len(samples[0].args))
    )
    args = tuple(samples[p].args[i] for i, p in enumerate(pick))
    try:
        got = call(_op(name), Sample(args, samples[0].kwargs))
    except RuntimeError as error:
        assert str(error).startswith(f"dpa::{name}: ")
        return
    expected = call(getattr(dpa.reference, name), Sample(args, samples[0].kwargs))
    assert [g.shape for g in got] == [e.shape for e in expected]


def test_every_op_is_drawn_or_spoilt():
    """An op that is registered and in no list fails here."""
    names = {name.removeprefix("dpa::").partition(".")[0] for name in op_names()}
    # Those of these endings are called by the op of the name before, with what it made.
    public = {name for name in names if not name.endswith(("_forward", "_backward"))}
    # The first has no tensors; test_parallel.py and test_normal_draws.py spoil the others.
    elsewhere = {"unet1d_weight_names", "parallel_move_", "loop_inputs_"}
    assert public == {*strategies.CALLS, *test_spoilt_calls.NAMES, *elsewhere}


def test_the_strategies_reach_the_corners():
    """Empty tensors, NaN and every layout are drawn: the properties are about them."""
    seen = {"empty": 0, "nan": 0, "gaps": 0, "expanded": 0}

    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(data=st.data())
    def draw(data):
        x = strategies.sample(data, "elementwise_mult", torch.device("cpu"), hostile=True).args[0]
        seen["empty"] += x.numel() == 0
        seen["nan"] += bool(x.isnan().any())
        seen["expanded"] += x.numel() > 1 and x.dim() > 0 and x.stride(0) == 0
        seen["gaps"] += x.numel() > 1 and x.dim() > 0 and x.stride(-1) == 2

    draw()
    assert all(seen.values()), seen
    assert (
        math.isfinite(strategies.DENORMAL) and torch.finfo(torch.float32).tiny > strategies.DENORMAL
    )
