"""Rewrites of a traced network for fewer kernels, each of which holds for any values.

They are looked for in what a sample reaches, and may add nodes that none does.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor, fx

_aten = torch.ops.aten
_RESHAPE, _MUL, _CAT, _NEG = (
    _aten.reshape.default,
    _aten.mul.Tensor,
    _aten.cat.default,
    _aten.neg.default,
)


def rewrite(graph: fx.Graph, reached: set[fx.Node]) -> None:
    """Rewrite what there is to rewrite in these nodes of a graph, those that a sample reaches."""
    rules = _view, _clone, _sign, _add_scaled, _modulation, _channel_norm, _bias, _gelu_of_linear
    for rule in rules:
        for node in list(graph.nodes):
            if node.op == "call_function" and node in reached:
                with graph.inserting_before(node):
                    new = rule(graph, node, reached)
                if new is not None:
                    node.replace_all_uses_with(new)
        graph.eliminate_dead_code()
    graph.lint()


def _view(graph: fx.Graph, node: fx.Node, reached: set[fx.Node]) -> None:
    """Views rest on strides, which other kernels and dtypes may leave otherwise."""
    if node.target in (_aten.view.default, _aten._unsafe_view.default):
        node.target = _RESHAPE


def _clone(graph: fx.Graph, node: fx.Node, reached: set[fx.Node]) -> fx.Node | None:
    """A copy in another order, where all that comes of it are views that need no such order."""
    free = _is(node, _aten.clone.default) and _needs_no_copy(node, _value(node.args[0]))
    return node.args[0] if free else None


def _needs_no_copy(node: fx.Node, value: Tensor) -> bool:
    """Whether the node's users would take a value of these strides without copying it."""
    for user in node.users:
        if _is(user, _aten.select.int):
            if not _needs_no_copy(user, value.select(*user.args[1:])):
                return False
        elif _is(user, _RESHAPE):
            try:
                value.view(user.args[1])
            except (RuntimeError, ValueError):
                return False
        else:
            return False
    return True


def _sign(graph: fx.Graph, node: fx.Node, reached: set[fx.Node]) -> fx.Node | None:
    """``cat([-a, b]) * c``, as in rotary embeddings: the sign goes to ``c``, if no sample's."""
    if not _is(node, _MUL) or not all(isinstance(term, fx.Node) for term in node.args):
        return None
    joined, factor = node.args if _is(node.args[0], _CAT) else node.args[::-1]
    if not _is(joined, _CAT) or factor in reached:
        return None
    parts, dim = joined.args[0], [*joined.args, 0][1]
    dim = dim % _value(joined).dim() - _value(joined).dim()
    size, of = _value(joined).shape[dim], _value(factor).shape
    if not any(_is(part, _NEG) for part in parts) or len(of) < -dim or of[dim] != size:
        return None
    pieces, end = [], 0
    for part in parts:
        start, end = end, end + _value(part).shape[dim]
        pieces.append(graph.call_function(_aten.slice.Tensor, (factor, dim, start, end)))
        if _is(part, _NEG):
            pieces[-1] = graph.call_function(_NEG, (pieces[-1],))
    signed = add_node(graph, _CAT, (pieces, dim), factor, reached)
    plain = [part.args[0] if _is(part, _NEG) else part for part in parts]
    turned = add_node(graph, _CAT, (plain, dim), joined, reached)
    return add_node(graph, _MUL, (turned, signed), node, reached)


def _add_scaled(graph: fx.Graph, node: fx.Node, reached: set[fx.Node]) -> fx.Node | None:
    """``a + b * c``, which modulation, gates and rotations are made of: one kernel."""
    if not _is(node, _aten.add.Tensor) or node.kwargs:
        return None
    for scaled, other in (node.args[::-1], node.args):  # strides as the sum's: the first term's
        if not _is(scaled, _MUL) or len(scaled.users) != 1:
            continue
        terms = other, *scaled.args
        if all(isinstance(term, fx.Node) for term in terms) and _alike(node, *terms):
            return add_node(graph, _aten.addcmul.default, terms, node, reached)
    return None


def _modulation(graph: fx.Graph, node: fx.Node, reached: set[fx.Node]) -> fx.Node | None:
    """LayerNorm without weights, then a scale and shift of one sample: they are the weights."""
    if not _is(node, _aten.addcmul.default):
        return None
    shift, *factors = node.args
    norms = [
        n for n in factors if _is(n, operator.getitem) and n.args[1] == 0 and len(n.users) == 1
    ]
    if not norms or not _is(norms[0].args[0], _aten.native_layer_norm.default):
        return None
    norm, scale = norms[0].args[0], next(n for n in factors if n is not norms[0])
    x, shape, weight, bias, eps = norm.args
    size = math.prod(shape)
    last = _value(x).shape[-len(shape) :]
    for value in map(_value, (scale, shift)):
        if value.numel() != size or value.shape[-len(shape) :] != last:
            return None
    if weight is not None or bias is not None or not _alike(node, x, scale, shift):
        return None
    affine = [add_node(graph, _RESHAPE, (term, shape), term, reached) for term in (scale, shift)]
    made = add_node(graph, norm.target, (x, shape, *affine, eps), norm, reached)
    return add_node(graph, operator.getitem, (made, 0), node, reached)


def _channel_norm(graph: fx.Graph, node: fx.Node, reached: set[fx.Node]) -> fx.Node | None:
    """``(x - mean) / sqrt(variance + eps) * scale + shift``, over channels: LayerNorm's kernel."""
    if not _is(node, _aten.addcmul.default):
        return None
    shift, *factors = node.args
    quotient, scale = factors if _is(factors[0], _aten.div.Tensor) else factors[::-1]
    centred, root = quotient.args if _is(quotient, _aten.div.Tensor) else (None, None)
    inner = root.args[0] if _is(root, _aten.sqrt.default) else None
    variance, eps = inner.args if _is(inner, _aten.add.Tensor) else (None, None)
    x, mean = centred.args if _is(centred, _aten.sub.Tensor) else (None, None)
    if not isinstance(eps, float) or not _are_moments(x, variance, mean):
        return None
    if inner.kwargs or centred.kwargs:
        return None
    channels = _value(x).shape[1]
    per_channel = all(tuple(_value(n).shape) == (1, channels, 1) for n in (scale, shift))
    if not per_channel or not _alike(node, x, scale, shift):
        return None
    rows = add_node(graph, _aten.transpose.int, (x, 1, 2), x, reached)
    affine = [add_node(graph, _RESHAPE, (n, [channels]), n, reached) for n in (scale, shift)]
    given = rows, [channels], *affine, eps
    made = add_node(graph, _aten.native_layer_norm.default, given, x, reached)
    found = add_node(graph, operator.getitem, (made, 0), x, reached)
    return add_node(graph, _aten.transpose.int, (found, 1, 2), node, reached)


def _are_moments(x: Any, variance: Any, mean: Any) -> bool:
    """Whether these are the biased variance and the mean of (B, C, T) over its channels."""
    if _is(variance, operator.getitem) and _is(mean, operator.getitem):
        both, places = variance.args[0], (variance.args[1], mean.args[1])
        over = _is(both, _aten.var_mean.correction) and both is mean.args[0] and places == (0, 1)
    else:
        both = variance
        over = _is(variance, _aten.var.correction) and _is(mean, _aten.mean.dim)
        over = over and mean.args == (x, [1], True) and not mean.kwargs
    biased = over and both.kwargs == {"correction": 0, "keepdim": True}
    return biased and both.args == (x, [1]) and _value(x).dim() == 3


def _bias(graph: fx.Graph, node: fx.Node, reached: set[fx.Node]) -> fx.Node | None:
    """``reshape(a @ b) + bias``: one kernel."""
    if not _is(node, _aten.add.Tensor) or node.kwargs:
        return None
    for shaped, bias in (node.args, node.args[::-1]):
        if not _is(shaped, _RESHAPE) or not isinstance(bias, fx.Node) or len(shaped.users) != 1:
            continue
        gemm = shaped.args[0]
        if not _is(gemm, _aten.mm.default) or len(gemm.users) != 1:
            continue
        columns = _value(gemm).shape[1]
        if _value(shaped).shape[-1] == columns and _value(bias).shape == (columns,):
            terms = bias, *gemm.args
            made = add_node(graph, _aten.addmm.default, terms, gemm, reached)
            return add_node(graph, _RESHAPE, (made, shaped.args[1]), node, reached)
    return None


def _gelu_of_linear(graph: fx.Graph, node: fx.Node, reached: set[fx.Node]) -> fx.Node | None:
    """GELU by tanh, of a linear layer: in the epilogue of the GEMM."""
    if not _is(node, _aten.gelu.default) or node.kwargs.get("approximate") != "tanh":
        return None
    shaped = node.args[0]
    inner = shaped.args[0] if _is(shaped, _RESHAPE) and len(shaped.users) == 1 else shaped
    if not _is(inner, _aten.addmm.default) or len(inner.users) != 1 or inner.kwargs:
        return None
    if not _value(inner).is_cuda or _value(inner.args[0]).dim() != 1:
        return None
    target = _aten._addmm_activation.default
    made = add_node(graph, target, inner.args, inner, reached, use_gelu=True)
    return add_node(graph, _RESHAPE, (made, list(_value(node).shape)), node, reached)


def _is(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is target


def _value(node: fx.Node) -> Tensor:
    return node.meta["val"]


def _alike(*nodes: fx.Node) -> bool:
    """Whether all are tensors of one dtype and device."""
    return len({(_value(node).dtype, _value(node).device) for node in nodes}) == 1


def add_node(
    graph: fx.Graph,
    target: Any,
    args: tuple[Any, ...],
    like: fx.Node,
    reached: set[fx.Node],
    **options: Any,
) -> fx.Node:
    """Add a node whose value is of another's kind; a sample reaches it where it is reached."""
    node = graph.call_function(target, args, options)
    node.meta = dict(like.meta)
    if not reached.isdisjoint(node.all_input_nodes):
        reached.add(node)
    return node
