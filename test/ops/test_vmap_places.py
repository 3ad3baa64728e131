"""torch.vmap of every op with a rule, over every dimension of every argument.

No two dimensions share a size, the number of examples included; see support/distinct_sizes.py.
"""

import itertools
import random
import warnings

import pytest
import torch
from distinct_sizes import EXAMPLES, calls
from tolerances import gradient_tolerance, tolerance
from torch.testing import assert_close
from torch.utils._pytree import tree_flatten, tree_unflatten

_NAMES = sorted(calls(torch.randn))
# Steps on the way, which are not differentiated themselves.
_NO_GRADIENT = {"lltm_backward", "lltm_forward", "residual_block1d_forward", "conv1d_forward"}


@pytest.fixture(autouse=True)
def _no_slow_fallback():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*performance drop.*")
        yield


class _Call:
    """An op as a function of its tensors, lists of which are spread."""

    def __init__(self, name: str, device: torch.device, dtype: torch.dtype = torch.float64):
        op, args = calls(lambda *shape: torch.randn(shape, dtype=dtype))[name]
        self.op = getattr(torch.ops.dpa, op)
        leaves, self._spec = tree_flatten(args)
        self._leaves = [x.to(device) if isinstance(x, torch.Tensor) else x for x in leaves]
        self.places = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
        self.tensors = [self._leaves[i] for i in self.places]

    def __call__(self, *tensors):
        leaves = list(self._leaves)
        for i, x in zip(self.places, tensors, strict=True):
            leaves[i] = x
        out = self.op(*tree_unflatten(leaves, self._spec))
        # Gradients that are not wanted are none.
        return tuple(x for x in out if x is not None) if isinstance(out, tuple) else (out,)

    def mapped(self, dims):
        """Tensors with the mapped dimension put in, each example of other values."""
        return [
            x if d is None else torch.stack([_other(x, i) for i in range(EXAMPLES)], d)
            for x, d in zip(self.tensors, dims, strict=True)
        ]


def _other(x: torch.Tensor, i: int) -> torch.Tensor:
    if not x.is_floating_point():
        return (x + i) % 4  # rows of a table
    return x + 0.1 * i * torch.randn_like(x).abs()


def _patterns(name: str, tensors: list[torch.Tensor]):
    """Each argument alone at each place, all of them, all but one, and some other subsets."""
    ranks = [x.dim() for x in tensors]
    count = len(tensors)
    for i, rank in enumerate(ranks):
        for d in range(rank + 1):
            yield tuple(d if j == i else None for j in range(count))
    for d in range(max(ranks) + 1):
        yield tuple(min(d, rank) for rank in ranks)
    chosen = random.Random(name)
    place = lambda rank: chosen.randint(0, rank)  # noqa: E731
    for i in chosen.sample(range(count), min(count, 5)):
        if count > 1:
            yield tuple(None if j == i else place(rank) for j, rank in enumerate(ranks))
    for _ in range(6):
        dims = tuple(place(rank) if chosen.random() < 0.5 else None for rank in ranks)
        if any(d is not None for d in dims):
            yield dims


def _loop(call, dims, tensors):
    examples = [
        call(*(x if d is None else x.select(d, i) for x, d in zip(tensors, dims, strict=True)))
        for i in range(EXAMPLES)
    ]
    return tuple(map(torch.stack, zip(*examples, strict=True)))


def _gradients(out, leaves):
    weighted = [(x * torch.arange(x.numel(), device=x.device).view_as(x).cos()).sum() for x in out]
    return torch.autograd.grad(sum(weighted), leaves, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("name", _NAMES)
def test_values_and_gradients(device, name):
    call = _Call(name, device)
    for dims in _patterns(name, call.tensors):
        say = lambda text, dims=dims: f"mapped at {dims}: {text}"  # noqa: E731
        derived = name.split("-")[0] not in _NO_GRADIENT
        tensors = call.mapped(dims)
        leaves = [x.requires_grad_(derived) for x in tensors if x.is_floating_point()]
        got, expected = torch.vmap(call, dims)(*tensors), _loop(call, dims, tensors)
        assert_close(got, expected, **tolerance(torch.float64), msg=say)
        if derived:
            got, expected = _gradients(got, leaves), _gradients(expected, leaves)
            assert_close(got, expected, **gradient_tolerance(torch.float64), msg=say)


@pytest.mark.parametrize("name", [n for n in _NAMES if n[-1] not in "15"])
def test_empty_maps(device, name):
    call = _Call(name, device)
    shapes = [(0, *x.shape) for x in call(*call.tensors)]
    for d in range(2):
        dims = tuple(min(d, x.dim()) for x in call.tensors)
        tensors = [x.narrow(d, 0, 0) for x, d in zip(call.mapped(dims), dims, strict=True)]
        assert [x.shape for x in torch.vmap(call, dims)(*tensors)] == shapes


_MIXED = {
    "group_norm_mish": (1, 2),
    "group_norm_act": (1, 2),
    "conv1d-3": (1, 2),
    "conv1d-transposed-5": (1, 2),
    "conv1d_gnm-5": (1, 2, 3, 4),
    "joint_linear": (1, 2, 3, 4),
    "joint_linear-mish": (1, 2, 3, 4),
    "residual_block1d-3": tuple(range(1, 11)),
}


@pytest.mark.parametrize("name", _MIXED)
def test_float32_parameters_beside_16_bits(device, name):
    """Mixed precision: parameters keep their dtype, mapped or not."""
    call = _Call(name, device)
    wide = _MIXED[name]
    low = [x.to(torch.float32 if i in wide else torch.bfloat16) for i, x in enumerate(call.tensors)]
    call.tensors = low
    for mapped in itertools.chain([None], wide):
        dims = tuple(0 if mapped in (None, i) else None for i in range(len(low)))
        tensors = call.mapped(dims)
        got, expected = torch.vmap(call, dims)(*tensors), _loop(call, dims, tensors)
        assert_close(got, expected, rtol=2e-2, atol=4e-2, msg=lambda text, d=dims: f"{d}: {text}")


def test_one_example_is_checked(device):
    """A rule joins dimensions; it accepts nothing that the op refuses."""
    ops = torch.ops.dpa
    x = torch.randn(EXAMPLES, 2, 3, device=device)
    index = torch.zeros(EXAMPLES, 1, 2, dtype=torch.long, device=device)
    with pytest.raises(RuntimeError, match=r"dpa::scheduler_step: index must have one element"):
        torch.vmap(lambda i: ops.scheduler_step(x[0], x[0], x.new_ones(4, 6), i))(index)


@pytest.mark.parametrize("op", ["denoise", "scheduler_step"])
def test_numbers_as_samples(device, op):
    """A sample without dimensions is one number."""
    columns = {"denoise": 5, "scheduler_step": 6}[op]
    x, table = torch.randn(3, EXAMPLES, device=device), torch.rand(4, columns, device=device)
    step = lambda *t: getattr(torch.ops.dpa, op)(*t[:2], table, torch.tensor(1).to(x.device), t[2])  # noqa: E731
    expected = torch.stack([step(*x[:, i]) for i in range(EXAMPLES)])
    assert_close(torch.vmap(step)(*x), expected)
