"""What torch.compile must know about a function, said without importing torch._dynamo.

``torch.compiler`` has decorators for this, which import the whole compiler when they are applied:
1.4 s of every program's start, compiled or not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def constant_in_graphs(function: Function) -> Function:
    """Run a function while a graph is made, as ``torch.compiler.assume_constant_result`` does."""
    function._dynamo_marked_constant = True
    return function


def uncompiled(reason: str) -> Callable[[Function], Function]:
    """Keep a function out of compiled graphs, as ``torch.compiler.disable`` does."""

    def decorate(function: Function) -> Function:
        disabled: list[Function] = []

        @constant_in_graphs
        def disable() -> None:
            if not disabled:
                disabled.append(torch.compiler.disable(function, reason=reason))

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                return function(*args, **kwargs)
            disable()
            return disabled[0](*args, **kwargs)

        return call

    return decorate
