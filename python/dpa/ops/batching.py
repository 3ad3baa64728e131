"""Batching rules: what ``torch.vmap`` makes of an op, in one call instead of a loop.

A rule folds the mapped dimension into one that the op has already: into the samples where every
example shares the parameters, and into the channels, group by group, where each has its own. Ops
without channels (``lltm``, ``denoise``, ``scheduler_step``) loop where each has its own.

The rules are in Python because functorch's public interface is: its C++ headers are internal, and
want a JSON library at build time.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from dpa.library.loader import when_loaded

_Dim = int | None


class _Fold:
    """Puts the mapped dimension, of size ``n``, beside dimension ``at`` and makes the two one.

    ``at`` counts in the tensor as the op sees it. A tensor that is not mapped is repeated.
    """

    def __init__(self, n: int):
        self.n = n

    def __call__(self, x: Tensor | None, dim: _Dim, at: int = 0) -> Tensor | None:
        return None if x is None else _leading(x, dim, self.n).movedim(0, at).flatten(at, at + 1)

    def undo(self, x: Tensor | None, size: int, at: int = 0) -> Tensor | None:
        """Take the two apart again, ``size`` being the op's; the mapped dimension is at ``at``."""
        return None if x is None else x.unflatten(at, (self.n, size))


def _leading(x: Tensor, dim: _Dim, n: int) -> Tensor:
    return x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)


def _shape(x: Tensor, dim: _Dim) -> list[int]:
    """The shape of one example."""
    return [size for i, size in enumerate(x.shape) if i != dim]


def _one(x, dim):
    """One example without its values: of a tensor, of each in a list; what is no tensor stays."""
    if isinstance(x, Tensor):
        return torch.empty(_shape(x, dim), dtype=x.dtype, device="meta")
    if isinstance(x, list | tuple):
        return [_one(t, d) for t, d in zip(x, dim or [None] * len(x), strict=True)]
    return x


def _dims(in_dims: tuple, count: int) -> list[_Dim]:
    """Where each of ``count`` arguments is mapped; ``in_dims`` leaves trailing defaults out."""
    return [*in_dims, *[None] * (count - len(in_dims))]


def _elementwise(op):
    def rule(info, in_dims, a, b, *rest):
        a, b = (_leading(x, d, info.batch_size) for x, d in zip((a, b), in_dims[:2], strict=True))
        return op(a, b, *rest), 0

    return rule


def _group_norm_mish(
    info,
    in_dims,
    input,
    num_groups,
    weight=None,
    bias=None,
    eps=1e-5,
    scale=None,
    shift=None,
    residual=None,
):
    x, _, w, b, _, sc, sh, r = _dims(in_dims, 8)
    fold, op = _Fold(info.batch_size), torch.ops.dpa.group_norm_mish
    if w is None and b is None:
        films = fold(scale, sc), fold(shift, sh)
        out = op(fold(input, x), num_groups, weight, bias, eps, *films, fold(residual, r))
        return fold.undo(out, _shape(input, x)[0]), 0
    out = op(
        fold(input, x, 1),
        fold.n * num_groups,
        fold(weight, w),
        fold(bias, b),
        eps,
        fold(scale, sc, 1),
        fold(shift, sh, 1),
        fold(residual, r, 1),
    )
    return fold.undo(out, _shape(input, x)[1], 1), 1


def _group_norm_mish_backward(
    info, in_dims, grad, input, num_groups, weight, bias, eps, scale, shift, output_mask
):
    """Gradients of the parameters are one an example, so requiring them splits the channels."""
    g, x, _, w, b, _, sc, sh, _ = in_dims
    fold, op = _Fold(info.batch_size), torch.ops.dpa.group_norm_mish_backward
    shared = w is None and b is None and not output_mask[1] and not output_mask[2]
    at = 0 if shared else 1
    grads = op(
        fold(grad, g, at),
        fold(input, x, at),
        num_groups if shared else fold.n * num_groups,
        weight if shared else fold(weight, w),
        bias if shared else fold(bias, b),
        eps,
        fold(scale, sc, at),
        fold(shift, sh, at),
        output_mask,
    )
    shape = _shape(input, x)
    places = (at, 0, 0, at, at)
    sizes = (shape[at], shape[1], shape[1], shape[at], shape[at])
    grads = tuple(map(fold.undo, grads, sizes, places))
    return grads, tuple(
        place if grad is not None else None for grad, place in zip(grads, places, strict=True)
    )


def _arithmetic(input, stride):
    """As in ops/conv1d/formula.cpp, where the reason is."""
    wide = input.device.type == "cpu" and input.dtype == torch.bfloat16 and stride > 1
    return torch.float32 if wide else input.dtype


def _convolution_of_groups(fold: _Fold, tensors, dims, stride, padding, transposed) -> Tensor:
    """Every example's convolution as a group of channels of one, where each has its own weight.

    Args:
        fold: of the examples.
        tensors: input, weight and bias.
        dims: where each is mapped.
        stride, padding, transposed: as of ``dpa::conv1d``.

    """
    (input, weight, bias), (x, w, b) = tensors, dims
    wide = _arithmetic(input, stride)
    parameter = lambda t, d: None if t is None else fold(t, d).to(input.dtype).to(wide)  # noqa: E731
    convolve = F.conv_transpose1d if transposed else F.conv1d
    return convolve(
        fold(input, x, 1).to(wide),
        parameter(weight, w),
        parameter(bias, b),
        stride=stride,
        padding=padding,
        groups=fold.n,
    ).to(input.dtype)


def _conv1d_gnm(
    info,
    in_dims,
    input,
    conv_weight,
    conv_bias,
    gn_weight,
    gn_bias,
    num_groups,
    eps=1e-5,
    scale=None,
    shift=None,
    residual=None,
):
    x, w, b, gw, gb, _, _, sc, sh, re = _dims(in_dims, 10)
    fold = _Fold(info.batch_size)
    if {w, b, gw, gb} == {None}:
        out = torch.ops.dpa.conv1d_gnm(
            fold(input, x),
            conv_weight,
            conv_bias,
            gn_weight,
            gn_bias,
            num_groups,
            eps,
            fold(scale, sc),
            fold(shift, sh),
            fold(residual, re),
        )
        return fold.undo(out, _shape(input, x)[0]), 0
    padding = _shape(conv_weight, w)[2] // 2
    out = torch.ops.dpa.group_norm_mish(
        _convolution_of_groups(fold, (input, conv_weight, conv_bias), (x, w, b), 1, padding, False),
        fold.n * num_groups,
        fold(gn_weight, gw),
        fold(gn_bias, gb),
        eps,
        fold(scale, sc, 1),
        fold(shift, sh, 1),
        fold(residual, re, 1),
    )
    return fold.undo(out, _shape(conv_weight, w)[0], 1), 1


def _loop(op, n: int, dims: list[_Dim], args: tuple):
    """Call ``op`` for every example: each has parameters of its own, and the op knows one set."""
    examples = [
        op(*(x if d is None else x.select(d, i) for x, d in zip(args, dims, strict=True)))
        for i in range(n)
    ]
    if not isinstance(examples[0], tuple):
        return torch.stack(examples)
    outputs = zip(*examples, strict=True)
    return tuple(None if out[0] is None else torch.stack(out) for out in outputs)


def _each(f, out):
    """``f`` of the output, or of every one that is there."""
    if isinstance(out, tuple):
        return tuple(None if x is None else f(x) for x in out)
    return f(out)


def _by_samples(op, samples: tuple[int, ...], index: int | None = None, own: tuple[int, ...] = ()):
    """Make a rule that folds the mapped dimension into the samples.

    Where an argument that samples share is mapped, or requires a gradient, it loops.

    Args:
        op: the op; its outputs begin with the dimension of the samples.
        samples: the arguments that do too.
        index: an argument of integers, one element or one a sample.
        own: places of shared arguments in the mask of gradients, which is the last argument.

    """

    def rule(info, in_dims, *args):
        dims = [
            d if isinstance(x, Tensor) else None
            for x, d in zip(args, _dims(in_dims, len(args)), strict=True)
        ]
        shared = set(range(len(args))) - {*samples, index}
        if any(dims[i] is not None for i in shared) or any(args[-1][i] for i in own):
            out = _loop(op, info.batch_size, dims, args)
        else:
            fold, shape = _Fold(info.batch_size), _shape(args[samples[0]], dims[samples[0]])
            number, size = not shape, math.prod(shape[:1])  # a sample may be one number
            take = (lambda x, d: None if x is None else _leading(x, d, fold.n)) if number else fold
            folded = [take(x, dims[i]) if i in samples else x for i, x in enumerate(args)]
            if index is not None:
                rows = _leading(args[index], dims[index], fold.n)
                rows = rows.reshape(fold.n, math.prod(rows.shape[1:]))
                folded[index] = rows.expand(fold.n, size).reshape(-1)
            out = _each(lambda x: x if number else fold.undo(x, size), op(*folded))
        return out, _each(lambda x: 0, out)

    return rule


def _conv1d(info, in_dims, input, weight, bias=None, stride=1, padding=0, transposed=False):
    x, w, b, _, _, _ = _dims(in_dims, 6)
    fold = _Fold(info.batch_size)
    if w is None and b is None:
        out = torch.ops.dpa.conv1d(fold(input, x), weight, bias, stride, padding, transposed)
        return fold.undo(out, _shape(input, x)[0]), 0
    out = _convolution_of_groups(
        fold, (input, weight, bias), (x, w, b), stride, padding, transposed
    )
    return fold.undo(out, _shape(weight, w)[1 if transposed else 0], 1), 1


def _conv1d_forward(info, in_dims, input, weight, bias, stride, padding, transposed):
    out, dim = _conv1d(info, in_dims, input, weight, bias, stride, padding, transposed)
    return (out, input.new_empty(info.batch_size, 0)), (dim, 0)


def _conv1d_backward(
    info, in_dims, grad, input, weight, bias, packed, stride, padding, transposed, output_mask
):
    """Every example's convolution is a group of channels."""
    g, x, w = in_dims[:3]
    fold = _Fold(info.batch_size)
    channels = _shape(weight, w)[1 if transposed else 0]
    wide = _arithmetic(input, stride)
    grads = torch.ops.aten.convolution_backward(
        fold(grad, g, 1).to(wide),
        fold(input, x, 1).to(wide),
        fold(weight, w).to(input.dtype).to(wide),
        [channels * fold.n],
        [stride],
        [padding],
        [1],
        transposed,
        [0],
        fold.n,
        output_mask,
    )
    types = (input.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
    grads = [None if d is None else d.to(t) for d, t in zip(grads, types, strict=True)]
    sizes = (_shape(input, x)[1], _shape(weight, w)[0], channels)
    places = (1, 0, 0)
    grads = tuple(map(fold.undo, grads, sizes, places))
    return grads, tuple(
        place if grad is not None else None for grad, place in zip(grads, places, strict=True)
    )


# The block's arguments that begin with the samples: input, scale, shift.
_BLOCK_SAMPLES = (0, 13, 14)


def _residual_block1d_forward(info, in_dims, *args):
    """As the other rules by samples, but the packed weights are the weights' alone."""
    dims = _dims(in_dims, len(args))
    if any(d is not None for i, d in enumerate(dims) if i not in _BLOCK_SAMPLES):
        op = torch.ops.dpa.residual_block1d_forward
        out = _loop(op, info.batch_size, dims, args)
        return out, _each(lambda x: 0, out)
    fold, size = _Fold(info.batch_size), _shape(args[0], dims[0])[0]
    folded = [fold(x, dims[i]) if i in _BLOCK_SAMPLES else x for i, x in enumerate(args)]
    *activations, packed1, packed2 = torch.ops.dpa.residual_block1d_forward(*folded)
    activations = [fold.undo(x, size) for x in activations]
    return (*activations, packed1, packed2), (0, 0, 0, 0, None, None)


def _joined(tensors: list[Tensor], dims: list[_Dim] | None, n: int, dtype: torch.dtype) -> Tensor:
    """Weights or biases of all layers, an example a matrix or a row."""
    each = zip(tensors, dims or [None] * len(tensors), strict=True)
    return torch.cat([_leading(x, d, n) for x, d in each], dim=1).to(dtype)


def _whole_input(input: Tensor, rest: Tensor | None, dims: list[_Dim], n: int) -> Tensor:
    """Both parts of the input, an example a matrix."""
    parts = [_leading(t, d, n) for t, d in zip((input, rest), dims, strict=True) if t is not None]
    return torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]


def _joint_linear(info, in_dims, input, weights, biases, rest=None):
    x, w, b, r = _dims(in_dims, 4)
    n, dtype = info.batch_size, input.dtype
    weight = _joined(weights, w, n, dtype).transpose(1, 2)
    bias = _joined(biases, b, n, dtype).unsqueeze(1)
    return torch.baddbmm(bias, _whole_input(input, rest, [x, r], n), weight), 0


def _joint_linear_backward(info, in_dims, grad, input, weights, biases, rest, output_mask):
    n, dtype = info.batch_size, input.dtype
    g = _leading(grad, in_dims[0], n)
    x = lambda: _whole_input(input, rest, [in_dims[1], in_dims[4]], n)  # noqa: E731
    weight = functools.cache(lambda: _joined(weights, in_dims[2], n, dtype))
    own = _shape(input, in_dims[1])[1]
    wanted = (
        lambda: torch.bmm(g, weight()[:, :, :own]),
        lambda: torch.bmm(g.transpose(1, 2), x()).to(weights[0].dtype),
        lambda: g.sum(1).to(biases[0].dtype),
        lambda: None if rest is None else torch.bmm(g, weight()[:, :, own:]),
    )
    grads = tuple(
        make() if is_wanted else None for make, is_wanted in zip(wanted, output_mask, strict=True)
    )
    return grads, tuple(None if d is None else 0 for d in grads)


def _checked(op, rule):
    """``rule``, once ``op`` has seen one example's shapes: a rule may accept what it rejects.

    An empty map needs nothing more than the shapes that it answers.
    """

    @functools.wraps(rule)
    def checked(info, in_dims, *args):
        dims = _dims(in_dims, len(args))
        out = op(*map(_one, args, dims))
        if info.batch_size:
            return rule(info, in_dims, *args)
        device = next(x.device for x in args if isinstance(x, Tensor))
        empty = lambda x: torch.empty((0, *x.shape), dtype=x.dtype, device=device)  # noqa: E731
        return _each(empty, out), _each(lambda x: 0, out)

    return checked


def register() -> None:
    """Give the ops their rules; the library must be loaded."""
    ops = torch.ops.dpa
    rules = {
        "elementwise_mult": _elementwise(ops.elementwise_mult),
        "fused_relu_add": _elementwise(ops.fused_relu_add),
        "group_norm_mish": _group_norm_mish,
        "group_norm_mish_backward": _group_norm_mish_backward,
        "conv1d": _conv1d,
        "conv1d_forward": _conv1d_forward,
        "conv1d_backward": _conv1d_backward,
        "conv1d_gnm": _conv1d_gnm,
        "joint_linear": _joint_linear,
        "joint_linear_backward": _joint_linear_backward,
        "residual_block1d": _by_samples(ops.residual_block1d, _BLOCK_SAMPLES),
        "residual_block1d_forward": _residual_block1d_forward,
        "residual_block1d_backward": _by_samples(
            ops.residual_block1d_backward, (0, 1, 14, 15, 16, 17, 18), own=tuple(range(1, 11))
        ),
        "lltm": _by_samples(ops.lltm, (0, 3, 4)),
        "lltm_forward": _by_samples(ops.lltm_forward, (0, 3, 4)),
        "lltm_backward": _by_samples(ops.lltm_backward, (0, 1, 2, 5, 6, 7), own=(1, 2)),
        "denoise": _by_samples(ops.denoise, (0, 1, 4), 3),
        "denoise_backward": _by_samples(ops.denoise_backward, (0, 1, 2, 5), 4, own=(2,)),
        "scheduler_step": _by_samples(ops.scheduler_step, (0, 1, 4), 3),
        "scheduler_step_backward": _by_samples(
            ops.scheduler_step_backward, (0, 1, 2, 5), 4, own=(2,)
        ),
    }
    for name, rule in rules.items():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"dpa::{name}", "FuncTorchBatched"):
            torch.library.register_vmap(f"dpa::{name}", _checked(getattr(ops, name), rule))


when_loaded(register)
