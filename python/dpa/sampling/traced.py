"""A denoiser of any kind, traced for a loop: what no sample reaches is computed once a call.

A loop calls its network with one observation and with timesteps that it knows. Ops of the network
that no sample reaches, such as the embedding of timesteps, what conditions give to scales, shifts,
keys and values, and casts of weights, need not run in every step: they run in front of the loop,
those that a timestep reaches for all steps at once (``torch.func.vmap``). What is left for a step
is rewritten for fewer kernels (:mod:`dpa.sampling.rewrites`).

In 16 bits it is that rest alone that computes in them, on weights that are cast in front of the
loop; timesteps and conditions are embedded in the network's own dtype.

A trace holds one behaviour of the network's Python. What makes that wrong, such as kernels that
write to memory without PyTorch's knowledge, shows where a loop's first replay is compared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dpa.sampling import rows
from dpa.sampling.rewrites import rewrite
from dpa.sampling.siblings import join, unify

# Bytes of what steps are given from in front of the loop, beyond which each computes it.
_AHEAD = 512 << 20
_TRACING = threading.Lock()  # a trace changes settings of the process
Predict = Callable[[Tensor, Tensor, Mapping[str, Tensor]], Tensor]


class TracedNetwork:
    """A network's trace for inputs of one kind.

    Args:
        predict: ``predict(sample, timesteps, conditions)``: the network.
        sample: (B, T, Da), of which the shape and the dtype count.
        timesteps: (S, B), of all steps.
        conditions: of the network, by name.
        dtype: what steps compute in.

    Raises:
        RuntimeError: where no trace stands for the network.

    """

    def __init__(
        self,
        predict: Predict,
        sample: Tensor,
        timesteps: Tensor,
        conditions: Mapping[str, Tensor],
        dtype: torch.dtype,
    ):
        self.dtype, self._names, steps = dtype, tuple(conditions), len(timesteps)
        traced = _trace(predict, sample, timesteps[0], conditions)
        first, second, *_ = traced.graph.find_nodes(op="placeholder")
        reached = _reached(traced.graph, first)
        unify(traced.graph)
        rewrite(traced.graph, reached)
        unify(traced.graph)
        join(traced.graph, reached)
        traced.graph.lint()
        of_sample, of_timestep = _reached(traced.graph, first), _reached(traced.graph, second)
        given = _crossing(traced.graph, of_sample)
        if steps * sum(_bytes(node) for node in given if node in of_timestep) > _AHEAD:
            of_sample |= of_timestep - {second}
            given = _crossing(traced.graph, of_sample)
        each, once = of_timestep - of_sample, set(traced.graph.nodes) - of_sample - of_timestep
        shared = [node for node in given if node not in each]
        self._of_steps = [node for node in given if node in each]
        self._is_timestep = [node is second for node in self._of_steps]
        to_each = [node for node in once if node.users.keys() & each]
        self._shared = len(shared)
        self._once = _part(traced, once, [], [*shared, *to_each])
        self._each = _part(traced, each, to_each, self._of_steps)
        self._step = _part(traced, of_sample, [*shared, *self._of_steps], None)

    def ahead(
        self, timesteps: Tensor, conditions: Mapping[str, Tensor]
    ) -> Callable[[Tensor, int], Tensor]:
        """Run what no sample reaches; return ``predict(sample, step)``."""
        found = self._once(*map(conditions.__getitem__, self._names))
        shared, to_each = found[: self._shared], found[self._shared :]
        each = lambda row: self._each(row, *to_each)  # noqa: E731
        stacked = torch.func.vmap(each)(timesteps) if self._of_steps else ()
        same = [value for value, is_it in zip(stacked, self._is_timestep, strict=True) if is_it]
        shared, stacked = self._cast(shared, []), self._cast(stacked, same)

        def predict(sample: Tensor, step: int) -> Tensor:
            rows = (value[step] for value in stacked)
            return self._step(sample.to(self.dtype), *shared, *rows).to(sample.dtype)

        return predict

    def _cast(self, values: Sequence[Any], but: Sequence[Tensor]) -> list[Any]:
        """Return values in the dtype of the steps, cast in few launches: weights are many."""
        cast, together = list(values), []
        for place, value in enumerate(values):
            wide = isinstance(value, Tensor) and value.is_floating_point()
            if wide and value.dtype != self.dtype and not any(value is one for one in but):
                cast[place] = torch.empty_like(value, dtype=self.dtype)
                if cast[place].stride() == value.stride():
                    together.append(place)
                else:  # it is spread out: one of them would keep the others from one launch
                    cast[place].copy_(value)
        if together:
            torch._foreach_copy_([cast[n] for n in together], [values[n] for n in together])
        return cast


def _trace(
    predict: Predict, sample: Tensor, timesteps: Tensor, conditions: Mapping[str, Tensor]
) -> fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx  # it takes a second to import

    names = tuple(conditions)

    def run(sample: Tensor, timesteps: Tensor, *values: Tensor) -> Tensor:
        return predict(sample, timesteps, dict(zip(names, values, strict=True)))

    run(sample, timesteps, *conditions.values())  # it may keep what it finds in its first call
    with _TRACING:
        fast = torch.backends.mha.get_fastpath_enabled()
        try:
            # The ops of PyTorch's fast path of transformers hide what parts of them need.
            torch.backends.mha.set_fastpath_enabled(False)
            functional = torch.func.functionalize(run)  # one that writes to no tensor
            traced = make_fx(functional, rows.parts())(sample, timesteps, *conditions.values())
        except Exception as error:
            raise RuntimeError(f"its network cannot be traced: {error}") from error
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
    traced.graph.eliminate_dead_code()
    for node in traced.graph.nodes:
        op = node.target
        known = isinstance(op, torch._ops.OpOverload)
        if known and (op._schema.is_mutable or _is_random(node)):
            raise RuntimeError(f"its network runs {op}")
    return traced


def _is_random(node: fx.Node) -> bool:
    """Whether an op uses random numbers: attention does for dropout alone."""
    op = node.target
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    names = [argument.name for argument in op._schema.arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    given = node.args[place] if len(node.args) > place else node.kwargs.get("dropout_p", 0.0)
    return given != 0.0


def _reached(graph: fx.Graph, origin: fx.Node) -> set[fx.Node]:
    """Return a node, and what is computed of it."""
    found = {origin}
    for node in graph.nodes:  # in the order of the trace
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _crossing(graph: fx.Graph, into: set[fx.Node]) -> list[fx.Node]:
    """Return the nodes outside of a set that nodes in it take."""
    return [n for n in graph.nodes if n not in into and not into.isdisjoint(n.users)]


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def _part(
    traced: fx.GraphModule, nodes: set[fx.Node], given: Iterable[fx.Node], results: Any
) -> fx.GraphModule:
    """Return some nodes of a trace as a module.

    Its arguments are the trace's own that are among them, then what is ``given``. It returns
    ``results``; None is what the trace returns.
    """
    part, copies = fx.Graph(), {}
    for node in traced.graph.nodes:
        if node.op == "placeholder" and node in nodes:
            copies[node] = part.node_copy(node)
    for node in given:
        copies[node] = part.placeholder(f"given_{node.name}")
        copies[node].meta = node.meta
    for node in traced.graph.nodes:
        if node in nodes and node.op not in ("placeholder", "output"):
            copies[node] = part.node_copy(node, copies.__getitem__)
    if results is None:
        (results,) = traced.graph.find_nodes(op="output")[0].args
    part.output(fx.map_arg(results, copies.__getitem__))
    part.eliminate_dead_code()
    return fx.GraphModule(traced, part)
