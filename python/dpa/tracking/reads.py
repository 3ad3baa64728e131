"""What the code of a user's methods reads, beyond the plain attributes of its object.

A subclass of a policy, a network or a scheduler may read whatever it likes: an object that one of
its attributes holds, a buffer, an attribute of its class, a variable of its file. The names in the
code of its methods say which. These values are compared.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from dpa.tracking.replacing import REPLACED, class_of
from dpa.tracking.weights import version_of

# Packages whose code is known: what it reads is compared as attributes, or, of logging, changes no
# result.
_KNOWN = frozenset({"torch", "dpa", "diffusers", "lerobot", "builtins", "logging"})
_NO_VALUES = (ModuleType, FunctionType, type)
_WORDS = (int, float, bool, str, type(None))
PLAIN = (*_WORDS, bytes, complex, torch.dtype, torch.device)
# Special methods of an object that is held are called by no name: all are followed but these.
_NOT_FOLLOWED = frozenset(
    {"__init__", "__new__", "__del__", "__repr__", "__str__", "__eq__", "__hash__"}
)
_MAPPINGS = (dict, MappingProxyType)
_TENSORS = ("_buffers", "_parameters")
_DEEPEST, _LONGEST = 4, 1000  # objects in objects, and the values of a container


class Reads:
    """What methods of an object read, as it was when this was made.

    Containers count by what they hold; other objects by their identity and by those of their
    attributes that the code names.

    Args:
        owner: whose methods they are. What they call on it, in their file and on what they read is
            followed, but for code of known packages.
        methods: their names.
        but: names that do not count.
        apart: objects that do not count: they are compared elsewhere.
        shown: whether containers and tensors among the owner's attributes are compared elsewhere,
            as numbers and words are.
        tensors: whether the owner's buffers and parameters count.
        modules: whether modules that it holds count, with their tensors.

    """

    def __init__(
        self,
        owner: Any,
        methods: Iterable[str],
        *,
        but: frozenset[str] = frozenset(),
        apart: Iterable[Any] = (),
        shown: bool = False,
        tensors: bool = False,
        modules: bool = False,
    ):
        self._owner = owner
        self._shown, self._modules = shown, modules
        self._apart = {id(one) for one in apart}
        self._names: set[str] = set()
        self._functions: set[FunctionType] = set()
        self._places: list[Callable[[], Any]] = []
        self._follow(set(methods))
        self._names -= but | REPLACED
        if self._functions:
            own = vars(owner)
            self._places += [*_readers(own, self._names, self._counts), *self._of_class()]
            for held in (*_TENSORS * tensors, *("_modules",) * modules):
                self._places += _readers(own.get(held, {}), self._names, self._is_not_apart)
        self._held: list[Any] = []  # what is compared by its id, which stays its own while it lives
        self._then = self._values(self._held)

    def __len__(self) -> int:
        """Return how many values are compared."""
        return len(self._places)

    def settings(self) -> dict[str, Any]:
        """Return the numbers and words that are read, which the owner's tracker compares."""
        own = vars(self._owner) if self._functions else {}
        read = {name: own[name] for name in sorted(self._names & own.keys())}
        return {name: value for name, value in read.items() if isinstance(value, _WORDS)}

    def holds(self) -> bool:
        """Whether all are what they were."""
        try:
            return not self._places or self._values([]) == self._then
        except (AttributeError, KeyError, RuntimeError, ValueError):  # gone, or changing just now
            return False

    def _values(self, held: list[Any]) -> list[Any]:
        return [self._value(read(), held, 0) for read in self._places]

    def _follow(self, names: set[str]) -> None:
        """Collect the names in the methods, and in those that they lead to."""
        while names - self._names:
            self._names |= names
            for function in _functions_of(class_of(self._owner), self._names):
                names = names | self._take(function)
            for one in self._objects(self._owner, 0):
                functions = _functions_of(class_of(one), self._names, special=True)
                for function in [one] if isinstance(one, FunctionType) else functions:
                    names = names | self._take(function)

    def _take(self, function: FunctionType) -> set[str]:
        """Return the names in a function; keep the values that it reads outside of the object."""
        if function in self._functions:
            return set()
        self._functions.add(function)
        names, file = _names_in(function.__code__), function.__globals__
        outside = [(file[n], lambda n=n: file[n]) for n in sorted(names & file.keys())]
        for cell in function.__closure__ or ():
            outside.append((cell.cell_contents, lambda cell=cell: cell.cell_contents))
        for value, read in outside:
            if isinstance(value, FunctionType):
                if value.__module__ == function.__module__:
                    names |= self._take(inspect.unwrap(value))
            elif isinstance(value, ModuleType):
                if value.__name__.partition(".")[0] not in _KNOWN:
                    self._places += _readers(vars(value), names, _is_value)
            elif _is_value(value):
                self._places.append(read)
        return names

    def _of_class(self) -> Iterator[Callable[[], Any]]:
        kind, own = type(self._owner), vars(self._owner)
        for name in sorted(self._names - own.keys()):
            if any(_is_value(vars(one)[name]) for one in _foreign(kind) if name in vars(one)):
                yield lambda name=name: inspect.getattr_static(kind, name)

    def _is_not_apart(self, value: Any) -> bool:
        return id(value) not in self._apart

    def _counts(self, value: Any) -> bool:
        return self._is_not_apart(value) and _is_value(value) and not self._is_shown(value)

    def _is_shown(self, value: Any) -> bool:
        if isinstance(value, (dict, list, tuple)):
            return self._shown and all(map(self._is_shown, _inside(value)))
        return self._shown if isinstance(value, Tensor) else not hasattr(value, "__dict__")

    def _objects(self, value: Any, depth: int) -> Iterator[Any]:
        """Yield the objects and the functions that the names lead to."""
        if depth < _DEEPEST:
            inner = _inside(value)
            for one in self._named(value, code=True).values() if inner is None else inner:
                is_method = isinstance(one, MethodType)
                function, one = (one.__func__, one.__self__) if is_method else (one, one)
                if isinstance(function, FunctionType) and _is_foreign(function):
                    yield inspect.unwrap(function)
                if one is self._owner:
                    continue
                if self._is_object(one):
                    yield one
                if self._is_object(one) or _inside(one) is not None:
                    yield from self._objects(one, depth + 1)

    def _named(self, value: Any, code: bool = False) -> dict[str, Any]:
        """What an object has under the names, by itself or by its classes.

        ``code``: also the functions that it holds itself.
        """
        if isinstance(value, Mapping):
            return {name: value[name] for name in sorted(self._names) if name in value}
        found: dict[str, Any] = {}
        for space in [*map(vars, reversed(_foreign(class_of(value)))), vars(value)]:
            found |= {name: space[name] for name in sorted(self._names & space.keys())}
        own = vars(value) if code else {}
        return {
            name: one
            for name, one in found.items()
            if _is_value(one) or (name in own and isinstance(one, FunctionType))
        }

    def _is_object(self, value: Any) -> bool:
        if id(value) in self._apart or isinstance(value, (Tensor, nn.Module)):
            return False
        return hasattr(value, "__dict__") and _is_value(value) and bool(_foreign(type(value)))

    def _value(self, value: Any, held: list[Any], depth: int) -> Any:
        """Return what is compared of a value."""
        if type(value) in PLAIN:
            return value
        inner = _inside(value)
        if inner is not None and depth <= _DEEPEST:
            keys = list(value) if isinstance(value, _MAPPINGS) else None
            return type(value), keys, [self._value(one, held, depth + 1) for one in inner]
        held.append(value)
        if isinstance(value, MethodType):
            return id(value.__func__), self._value(value.__self__, held, depth + 1)
        if depth > _DEEPEST or id(value) in self._apart or value is self._owner:
            return id(value)
        if isinstance(value, nn.Module) and self._modules:
            return [self._module(one, held, depth) for one in self._inner(value, {})]
        if not self._is_object(value):
            return frozen(value, held)
        named = self._named(value).items()
        return id(value), [(name, self._value(one, held, depth + 1)) for name, one in named]

    def _inner(self, module: nn.Module, found: dict[nn.Module, None]) -> dict[nn.Module, None]:
        """Add a module and those in it to what was ``found``, but for those in ones apart."""
        if module not in found:
            found[module] = None
            for one in () if id(module) in self._apart else module._modules.values():
                if one is not None:
                    self._inner(one, found)
        return found

    def _module(self, module: nn.Module, held: list[Any], depth: int) -> Any:
        held.append(module)
        if id(module) in self._apart:
            return id(module)
        own = {n: v for n, v in vars(module).items() if n in _TENSORS or not n.startswith("_")}
        return id(module), [(n, self._value(v, held, depth + 1)) for n, v in own.items()]


def frozen(value: Any, held: list[Any]) -> Any:
    """Return what is compared of a value: tensors count by version, others by what they are."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if isinstance(value, _MAPPINGS):
        return kind, [(frozen(key, held), frozen(inner, held)) for key, inner in value.items()]
    if isinstance(value, (list, tuple)):
        return kind, [frozen(inner, held) for inner in value]
    held.append(value)
    state = version_of(value) if isinstance(value, Tensor) else None
    if isinstance(value, ContextVar):
        with contextlib.suppress(LookupError):  # it has no value here
            state = frozen(value.get(), held)
    return kind, id(value), state


def _inside(value: Any) -> list[Any] | None:
    """Return what a container holds, or None for what is none."""
    if not isinstance(value, (*_MAPPINGS, list, tuple)) or len(value) > _LONGEST:
        return None
    return list(value.values() if isinstance(value, _MAPPINGS) else value)


def _foreign(kind: type) -> list[type]:
    """Return the classes of an object whose code is not known."""
    return [one for one in kind.__mro__ if one.__module__.partition(".")[0] not in _KNOWN]


def _is_foreign(function: FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] not in _KNOWN


def _is_value(value: Any) -> bool:
    """Whether it is neither code nor what a class gives its objects by code.

    A bound method stands for its object.
    """
    if isinstance(value, MethodType):
        return _is_foreign(value.__func__)
    return not isinstance(value, _NO_VALUES) and not hasattr(type(value), "__get__")


def _readers(
    space: Mapping[str, Any], names: set[str], counts: Callable[[Any], bool]
) -> list[Callable[[], Any]]:
    """Return what reads the values of a dict that have these names, as far as they count."""
    found = sorted(name for name in names & space.keys() if counts(space[name]))
    return [functools.partial(operator.getitem, space, name) for name in found]


def _functions_of(kind: type, names: set[str], special: bool = False) -> Iterator[FunctionType]:
    """Yield what the classes of an object define under these names, or as special methods."""
    for space in map(vars, _foreign(kind)):
        found_names = names & space.keys()
        if special:
            found_names |= {name for name in space if name.startswith("__")} - _NOT_FOLLOWED
        for name in found_names:
            found = space[name]
            for inside in ("__func__", "fget", "func"):  # of class methods, properties, cached ones
                found = getattr(found, inside, None) or found
            found = inspect.unwrap(found) if callable(found) else found
            if isinstance(found, FunctionType):
                yield found


def _names_in(code: CodeType) -> set[str]:
    """Return the names that code reads, and the words that it may give to getattr."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            names.add(constant)
    return names
