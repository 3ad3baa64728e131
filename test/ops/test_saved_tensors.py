"""What a forward saves may come back elsewhere: hooks on saved tensors move, copy and re-lay them.

Every op with a backward, and every module, gives the gradients that it gives without hooks. A
forward says what of it is valid; a backward that concluded it from strides or addresses would err.
"""

import re
from pathlib import Path

import pytest
import torch
from distinct_sizes import calls
from proofs import poisoned_memory, strided
from tolerances import gradient_tolerance
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.testing import assert_close
from torch.utils._pytree import tree_flatten, tree_unflatten

import dpa


def _at_odd_offset(x: torch.Tensor) -> torch.Tensor:
    """The same values and strides, one element behind an aligned address."""
    if x.numel() == 0:
        return x
    if 0 in x.stride():
        x = x.clone(memory_format=torch.contiguous_format)
    reach = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return x.new_zeros(reach + 1).as_strided(x.shape, x.stride(), 1).copy_(x)


def _other_order(x: torch.Tensor) -> torch.Tensor:
    """Contiguous where it was channels-last, and the reverse."""
    if x.dim() != 3:
        return x.clone()
    return x.contiguous() if x.stride(1) == 1 else x.mT.contiguous().mT


# What hooks do to a tensor when it is read again.
_READS = {
    "cloned": lambda x: x.clone(memory_format=torch.contiguous_format),
    "strided": strided,
    "offset": _at_odd_offset,
    "order": _other_order,
}
_HOOKS = {name: lambda f=f: saved_tensors_hooks(lambda x: x, f) for name, f in _READS.items()}
_HOOKS["offloaded"] = save_on_cpu
_each_hook = pytest.mark.parametrize("hooks", _HOOKS.values(), ids=_HOOKS)

_OPS = [name for name in sorted(calls(torch.randn)) if name != "lltm_backward"]  # which has none


def _gradients(function, leaves):
    out = function(*leaves)
    out = [x for x in (out if isinstance(out, tuple) else (out,)) if x.requires_grad]
    weighted = [(x * torch.arange(x.numel(), device=x.device).view_as(x).cos()).sum() for x in out]
    return lambda: torch.autograd.grad(sum(weighted), leaves, allow_unused=True)


def _compare(function, leaves, hooks, dtype):
    expected = _gradients(function, leaves)()
    with poisoned_memory():
        with hooks():
            run = _gradients(function, leaves)
        got = run()
    assert_close(got, expected, **gradient_tolerance(dtype))


@_each_hook
@pytest.mark.parametrize("name", _OPS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_ops(device, name, hooks, dtype):
    op, args = calls(lambda *shape: torch.randn(shape, dtype=dtype))[name]
    flat, spec = tree_flatten(args)
    flat = [x.to(device) if isinstance(x, torch.Tensor) else x for x in flat]
    places = [
        i for i, x in enumerate(flat) if isinstance(x, torch.Tensor) and x.is_floating_point()
    ]

    def function(*leaves):
        given = list(flat)
        for i, x in zip(places, leaves, strict=True):
            given[i] = x
        return getattr(torch.ops.dpa, op)(*tree_unflatten(given, spec))

    _compare(function, [flat[i].requires_grad_() for i in places], hooks, dtype)


def _channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.mT.contiguous().mT


def _conv_block(new):
    return dpa.nn.Conv1dBlock(16, 64, 3, n_groups=8), (_channels_last(new(2, 16, 12)),)


def _residual_block(new):
    block = dpa.nn.ConditionalResidualBlock1D(16, 64, 20, n_groups=8, cond_predict_scale=True)
    return block, (_channels_last(new(2, 16, 12)), new(2, 20))


def _unet(new):
    unet = dpa.nn.ConditionalUnet1D(
        5, global_cond_dim=6, diffusion_step_embed_dim=16, down_dims=(64, 128), kernel_size=3
    )
    return lambda x, g: unet(x, 3, global_cond=g), (new(2, 8, 5), new(2, 6)), unet


def _cell(new):
    cell = dpa.nn.LLTM(9, 16)
    return lambda x, h, c: cell(x, (h, c)), (new(3, 9), new(3, 16), new(3, 16)), cell


_MODULES = {f.__name__[1:]: f for f in (_conv_block, _residual_block, _unet, _cell)}


def _module(name, device, dtype):
    new = lambda *shape: torch.randn(shape, device=device)  # noqa: E731
    function, inputs, *rest = _MODULES[name](new)
    module = rest[0] if rest else function
    module.to(device)
    low = dtype == torch.bfloat16

    def call(*leaves):
        with torch.autocast(device.type, dtype, enabled=low):
            out = function(*leaves[: len(inputs)])
        return tuple(x.float() for x in out) if isinstance(out, tuple) else out.float()

    return call, [x.requires_grad_() for x in inputs], list(module.parameters())


def test_every_op_and_module_is_here():
    """Found, not listed: the ops with an autograd kernel that has a backward, and dpa.nn."""
    sources = (Path(__file__).parents[2] / "ops").glob("*/autograd.cpp")
    kernels = [
        re.findall(r'm\.impl\("(\w+)", (?:&\w+_autograd|formula_)', f.read_text()) for f in sources
    ]
    found = {name for names in kernels for name in names}
    assert len(found) > 10 and found == {name.split("-")[0] for name in _OPS}
    modules = {kind for kind in map(vars(dpa.nn).get, dpa.nn.__all__) if isinstance(kind, type)}
    made = [make(torch.randn) for make in _MODULES.values()]
    assert {type(rest[0] if rest else function) for function, _, *rest in made} == modules


@_each_hook
@pytest.mark.parametrize("name", _MODULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_modules(device, name, hooks, dtype):
    """In float32, and in mixed precision, where a GPU runs the library's own convolutions."""
    call, inputs, parameters = _module(name, device, dtype)
    _compare(lambda *leaves: call(*leaves), [*inputs, *parameters], hooks, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parameters_that_hooks_align(device, dtype):
    """A flat buffer's parameters lie at odd offsets in the forward, and aligned in the backward."""
    call, inputs, parameters = _module("residual_block", device, dtype)
    expected = _gradients(call, [*inputs, *parameters])()
    for p in parameters:
        p.data = _at_odd_offset(p.data)
    _compare(call, [*inputs, *parameters], _HOOKS["cloned"], dtype)
    got = _gradients(call, [*inputs, *parameters])()
    assert_close(got, expected, **gradient_tolerance(dtype))


def test_kept_tensors_are_checked(device):
    """The backwards take what their forwards gave, and nothing else."""
    new = lambda *shape: torch.randn(shape, device=device)  # noqa: E731
    cases = calls(torch.randn)
    op, args = cases["residual_block1d_backward"]
    for place, name, wrong in (
        (0, "grad", new(2, 8, 8)),
        (17, "conv1", new(2, 8, 8)),
        (19, "conv2", new(2, 8, 9).double()),
        (20, "packed1", new(3)),
        (21, "packed2", new(2, 0)),
    ):
        given = [x.to(device) if isinstance(x, torch.Tensor) else x for x in args]
        given[place] = wrong
        with pytest.raises(RuntimeError, match=rf"dpa::{op}: {name} must have"):
            getattr(torch.ops.dpa, op)(*given)
    op, args = cases["conv1d_backward-3"]
    given = [x.to(device) if isinstance(x, torch.Tensor) else x for x in args]
    given[4] = new(3)
    with pytest.raises(RuntimeError, match=rf"dpa::{op}: packed must have shape"):
        getattr(torch.ops.dpa, op)(*given)
