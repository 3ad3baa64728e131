"""Methods of a user's subclass that wrap those of a known class, and what a comparison misses."""

from __future__ import annotations

import dis
import itertools
import re
from collections.abc import Collection, Iterator
from types import CodeType, FunctionType

from torch import nn

# What changes some values and leaves others: a comparison shows those of its own call.
_PARTIAL = re.compile(
    r"(clamp|clip|nan_to_num|masked_fill|masked_scatter|relu)_?"
    r"|clamp_(min|max)|minimum|maximum|where|hardtanh|threshold"
)
# As Python 3.10 to 3.14 name them; a test for None alone is no matter of values.
_BRANCH = re.compile(r"POP_JUMP_(FORWARD_|BACKWARD_)?IF_(TRUE|FALSE)|RAISE_VARARGS")


def acts_on_some_values(kind: type, method: str) -> str | None:
    """Say why a class's method, or one that it calls, may act in other calls than a compared one.

    Only what calls the method of a base is asked: there a known class computes, and the rest is a
    guard around it. What a whole loop of a user's own does to its values is compared.
    """
    functions = _with_called(kind, method)
    bases = {base.__name__ for base in kind.__mro__}
    for function in functions:
        codes = list(_codes(function.__code__))
        names = {name for code in codes for name in code.co_names}
        by_name = function.__name__ in names and not bases.isdisjoint(names)
        if not by_name and "__class__" not in function.__code__.co_freevars:
            continue
        where = f"{function.__qualname__.rpartition('>.')[2]} wraps another"
        if named := min(filter(_PARTIAL.fullmatch, names), default=None):
            return f"{where} and names {named}, which changes some values alone"
        steps = (one for code in codes for one in dis.get_instructions(code))
        if any(_BRANCH.fullmatch(one.opname) for one in steps):
            return f"{where} and does not do the same in every call"
    return None


def does_more(kind: type, method: str, names: Collection[str], branches: bool) -> str | None:
    """Say what a class's method, or one that it calls, does that a published one does not.

    Args:
        kind: the class; what ``nn.Module`` itself has is left out.
        method: its name.
        names: what the published one, and what it calls, name.
        branches: whether the published one has branches.

    """
    for function in _with_called(kind, method):
        if function.__module__ == nn.Module.__module__:
            continue
        for code in _codes(function.__code__):
            if other := min({*code.co_names} - {*names}, default=None):
                return f"its {function.__name__} names {other}, which the published one does not"
            opnames = (one.opname for one in dis.get_instructions(code))
            if not branches and any(map(_BRANCH.fullmatch, opnames)):
                return f"its {function.__name__} does not do the same in every call"
    return None


def _with_called(kind: type, method: str) -> list[FunctionType]:
    """Return what a class and its bases have as a method, and what that calls of theirs."""
    functions = _functions(kind, method)
    called = {name for function in functions for name in _read_of_self(function.__code__)}
    for name in sorted(called - {method}):
        functions += _functions(kind, name)
    return functions


def _functions(kind: type, name: str) -> list[FunctionType]:
    """Return what a class and its bases have under a name."""
    found = [vars(base).get(name) for base in kind.__mro__]
    return [function for function in found if isinstance(function, FunctionType)]


def _read_of_self(code: CodeType) -> Iterator[str]:
    """Yield the attributes of its first argument that a method reads."""
    for one in _codes(code):
        for before, step in itertools.pairwise(dis.get_instructions(one)):
            loaded = before.argval if isinstance(before.argval, tuple) else (before.argval,)
            of_self = before.opname.startswith("LOAD_") and loaded[-1:] == code.co_varnames[:1]
            if of_self and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                yield step.argval


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code and that of functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
