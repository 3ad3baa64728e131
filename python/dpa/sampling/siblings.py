"""What a network does alike to neighbouring parts of one tensor, done to both at once.

Rotary embeddings turn queries and keys, two parts of one projection, by the same ops and tables.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from dpa.sampling.rewrites import add_node

_aten = torch.ops.aten
_POINTWISE = (_aten.mul.Tensor, _aten.add.Tensor, _aten.addcmul.default, _aten.neg.default)
_ALONG = (_aten.slice.Tensor, _aten.cat.default)  # their second argument is a dimension
Pairs = dict[fx.Node, fx.Node]


def unify(graph: fx.Graph) -> None:
    """Let nodes that compute the same of the same be one."""
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op in ("call_function", "get_attr"):
            leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
            kinds = tuple((type(leaf), leaf) for leaf in leaves)
            first = seen.setdefault((node.op, node.target, kinds, spec), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def join(graph: fx.Graph, reached: set[fx.Node]) -> None:
    """Join what is done alike to ``x[i]`` and ``x[i + 1]``, in what a sample reaches."""
    for base in [node for node in graph.nodes if node in reached]:
        selects = [node for node in base.users if node.target is _aten.select.int]
        parts = {node.args[2]: node for node in selects if node.args[1] == 0}
        for place, part in parts.items():
            if place >= 0 and place + 1 in parts:
                _join(graph, reached, base, place, _alike(graph, part, parts[place + 1]))
    graph.eliminate_dead_code()


def _alike(graph: fx.Graph, first: fx.Node, second: fx.Node) -> Pairs:
    """Return what is computed alike of two nodes, in the order of the graph."""
    pairs, rank = {first: second}, first.meta["val"].dim()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        known = next((n for n in inputs if n in pairs), None)
        if node in pairs or known is None or node.target not in (*_POINTWISE, *_ALONG):
            continue
        others = [n for n in inputs if n not in pairs]
        if node.target in _ALONG and (others or node.kwargs):
            continue
        if any(n in pairs.values() or n.meta["val"].dim() > rank for n in others):
            continue
        wanted = fx.map_arg((node.args, node.kwargs), lambda n: pairs.get(n, n))
        for twin in pairs[known].users:
            if twin.target is node.target and (twin.args, twin.kwargs) == wanted:
                pairs[node] = twin
                break
    return pairs


def _join(graph: fx.Graph, reached: set[fx.Node], base: fx.Node, place: int, pairs: Pairs) -> None:
    both = {*pairs, *pairs.values()}
    order = {node: number for number, node in enumerate(graph.nodes)}
    last = max(both, key=order.__getitem__)
    outside = [user for node in both for user in node.users if user not in both]
    if len(pairs) == 1 or any(order[user] < order[last] for user in outside):
        return
    joined: Pairs = {}
    with graph.inserting_before(last.next):
        # Their values are those of one part: kind and device count.
        for first in pairs:
            if not joined:
                args = base, 0, place, place + 2
                joined[first] = add_node(graph, _aten.slice.Tensor, args, first, reached)
                continue
            args = fx.map_arg(first.args, lambda node: joined.get(node, node))
            if first.target in _ALONG:
                args = (args[0], _further(args[1:2]), *args[2:])
            # Numbers go by name: `alpha` of add, `value` of addcmul.
            joined[first] = add_node(graph, first.target, args, first, reached, **first.kwargs)
        for first, node in list(joined.items())[1:]:
            for number, one in enumerate((first, pairs[first])):
                if one.users.keys() - both:
                    args = node, 0, number
                    part = add_node(graph, _aten.select.int, args, one, reached)
                    one.replace_all_uses_with(part, lambda user: user not in both)


def _further(dim: tuple[int, ...]) -> int:
    """Return a dimension behind one that comes in front."""
    place = dim[0] if dim else 0
    return place + 1 if place >= 0 else place
