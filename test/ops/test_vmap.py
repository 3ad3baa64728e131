"""torch.vmap over the ops: equal to a loop over examples, in one call, with every transform."""

import warnings

import pytest
import torch
from proofs import Sample
from tolerances import gradient_tolerance, tolerance
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

_N = 3
_OPS = torch.ops.dpa


class _Calls(TorchDispatchMode):
    """Names of the ops that reach a backend; those on meta tensors compute nothing."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not any(isinstance(x, torch.Tensor) and x.is_meta for x in args):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _no_slow_fallback():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*performance drop.*")
        yield


def _pair(dtype=torch.float64):
    return Sample(tuple(torch.randn(2, 5, dtype=dtype) for _ in range(2)))


def _norm(dtype=torch.float64):
    new = lambda *shape: torch.randn(shape, dtype=dtype)  # noqa: E731
    return Sample((new(2, 6, 5), 3, new(6), new(6), 1e-5, new(2, 6), new(2, 6)))


def _conv(dtype=torch.float64):
    new = lambda *shape: torch.randn(shape, dtype=dtype)  # noqa: E731
    return Sample(
        (new(2, 4, 7), new(6, 4, 3), new(6), new(6), new(6), 3, 1e-5, new(2, 6), new(2, 6))
    )


# The op, its sample, which floating tensors are mapped and in which dimension.
_CASES = [
    (_OPS.elementwise_mult, _pair, (0, 0)),
    (_OPS.elementwise_mult, _pair, (2, None)),
    (_OPS.fused_relu_add, _pair, (1, 0)),
    (_OPS.fused_relu_add, _pair, (None, 2)),
    (_OPS.group_norm_mish, _norm, (0, None, None, None, None)),
    (_OPS.group_norm_mish, _norm, (3, None, None, 1, None)),
    (_OPS.group_norm_mish, _norm, (1, 0, 1, 0, 2)),
    (_OPS.group_norm_mish, _norm, (None, 1, None, None, None)),
    (_OPS.conv1d_gnm, _conv, (0, None, None, None, None, None, 2)),
    (_OPS.conv1d_gnm, _conv, (2, 1, 1, 0, 0, 1, 0)),
    (_OPS.conv1d_gnm, _conv, (None, 3, None, None, None, None, None)),
    (_OPS.conv1d_gnm, _conv, (None, None, None, 0, None, None, None)),
]
_IDS = [f"{op.__name__.split('::')[-1]}-{dims}" for op, _, dims in _CASES]
_each_case = pytest.mark.parametrize("op, make, dims", _CASES, ids=_IDS)


def _mapped(device, make, dims, n=_N, dtype=torch.float64):
    """The op as a function of its floating tensors, and those with a mapped dimension put in."""
    sample = make(dtype).map(lambda x: x.to(device))
    tensors = []
    for x, dim in zip(sample.floating(), dims, strict=True):
        if dim is not None:
            shape = list(x.shape)
            shape.insert(dim, n)
            x = torch.randn(shape, dtype=dtype, device=device)
        tensors.append(x)
    return lambda op: lambda *t: op(*sample.with_floating(t).args), tensors


def _loop(f, dims, tensors, n=_N):
    """What vmap stands for."""
    examples = [
        f(*(x if d is None else x.select(d, i) for x, d in zip(tensors, dims, strict=True)))
        for i in range(n)
    ]
    if isinstance(examples[0], tuple):
        return tuple(map(torch.stack, zip(*examples, strict=True)))
    return torch.stack(examples)


@_each_case
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_values_in_one_call(device, op, make, dims, dtype):
    bind, tensors = _mapped(device, make, dims, dtype=dtype)
    with _Calls() as calls:
        got = torch.vmap(bind(op), dims)(*tensors)
    assert sum(name.startswith("dpa.") and "backward" not in name for name in calls.names) == 1
    assert_close(got, _loop(bind(op), dims, tensors), **tolerance(dtype))


@_each_case
def test_vmap_of_grad(device, op, make, dims):
    bind, tensors = _mapped(device, make, dims)
    total = lambda *t: bind(op)(*t).sin().sum()  # noqa: E731
    gradient = torch.func.grad(total, tuple(range(len(tensors))))
    with _Calls() as calls:
        got = torch.vmap(gradient, dims)(*tensors)
    assert sum("_backward" in name and name.startswith("dpa.") for name in calls.names) <= 1
    expected = _loop(gradient, dims, tensors)
    assert_close(got, expected, **gradient_tolerance(torch.float64))


@_each_case
def test_gradients_through_vmap(device, op, make, dims):
    bind, tensors = _mapped(device, make, dims)
    leaves = [x.requires_grad_() for x in tensors]
    got = torch.autograd.grad(torch.vmap(bind(op), dims)(*leaves).sin().sum(), leaves)
    expected = torch.autograd.grad(_loop(bind(op), dims, leaves).sin().sum(), leaves)
    assert_close(got, expected, **gradient_tolerance(torch.float64))


@_each_case
def test_tangents(device, op, make, dims):
    """vmap(jvp) and jvp(vmap)."""
    bind, tensors = _mapped(device, make, dims)
    tangents = [torch.randn_like(x) for x in tensors]
    f, mapped = bind(op), torch.vmap(bind(op), dims)
    push = lambda *both: torch.func.jvp(f, both[: len(dims)], both[len(dims) :])[1]  # noqa: E731
    expected = _loop(push, dims * 2, tensors + tangents)
    got = torch.vmap(push, dims * 2)(*tensors, *tangents)
    assert_close(got, expected, **gradient_tolerance(torch.float64))
    got = torch.func.jvp(mapped, tuple(tensors), tuple(tangents))[1]
    assert_close(got, expected, **gradient_tolerance(torch.float64))


@_each_case
def test_vmap_of_vmap(device, op, make, dims):
    """The inner map sees tensors of the outer one, some of which it does not map itself."""
    bind, tensors = _mapped(device, make, dims)
    f = bind(op)
    first = next(i for i, d in enumerate(dims) if d is not None)
    outer = tuple(0 if i == first else None for i in range(len(dims)))
    stacked = list(tensors)
    stacked[first] = torch.stack([tensors[first], -tensors[first]])
    inner = torch.vmap(f, dims)
    assert_close(torch.vmap(inner, outer)(*stacked), _loop(inner, outer, stacked, n=2))


@_each_case
def test_jacobians(device, op, make, dims):
    sample = make().map(lambda x: x.to(device))
    tensors = sample.floating()
    f = lambda *t: op(*sample.with_floating(t).args)  # noqa: E731
    where = tuple(i for i, d in enumerate(dims) if d is not None)
    reverse = torch.func.jacrev(f, where)(*tensors)
    forward = torch.func.jacfwd(f, where)(*tensors)
    assert_close(reverse, forward, **gradient_tolerance(torch.float64))


def _cell(dtype=torch.float64):
    new = lambda *shape: torch.randn(shape, dtype=dtype)  # noqa: E731
    return Sample((new(2, 4), new(9, 7), new(9), new(2, 3), new(2, 3)))


def _denoising(index):
    def make(dtype=torch.float64):
        new = lambda *shape: torch.randn(shape, dtype=dtype)  # noqa: E731
        table = torch.rand(5, 5, dtype=dtype) + 0.5
        return Sample((new(2, 4), new(2, 4), table, torch.tensor(index), new(2, 4)))

    return make


def _scheduling(index):
    def make(dtype=torch.float64):
        new = lambda *shape: torch.randn(shape, dtype=dtype)  # noqa: E731
        return Sample((new(2, 4), new(2, 4), new(5, 6), torch.tensor(index), new(2, 4), 1.0))

    return make


def _cell_op(*args):
    return torch.stack(_OPS.lltm(*args))


# Ops whose samples take the mapped dimension, and loop where each example has a table or weights of
# its own. Beside the dimensions: how many calls that makes.
_SAMPLE_CASES = [
    (_cell_op, _cell, (0, None, None, 1, 2), 1),
    (_cell_op, _cell, (None, None, None, 1, None), 1),
    (_cell_op, _cell, (1, 0, 1, None, 0), _N),
    (_OPS.denoise, _denoising(3), (0, 1, None, None), 1),
    (_OPS.denoise, _denoising([0, 4]), (None, 2, None, 0), 1),
    (_OPS.denoise, _denoising([2]), (0, 0, 1, 0), _N),
    (_OPS.scheduler_step, _scheduling(0), (2, None, None, None), 1),
    (_OPS.scheduler_step, _scheduling([3, 1]), (0, 1, None, 2), 1),
    (_OPS.scheduler_step, _scheduling([4]), (None, 0, 2, None), _N),
]
_each_sample_case = pytest.mark.parametrize("op, make, dims, count", _SAMPLE_CASES)


@_each_sample_case
def test_samples_in_one_call(device, op, make, dims, count):
    bind, tensors = _mapped(device, make, dims)
    with _Calls() as calls:
        got = torch.vmap(bind(op), dims)(*tensors)
    assert sum(name.startswith("dpa.") for name in calls.names) == count
    assert_close(got, _loop(bind(op), dims, tensors))


@_each_sample_case
def test_gradients_of_samples(device, op, make, dims, count):
    bind, tensors = _mapped(device, make, dims)
    total = lambda *t: bind(op)(*t).sin().sum()  # noqa: E731
    gradient = torch.func.grad(total, tuple(range(len(tensors))))
    got, expected = torch.vmap(gradient, dims)(*tensors), _loop(gradient, dims, tensors)
    assert_close(got, expected, **gradient_tolerance(torch.float64))


@pytest.mark.parametrize(
    "forward, backward, make, shared",
    [
        (_OPS.lltm_forward, _OPS.lltm_backward, _cell, (1, 2)),
        (_OPS.denoise, _OPS.denoise_backward, _denoising([0, 4]), (2,)),
        (_OPS.scheduler_step, _OPS.scheduler_step_backward, _scheduling(3), (2,)),
    ],
)
def test_backward_ops(device, forward, backward, make, shared):
    """One call, unless the gradient of what samples share is wanted."""
    args = make().map(lambda x: x.to(device)).args
    places = [
        i for i, x in enumerate(args) if isinstance(x, torch.Tensor) and x.is_floating_point()
    ]
    out = forward(*args)
    outputs = out[:2] if isinstance(out, tuple) else (out,)
    kept = out[2:] if isinstance(out, tuple) else ()
    grads = torch.randn(len(outputs), _N, *outputs[0].shape, dtype=args[0].dtype, device=device)
    for everything, count in ((False, 1), (True, _N)):
        mask = [everything or i not in shared for i in range(len(places))]
        run = lambda *g: tuple(x for x in backward(*g, *args, *kept, mask) if x is not None)  # noqa: E731, B023
        with _Calls() as calls:
            got = torch.vmap(run)(*grads)
        assert sum(name.startswith("dpa.") for name in calls.names) == count
        assert_close(got, _loop(run, (0,) * len(grads), grads))


@_each_sample_case
def test_transforms_of_samples(device, op, make, dims, count):
    """Jacobians, a map of a map, and an empty map."""
    bind, tensors = _mapped(device, make, dims)
    f, mapped = bind(op), torch.vmap(bind(op), dims)
    examples = [x if d is None else x.select(d, 0) for x, d in zip(tensors, dims, strict=True)]
    reverse, forward = (j(f, 0)(*examples) for j in (torch.func.jacrev, torch.func.jacfwd))
    assert_close(reverse, forward, **gradient_tolerance(torch.float64))
    first = next(i for i, d in enumerate(dims) if d is not None)
    outer = tuple(0 if i == first else None for i in range(len(dims)))
    stacked = [torch.stack([x, -x]) if i == first else x for i, x in enumerate(tensors)]
    assert_close(torch.vmap(mapped, outer)(*stacked), _loop(mapped, outer, stacked, n=2))
    bind, tensors = _mapped(device, make, dims, n=0)
    assert torch.vmap(bind(op), dims)(*tensors).shape == (0, *f(*examples).shape)


@pytest.mark.parametrize(
    "op, make", [(_OPS.denoise, _denoising), (_OPS.scheduler_step, _scheduling)]
)
def test_mapped_rows_of_a_table(device, op, make):
    """Each example at a row of its own: one number, or one a sample."""
    args = make(0)().map(lambda x: x.to(device)).args
    for index in (torch.tensor([0, 3, 4]), torch.tensor([[0, 1], [4, 4], [2, 0]])):
        run = lambda i: op(*args[:3], i, *args[4:])  # noqa: E731
        with _Calls() as calls:
            got = torch.vmap(run)(index.to(device))
        assert sum(name.startswith("dpa.") for name in calls.names) == 1
        assert_close(got, torch.stack([run(i) for i in index.to(device)]))


def test_ensembles(device):
    """Parameters of several models at once: what torch.func.stack_module_state is for."""
    from dpa.nn import Conv1dBlock

    blocks = [Conv1dBlock(3, 8, 5, n_groups=4).to(device) for _ in range(4)]
    parameters, _ = torch.func.stack_module_state(blocks)
    x = torch.randn(2, 3, 9, device=device)

    def run(weights):
        return torch.func.functional_call(blocks[0], weights, (x,))

    got = torch.vmap(run)(parameters)
    assert_close(got, torch.stack([block(x) for block in blocks]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", range(2, 12))
def test_arguments_that_are_their_defaults(device, count):
    """functorch leaves out those at the end; a rule finds them again."""
    new = lambda *shape: torch.randn(shape, dtype=torch.float64, device=device)  # noqa: E731
    weights, bias, x, residual = new(_N, 6, 4, 3, 3), new(6), new(2, 4, 7, 7), new(2, 6, 4, 4)
    rest = (bias, bias, bias, residual if count > 9 else None, 3, 1e-5, 2, 1, False)[: count - 2]
    call = lambda weight: _OPS.conv2d_norm_act(x, weight, *rest)  # noqa: E731
    assert_close(torch.vmap(call)(weights), torch.stack([call(w) for w in weights]))


def test_groups_of_one_value(device):
    """PyTorch's function refuses them, and the op does not: a norm of one value is its shift."""
    new = lambda *shape: torch.randn(shape, dtype=torch.float64, device=device)  # noqa: E731
    weights, x, norm = new(_N, 6, 4, 1, 1), new(1, 4, 1, 1), new(6)
    call = lambda w: _OPS.conv2d_norm_act(x, w, norm, norm, norm, None, 6)  # noqa: E731
    assert_close(torch.vmap(call)(weights), torch.stack([call(w) for w in weights]))


def test_compiled(device):
    bind, tensors = _mapped(device, _norm, (1, 0, 1, 0, 2))
    mapped = torch.vmap(bind(_OPS.group_norm_mish), (1, 0, 1, 0, 2))
    compiled = torch.compile(lambda *t: mapped(*t), backend="aot_eager", fullgraph=True)
    assert_close(compiled(*tensors), mapped(*tensors))


def test_empty_map(device):
    bind, tensors = _mapped(device, _norm, (0, 0, None, None, None), n=0)
    got = torch.vmap(bind(_OPS.group_norm_mish), (0, 0, None, None, None))(*tensors)
    assert got.shape == (0, 2, 6, 5)


def test_rejected(device):
    """A rule lets nothing pass that the op rejects."""
    x = torch.randn(_N, 2, 4, 7, device=device)
    with pytest.raises(RuntimeError, match=r"dpa::elementwise_mult: b must have the shape of a"):
        torch.vmap(_OPS.elementwise_mult, (0, None))(x, x[0, 0])
    with pytest.raises(RuntimeError, match=r"dpa::group_norm_mish: num_groups must be positive"):
        torch.vmap(lambda x: _OPS.group_norm_mish(x, 3))(x)
    weight = torch.randn(_N, 6, 4, 2, device=device)
    with pytest.raises(RuntimeError, match=r"dpa::conv1d_gnm: conv_weight must have an odd kernel"):
        torch.vmap(lambda x, w: _OPS.conv1d_gnm(x, w, None, None, None, 3))(x, weight)
