"""Batching rules: what ``torch.vmap`` makes of an op, in one call instead of a loop.

A rule folds the mapped dimension into one that the op has already: into the samples where every
example shares the parameters, and into the channels, group by group, where each has its own. Ops
without such groups (``lltm``, ``residual_block1d``, ``denoise``, ``scheduler_step``,
``spatial_softmax``, ``resize_crop_normalize``) loop where each has its own.

The rules are in Python because functorch's public interface is: its C++ headers are internal, and
want a JSON library at build time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dpa.library.loader import when_loaded

_Op = Callable[..., Any]


def _arithmetic(input: Tensor, stride: int) -> torch.dtype:
    """As in ops/conv1d/formula.cpp and ops/conv2d/formula.cpp, where the reasons are."""
    wide = input.dim() == 4 or (input.dtype == torch.bfloat16 and stride > 1)
    on_cpu = input.device.type == "cpu"
    return torch.promote_types(input.dtype, torch.float32) if wide and on_cpu else input.dtype


def _sizes(n: int, input: Tensor, stride: int, padding: int, transposed: bool) -> tuple[Any, ...]:
    """What ATen's convolutions take behind their tensors."""
    each = lambda size: [size] * (input.dim() - 2)  # noqa: E731
    return each(stride), each(padding), each(1), transposed, each(0), n


# The ops on the channels of n examples, side by side, each with parameters of its own.


def _convolution(n, input, weight, bias=None, stride=1, padding=0, transposed=False):
    dtype = _arithmetic(input, stride)
    rounded = lambda t: None if t is None else t.to(input.dtype).to(dtype)  # noqa: E731
    given = input.to(dtype), rounded(weight), rounded(bias)
    return torch.convolution(*given, *_sizes(n, input, stride, padding, transposed)).to(input.dtype)


def _convolution_backward(n, grad, input, weight, bias, packed, stride, padding, transposed, mask):
    dtype = _arithmetic(input, stride)
    given = grad.to(dtype), input.to(dtype), weight.to(input.dtype).to(dtype)
    sizes = [grad.shape[1]], *_sizes(n, input, stride, padding, transposed)
    grads = torch.ops.aten.convolution_backward(*given, *sizes, mask)
    types = input.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype
    return tuple(g if g is None else g.to(t) for g, t in zip(grads, types, strict=True))


def _conv2d_backward(n, grad, input, weight, stride, padding, mask):
    sizes = stride, padding, False, [*mask, False]
    return _convolution_backward(n, grad, input, weight, None, None, *sizes)[:2]


def _by_groups(name, at):
    """An op whose argument ``at`` is a number of groups: n examples have n times as many."""
    return lambda n, *x: getattr(torch.ops.dpa, name)(*x[:at], n * x[at], *x[at + 1 :])


def _conv1d_gnm(n, input, conv_weight, conv_bias, gn_weight, gn_bias, num_groups, *rest):
    x = _convolution(n, input, conv_weight, conv_bias, padding=conv_weight.shape[2] // 2)
    return torch.ops.dpa.group_norm_mish(x, n * num_groups, gn_weight, gn_bias, *rest)


def _conv2d_norm_act(n, input, weight, bias=None, scale=None, shift=None, residual=None, *rest):
    # Arguments that are their defaults do not come.
    num_groups, eps, stride, padding, relu = (*rest, *(0, 1e-5, 1, 0, True)[len(rest) :])
    as_input = lambda t: None if t is None else t.to(input.dtype)  # noqa: E731
    x = F.conv2d(input, as_input(weight), as_input(bias), stride, padding, groups=n)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if num_groups and x.numel():
        x = torch.group_norm(x, n * num_groups, eps=eps)  # F's wants several values a group
    for values, join in ((scale, torch.mul), (shift, torch.add)):
        x = x if values is None else join(x, values.to(x.dtype)[:, None, None])
    x = x if residual is None else x + residual
    return (x.relu() if relu else x).to(input.dtype)


def _apart(n: int, tensors: Sequence[Tensor | None], at: int = 0) -> Tensor:
    """Tensors side by side in each example, the examples first."""
    parts = [t.unflatten(at, (n, t.shape[at] // n)) for t in tensors if t is not None]
    return torch.cat(parts, at + 1).movedim(at, 0)


def _times_mish_slope(grad: Tensor, x: Tensor) -> Tensor:
    """Rounded once, as in ops/joint_linear/formula.cpp."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    t = F.softplus(wide).tanh()
    slope = t + wide * wide.sigmoid() * (1 - t * t)
    return (grad.to(slope.dtype) * slope).to(grad.dtype)


def _joint_linear(n, input, weights, biases, rest=None, mish=False):
    weight, bias = (_apart(n, t).to(input.dtype) for t in (weights, biases))
    x = _apart(n, [input, rest], 1)
    x = F.mish(x) if mish else x
    return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2)).movedim(0, 1).flatten(1)


def _joint_linear_backward(n, grad, input, weights, biases, rest, mask, mish=False):
    g, x, weight = _apart(n, [grad], 1), _apart(n, [input, rest], 1), _apart(n, weights)
    x = F.mish(x) if mish else x
    widths = input.shape[1] // n, 0 if rest is None else rest.shape[1] // n

    def of_part(w, part):
        sums = (g @ w.to(g.dtype)).movedim(0, 1).flatten(1)
        return _times_mish_slope(sums, part) if mish else sums

    own, others = weight.split(widths, 2)
    makes = (
        lambda: of_part(own, input),
        lambda: (g.transpose(1, 2) @ x).to(weights[0].dtype).flatten(0, 1),
        lambda: g.sum(1).to(biases[0].dtype).flatten(),
        lambda: None if rest is None else of_part(others, rest),
    )
    return tuple(make() if wanted else None for make, wanted in zip(makes, mask, strict=True))


# Each op: a sign an argument, a sign an output, and the op on channels where there is one.
# (s)amples first, then channels; a (b)atch, samples with statistics of their own, which folds into
# the channels alone; (c)hannels first: of parameters, which samples share, and their
# gradients; (i)ntegers, one or one a sample; - what is not mapped.
_BLOCK = "s" + "c" * 10 + "--sss"
_RULES: dict[str, tuple[str, str] | tuple[str, str, _Op]] = {
    "elementwise_mult": ("ss", "s"),
    "fused_relu_add": ("ss-", "s"),
    "sinusoidal_embedding": ("s--", "s"),
    "group_norm_mish": ("s-cc-sss", "s", _by_groups("group_norm_mish", 1)),
    "group_norm_mish_backward": ("ss-cc-ss-", "sccss", _by_groups("group_norm_mish_backward", 2)),
    "group_norm_act": ("s-cc-s-", "s", _by_groups("group_norm_act", 1)),
    "group_norm_act_backward": ("ss-cc-s--", "sccs", _by_groups("group_norm_act_backward", 2)),
    "batch_norm_act": ("bcc-b-", "b"),
    "batch_norm_act_forward": ("bcc-b-", "bcc"),
    "batch_norm_act_backward": ("bbcccc-b--", "bccb"),
    "conv2d": ("sc--", "s", lambda n, x, w, *sizes: _convolution(n, x, w, None, *sizes)),
    "conv2d_backward": ("ssc---", "sc", _conv2d_backward),
    "max_pool2d": ("s---", "s"),
    "max_pool2d_forward": ("s---", "ss"),
    "max_pool2d_backward": ("sss---", "s"),
    "conv1d": ("scc---", "s", _convolution),
    "conv1d_forward": ("scc---", "s-", lambda *x: (_convolution(*x), x[1].new_empty(0))),
    "conv1d_backward": ("ssccc----", "scc", _convolution_backward),
    "conv1d_gnm": ("scccc--sss", "s", _conv1d_gnm),
    "conv2d_norm_act": ("sccccs-----", "s", _conv2d_norm_act),
    "spatial_softmax": ("sc", "s"),
    "resize_crop_normalize": ("s--cc---", "s"),
    "joint_linear": ("sccs-", "s", _joint_linear),
    "joint_linear_backward": ("ssccs--", "sccs", _joint_linear_backward),
    "residual_block1d": (_BLOCK, "s"),
    "residual_block1d_forward": (_BLOCK, "ssss--"),
    "residual_block1d_backward": (f"s{_BLOCK}ssscc-", "s" + "c" * 10 + "sss"),
    "lltm": ("sccss", "ss"),
    "lltm_forward": ("sccss", "sss"),
    "lltm_backward": ("sssccsss-", "sccss"),
    "denoise": ("sscis", "s"),
    "denoise_backward": ("ssscis-", "sscs"),
    "scheduler_step": ("sscis-", "s"),
    "scheduler_step_backward": ("ssscis--", "sscs"),
}


def _each(f: Callable[[Tensor, Any], Any], x: Any, dim: Any) -> Any:
    """``f`` of a tensor and where it is mapped, of each in a list; what is no tensor stays."""
    if isinstance(x, list | tuple):
        return [_each(f, t, d) for t, d in zip(x, dim or [None] * len(x), strict=True)]
    return f(x, dim) if isinstance(x, Tensor) else x


def _tuple(out: Tensor | tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return out if isinstance(out, tuple) else (out,)


def _example(x: Tensor, dim: int | None) -> Tensor:
    """One example without its values."""
    shape = [size for i, size in enumerate(x.shape) if i != dim]
    return torch.empty(shape, dtype=x.dtype, device="meta")


def _folded(op: _Op, kinds: tuple[str, str], n: int, dims: list[Any], args: tuple, at: int):
    """Call ``op`` once, examples folded into the samples (``at`` is 0) or into the channels (1).

    Returns the outputs, and where each is mapped.
    """
    takes, gives = (signs.replace("b", "s") for signs in kinds)
    shape = _example(args[0], dims[0]).shape  # a sample may be one number
    folds = "sci" if at else "si"

    def fold(kind: str, x: Tensor, dim: int | None) -> Tensor:
        if kind not in folds:
            return x
        x = x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)
        place = at if kind == "s" else 0
        if kind == "i":
            x = x.reshape(n, x[0].numel()).expand(n, *shape[:1] or (1,))
        return x.movedim(0, place).flatten(place, place + 1) if x.dim() > 1 else x

    def apart(x: Tensor | None, place: int | None) -> Tensor | None:
        whole = x is None or place is None or not shape
        return x if whole else x.unflatten(place, (n, x.shape[place] // n))

    takes = takes[: len(args)]
    folded = [_each(partial(fold, k), x, d) for k, x, d in zip(takes, args, dims, strict=True)]
    places = [{"s": at, "c": 0}.get(kind) for kind in gives]
    return list(map(apart, _tuple(op(*folded)), places)), places


def _loop(op: _Op, n: int, dims: list[Any], args: tuple) -> list[Tensor | None]:
    """Call ``op`` for every example, and stack the outputs."""
    select = lambda i, x, d: x if d is None else x.select(d, i)  # noqa: E731
    outs = [_tuple(op(*map(partial(_each, partial(select, i)), args, dims))) for i in range(n)]
    return [None if x[0] is None else torch.stack(x) for x in zip(*outs, strict=True)]


def _rule(op: _Op, takes: str, gives: str, on_channels: _Op | None = None):
    """Make the rule of an op from its line in ``_RULES``."""

    def rule(info, in_dims, *args):
        n, dims = info.batch_size, [*in_dims, *[None] * (len(args) - len(in_dims))]
        # The op sees one example first: a rule may accept what the op rejects.
        example = op(*map(partial(_each, _example), args, dims))
        mapped = {
            kind
            for kind, dim in zip(takes, dims, strict=False)
            if any(d is not None for d in tree_leaves(dim))
        }
        of_batch = "b" in takes
        if "c" in gives and not of_batch:  # one gradient of a parameter for each example
            mask = next(x for x in reversed(args) if isinstance(x, list | tuple))
            mapped |= {kind for kind, wanted in zip(gives, mask, strict=True) if wanted}
        places: list[int | None] = [0] * len(gives)
        if n == 0:
            new = lambda x: torch.empty(0, *x.shape, dtype=x.dtype, device=args[0].device)  # noqa: E731
            outs = [None if x is None else new(x) for x in _tuple(example)]
        elif of_batch or "c" not in mapped:
            outs, places = _folded(op, (takes, gives), n, dims, args, int(of_batch))
        elif on_channels:
            outs, places = _folded(partial(on_channels, n), (takes, gives), n, dims, args, 1)
        else:
            outs = _loop(op, n, dims, args)
        places = [None if x is None else place for x, place in zip(outs, places, strict=True)]
        one = isinstance(example, Tensor)
        return (outs[0], places[0]) if one else (tuple(outs), tuple(places))

    return rule


def register() -> None:
    """Give the ops their rules; the library must be loaded."""
    for name, line in _RULES.items():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"dpa::{name}", "FuncTorchBatched"):
            torch.library.register_vmap(f"dpa::{name}", _rule(getattr(torch.ops.dpa, name), *line))


when_loaded(register)
