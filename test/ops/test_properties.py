"""Any valid call equals the reference, any invalid one raises and says why: drawn at random.

`make test` generates a few cases of each, `make fuzz` ten thousand of each.
"""

import math
import os
from itertools import zip_longest

import pytest
import strategies
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from proofs import Sample, call, poisoned_memory, proofs_by_op, random_gradients, widened
from strategies import roundoff
from tolerances import gradient_tolerance, tolerance
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves

_CASES = int(os.environ.get("DPA_FUZZ_CASES", "40"))

cases = settings(
    max_examples=_CASES,
    deadline=None,  # the first call of an op loads kernels
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    derandomize="DPA_FUZZ_CASES" not in os.environ,
)
_PROOFS = proofs_by_op()
every_op = pytest.mark.parametrize("name", _PROOFS)


def _allowed(proofs, sample: Sample, table: dict[str, float]) -> dict[str, float]:
    """The table's tolerance, and what the op's own arithmetic magnifies of a rounding."""
    finite = widened(sample).map(lambda x: x.nan_to_num(0, 0, 0) if x.is_floating_point() else x)
    extra = proofs.rounding(sample, finite) if finite.args[0].numel() else 0.0
    return {"rtol": table["rtol"], "atol": table["atol"] + extra}


def _near_a_kink(proofs, sample: Sample) -> bool:
    """Whether rounding decides on which side of a clamp a value lies, and so on its gradient."""
    clamped = proofs.clamped(widened(sample))
    if clamped is None:
        return False
    (a, b), clip = clamped
    distance = ((a + b).abs() - clip).abs()
    return bool((distance <= 4 * roundoff(sample, True) * (a.abs() + b.abs() + clip)).any())


@every_op
@cases
@given(data=st.data())
def test_values(device, name, data):
    proofs = _PROOFS[name]
    sample = strategies.sample(data, proofs, device, hostile=True)
    before = sample.map(torch.clone)
    with poisoned_memory():
        got = call(proofs.op, sample)
    expected = call(proofs.reference, widened(sample))
    dtype = sample.floating()[0].dtype
    for g, e in zip(got, expected, strict=True):
        assert_close(g, e.to(dtype), equal_nan=True, **_allowed(proofs, sample, tolerance(dtype)))
    for x, y in zip(sample.floating(), before.floating(), strict=True):
        assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@every_op
@cases
@given(data=st.data())
def test_gradients(device, name, data):
    proofs = _PROOFS[name]
    sample = strategies.sample(data, proofs, device, hostile=False)
    assume(not _near_a_kink(proofs, sample))
    dtype = sample.floating()[0].dtype
    ours, exact = sample.requiring_grad(), widened(sample).requiring_grad()
    out, out_exact = call(proofs.op, ours), call(proofs.reference, exact)
    grads = random_gradients(out)
    with poisoned_memory():
        torch.autograd.backward(out, grads)
    torch.autograd.backward(out_exact, [g.double() for g in grads])
    allowed = _allowed(proofs, sample, gradient_tolerance(dtype))
    if proofs.normalised:
        # A deviation in the denominator of a gradient magnifies once more.
        assume(allowed["atol"] < 2 * gradient_tolerance(dtype)["atol"])
    terms = proofs.cancelling(widened(sample), grads)
    pairs = zip(ours.floating(), exact.floating(), strict=True)
    for (a, b), size in zip_longest(pairs, terms, fillvalue=0.0):
        scale = max(1.0, size, b.grad.abs().max().item()) if b.grad.numel() else 1.0
        assert a.grad.dtype == dtype
        assert_close(a.grad, b.grad.to(dtype), rtol=allowed["rtol"], atol=allowed["atol"] * scale)


def _corrupted(tensor: torch.Tensor, how: str) -> torch.Tensor:
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
    """One tensor of a valid call is corrupted."""
    proofs = _PROOFS[name]
    sample = strategies.sample(data, proofs, device, hostile=True)
    tensors = [x for x in tree_leaves((sample.args, sample.kwargs)) if isinstance(x, torch.Tensor)]
    victim = tensors[data.draw(st.integers(0, len(tensors) - 1), label="argument")]
    how = data.draw(st.sampled_from(["rank", "device", "complex", "bool", "sparse"]), label="how")
    assume(not (how == "device" and len(tensors) == 1))
    assume(not proofs.takes(sample, victim, how))
    corrupted = sample.map(lambda x: _corrupted(x, how) if x is victim else x)
    with pytest.raises((RuntimeError, NotImplementedError), match=rf"dpa::{name}"):
        call(proofs.op, corrupted)


@every_op
@cases
@given(data=st.data())
def test_mixed_arguments_never_crash(device, name, data):
    """Tensors of two calls, shuffled: the reference's shapes, or an error that says why."""
    proofs = _PROOFS[name]
    samples = [strategies.sample(data, proofs, device, hostile=True) for _ in range(2)]
    pick = data.draw(
        st.lists(st.booleans(), min_size=len(samples[0].args), max_size=len(samples[0].args))
    )
    args = tuple(samples[p].args[i] for i, p in enumerate(pick))
    try:
        got = call(proofs.op, Sample(args, samples[0].kwargs))
    except RuntimeError as error:
        assert str(error).startswith(f"dpa::{name}: ")
        return
    expected = call(proofs.reference, Sample(args, samples[0].kwargs))
    assert [g.shape for g in got] == [e.shape for e in expected]


def test_the_strategies_reach_the_corners():
    """Empty tensors, NaN and every layout are drawn: the properties are about them."""
    seen = {"empty": 0, "nan": 0, "gaps": 0, "expanded": 0}

    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(data=st.data())
    def draw(data):
        x = strategies.sample(
            data, _PROOFS["elementwise_mult"], torch.device("cpu"), hostile=True
        ).args[0]
        seen["empty"] += x.numel() == 0
        seen["nan"] += bool(x.isnan().any())
        seen["expanded"] += x.numel() > 1 and x.dim() > 0 and x.stride(0) == 0
        seen["gaps"] += x.numel() > 1 and x.dim() > 0 and x.stride(-1) == 2

    draw()
    assert all(seen.values()), seen
    assert (
        math.isfinite(strategies.DENORMAL) and torch.finfo(torch.float32).tiny > strategies.DENORMAL
    )
