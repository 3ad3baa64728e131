"""The original run beside its replacement, on the same input: whether they agree."""

from __future__ import annotations

import numbers
import threading
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dpa.library.checks import first_line, require
from dpa.packed.agreement import proves, relative_error
from dpa.tracking.weights import MODES

# Comparisons in a row in which others used the stream, and those that found a difference again.
_UNDECIDED = 16

# Runs one side, on random numbers of the generator that it is given, else of the caller's.
Run = Callable[[torch.Generator | None], Any]


@dataclass(frozen=True)
class Options:
    """The options of :func:`dpa.accelerate`, whose docstring explains them."""

    dtype: torch.dtype | None = None
    mode: str = "loop"
    tolerance: float | None = None
    fallback: bool = True
    weights: str = "tracked"
    training_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for what is no value of an option."""
        for name, choices in (("mode", ("loop", "step", "chain")), ("weights", MODES)):
            value, rule = getattr(self, name), f"be one of {', '.join(choices)}"
            require(value in choices, f"accelerate: {name}", rule, repr(value))
        right = self.dtype in (None, torch.float32, torch.float16, torch.bfloat16)
        require(right, "accelerate: dtype", "be float32, float16 or bfloat16", self.dtype)
        right = self.training_dtype in (None, torch.bfloat16)
        require(right, "accelerate: training_dtype", "be bfloat16", self.training_dtype)
        number = isinstance(self.tolerance, numbers.Real) and 0 < self.tolerance < float("inf")
        right = self.tolerance is None or number
        require(right, "accelerate: tolerance", "be positive and finite", self.tolerance)


def say_fallback(what: str, why: str, fallback: bool) -> None:
    """Warn that the original runs, and why; raise where the user wants no fallback."""
    if not fallback:
        raise RuntimeError(f"dpa: {what} {why}, and fallback is False")
    warnings.warn(
        f"dpa: {what} {why}, so the original runs; dpa.explain says more",
        RuntimeWarning,
        stacklevel=4,
    )


def tensors_of(result: Any) -> list[Tensor]:
    """Return the tensors in nested containers."""
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


class _SharedNumbers(TorchDispatchMode):
    """Whether this thread may take random numbers of a stream that others use."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        random = torch.Tag.nondeterministic_seeded in func.tags
        self.taken |= random and kwargs.get("generator") is None
        return func(*args, **kwargs)


@dataclass
class ShadowRun:
    """What comparisons of an original with its replacement found, by kind of call.

    A comparison takes the replacement's random numbers from a generator of its own, so it advances
    no shared stream. Where others used the original's in the meantime, it says nothing, and is made
    again on private generators or at the next call. So does a difference that is found while others
    write weights, which the two sides read at different times.

    Attributes:
        what: the replacement, for messages.
        fallback: whether the original runs where they differ, or an error is raised.
        basis: gives what else a verdict of difference rests on; another answer, and it is void.
        errors: relative errors by kind of call.
        agreed: the kinds of which both agree.
        failed: what the last comparison found that failed, or None.
        undecided: how many comparisons in a row said nothing.

    """

    what: str
    fallback: bool = True
    basis: Callable[[], Any] = lambda: None
    errors: dict[Hashable, float] = field(default_factory=dict)
    agreed: set[Hashable] = field(default_factory=set)
    failed: str | None = None
    undecided: int = 0
    _bases: dict[Hashable, Any] = field(default_factory=dict)
    _voided: int = 0

    def forget(self) -> None:
        """Compare every kind of call again."""
        for kind in list(self.errors):
            self.drop(kind)
        self.failed, self.undecided, self._voided = None, 0, 0

    def drop(self, kind: Hashable) -> None:
        """Compare a kind of call again."""
        self.errors.pop(kind, None)
        self._bases.pop(kind, None)
        self.agreed.discard(kind)

    def passed(self, kind: Hashable) -> bool | None:
        """Whether replacement and original agreed in calls of this kind; None before a verdict."""
        if kind in self.agreed or kind not in self.errors:
            return True if kind in self.agreed else None
        if self._voided < _UNDECIDED and self._bases[kind] != self.basis():
            self.drop(kind)
            self.failed, self._voided = None, self._voided + 1
            return None
        return False

    def leave(self) -> None:
        """Raise where the original runs for a difference, and the user wants no fallback."""
        if not self.fallback:
            say_fallback(self.what, self.failed or "differs from the original", False)

    def run_both(
        self,
        kind: Hashable,
        limit: float,
        original: Run,
        replacement: Run,
        *,
        stream: torch.Generator | None = None,
        parts: Callable[[Any], Sequence[Tensor]] = lambda result: (result,),
        tells: Callable[[Any], bool] | None = None,
        private: bool = False,
    ) -> Any:
        """Run the original, then the replacement beside it; return the original's result.

        Args:
            kind: of the call: all that the verdict holds for.
            limit: the largest relative error that passes.
            original: runs the one.
            replacement: runs the other; an exception is no less a difference.
            stream: the original's generator; None where it uses no random numbers.
            parts: the tensors of a result that are compared.
            tells: whether agreeing with a result proves anything; each part by itself by default.
            private: whether the original can be given a generator.

        """
        stamp = self.basis()
        before = None if stream is None else stream.get_state()
        expected = original(None)
        after = None if stream is None else stream.get_state()
        if not all(isinstance(part, Tensor) for part in parts(expected)):
            self._refuse(kind, "does not return a tensor")
            return expected
        if not (tells(expected) if tells else all(map(proves, parts(expected)))):
            return expected  # and the next call is the first
        try:
            error = _error(expected, replacement, stream, before, after, parts)
            if error is None and private:
                own = torch.Generator(stream.device)
                own.set_state(before)
                shared = stream.get_state()
                with _SharedNumbers() as seen:
                    again = original(own)
                used = own.get_state()
                error = _error(again, replacement, own, before, used, parts)
                # Beside the generator that it is given, or instead. Attention may, and does not.
                if seen.taken and not torch.equal(shared, stream.get_state()):
                    error, private = None, not torch.equal(used, before)
                    if threading.active_count() == 1:
                        stream.set_state(after)
        except (RuntimeError, ValueError) as problem:
            if self.basis() != stamp:
                return expected
            self._refuse(kind, f"raised {first_line(problem)}")
            return expected
        if error is None:
            self.undecided += 1
            if self.undecided >= _UNDECIDED or private:
                self._refuse(kind, "takes other random numbers than the original")
            return expected
        self.undecided = 0
        if error <= limit:
            self.errors[kind], self._voided = error, 0
            self.agreed.add(kind)
        elif self.basis() == stamp:
            why = f"differs from the original by {error:.1e} (relative), more than {limit:.0e}"
            self._refuse(kind, why, error)
        return expected

    def _refuse(self, kind: Hashable, why: str, error: float = float("inf")) -> None:
        self.errors[kind], self._bases[kind], self.failed = error, self.basis(), why
        say_fallback(self.what, why, self.fallback)


def _error(
    expected: Any,
    replacement: Run,
    stream: torch.Generator | None,
    before: Tensor | None,
    after: Tensor | None,
    parts: Callable[[Any], Sequence[Tensor]],
) -> float | None:
    """Return how far the replacement is off; None where the two used different random numbers."""
    own = None
    if stream is not None:
        own = torch.Generator(stream.device)
        own.set_state(before)
    pairs = list(zip(parts(replacement(own)), parts(expected), strict=True))
    alike = all(got.dtype == wanted.dtype for got, wanted in pairs)
    error = max(relative_error(*pair) for pair in pairs) if alike else float("inf")
    return None if own is not None and not torch.equal(own.get_state(), after) else error
