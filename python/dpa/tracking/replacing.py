"""A method replaced on one object, and not on what shares its attributes.

``copy.copy``, and ``nn.DataParallel`` for its replicas, copy an object's attributes. A replacement
that is a plain attribute goes along, and still runs on the object that it was made for.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import inspect
from typing import Any, TypeVar

import torch

METHODS = ("forward", "conditional_sample", "generate_actions", "predict_action", "step")
METHODS += ("predict_action_chunk", "supports_rtc")
BESIDE = "_dpa_"  # and the method's name: the attribute that compilers read
# What is set on an object whose methods are replaced.
REPLACED = frozenset((*METHODS, *(BESIDE + name for name in METHODS)))
Self = TypeVar("Self", bound="Replacement")


class _Signature:
    """The signature of the method that an object replaces, which has names of arguments."""

    def __get__(self, one: Any, kind: type | None = None) -> inspect.Signature | None:
        if one is None:
            return None
        owner = getattr(one, one.OWNER)
        return inspect.signature(getattr(class_of(owner), one.METHOD).__get__(owner))


class Replacement:
    """What replaces a method of one object. Copies and pickles start anew.

    Attributes:
        METHOD: the name of the method.
        OWNER: the name of the attribute that holds the object.
        KEPT: the names of all attributes that a copy keeps.

    """

    METHOD = "forward"
    OWNER = "owner"
    KEPT: tuple[str, ...] = ("owner",)
    __signature__ = _Signature()

    def __init__(self, *kept: Any):
        self.__setstate__(dict(zip(self.KEPT, kept, strict=True)))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is made again: a copy has its own."""
        return {name: getattr(self, name) for name in self.KEPT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.forget()

    def forget(self) -> None:
        """Drop all that is found, compared or captured, and start anew."""

    @property
    def __code__(self) -> Any:
        """Of the method that this one replaces: torch.export reads where it is written."""
        return getattr(type(getattr(self, self.OWNER)), self.METHOD).__code__

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method that this one replaces."""
        owner = getattr(self, self.OWNER)
        return getattr(class_of(owner), self.METHOD)(owner, *args, **kwargs)

    def copied_to(self: Self, owner: Any) -> Self:
        """Return one that does the same for another object."""
        new = object.__new__(type(self))
        new.__setstate__(self.__getstate__() | {self.OWNER: owner})
        return new


class _OfOneObject:
    """Marks the classes that this module makes, and keeps them out of their bases' registries."""

    def __init_subclass__(cls) -> None:
        pass

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Name the object's own class: dill takes this one for another object of that name."""
        reduced, kind, base = super().__reduce_ex__(protocol), type(self), class_of(self)
        if not isinstance(reduced, tuple):
            return reduced
        named = (base if x is kind else x for x in (reduced[0], *reduced[1]))
        return (_made, (base, *named), *reduced[2:])


def _made(base: type, make: Any, *arguments: Any) -> Any:
    """Make an object of the subclass of a class, by what its pickle says of the class itself."""
    kind = _subclass(base)
    return (kind if make is base else make)(*(kind if x is base else x for x in arguments))


class _Method:
    """Finds what replaces a method on an object, or the method itself."""

    def __set_name__(self, kind: type, name: str) -> None:
        self.kind, self.name = kind, name

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        if owner is None:
            return getattr(super(self.kind, kind), self.name)
        if torch.compiler.is_compiling():  # which reads owner.__dict__[self.name] by this again
            own = owner.__dict__.get(BESIDE + self.name)
            own = None if own is None or getattr(own, own.OWNER) is not owner else own
        else:
            own = replaced(owner, self.name)
        return getattr(super(self.kind, owner), self.name) if own is None else own

    def __set__(self, owner: Any, value: Any) -> None:
        owner.__dict__[self.name] = value
        owner.__dict__.pop(BESIDE + self.name, None)

    def __delete__(self, owner: Any) -> None:
        if self.name not in owner.__dict__:
            raise AttributeError(self.name)
        del owner.__dict__[self.name]
        owner.__dict__.pop(BESIDE + self.name, None)


def replace_method(owner: Any, name: str, replacement: Any) -> None:
    """Put a replacement in the place of an object's method, as an attribute of the object.

    The object becomes one of a subclass of its class, of the same name, that checks whether the
    replacement was made for the object: a shallow copy gets one of its own.
    """
    if isinstance(replacement, Replacement):
        if not isinstance(owner, _OfOneObject):
            with contextlib.suppress(TypeError):  # of a class with slots: shallow copies share it
                owner.__class__ = _subclass(type(owner))
        if isinstance(owner, _OfOneObject):
            _find_on_objects(type(owner), name)
        vars(owner)[BESIDE + name] = replacement
    vars(owner)[name] = replacement


def put_back(owner: Any, name: str) -> None:
    """Undo :func:`replace_method`."""
    del vars(owner)[name]
    vars(owner).pop(BESIDE + name, None)
    if _OfOneObject in type(owner).__bases__ and not any(
        isinstance(value, Replacement) for value in vars(owner).values()
    ):
        owner.__class__ = class_of(owner)


def replaced(owner: Any, name: str) -> Any:
    """Return what replaces a method of an object, or None.

    A shallow copy gets a replacement of its own here. A replica of ``nn.DataParallel``, which
    lives for one call, has none.
    """
    held = vars(owner).get(name)
    if not isinstance(held, Replacement) or getattr(held, held.OWNER) is owner:
        return held
    if vars(owner).get("_is_replica"):
        return None
    own = vars(owner)[name] = vars(owner)[BESIDE + name] = held.copied_to(owner)
    return own


def has_own_forward(owner: Any) -> bool:
    """Whether somebody else has set a ``forward`` on an object."""
    return "forward" in vars(owner) and not isinstance(vars(owner)["forward"], Replacement)


def class_of(owner: Any) -> type:
    """Return an object's class, whether or not one of its methods is replaced."""
    kind = type(owner)
    return kind.__bases__[1] if _OfOneObject in kind.__bases__ else kind


def _find_on_objects(kind: type, name: str) -> None:
    """Let a class of :func:`_subclass` look for one more method on its objects."""
    if hasattr(kind, name) and not isinstance(vars(kind).get(name), _Method):
        method = _Method()
        method.__set_name__(kind, name)
        setattr(kind, name, method)


def _subclass(base: type) -> type:
    """Return the subclass for objects of a class; pickles hold the class alone."""
    for kind in base.__subclasses__():
        if _OfOneObject in kind.__bases__:
            return kind
    names = ("__module__", "__qualname__", "__doc__")
    contents = {name: getattr(base, name) for name in names}
    contents |= {name: _Method() for name in METHODS if hasattr(base, name)}
    return _metaclass(type(base))(base.__name__, (_OfOneObject, base), contents)


@functools.cache
def _metaclass(kind: type) -> type:
    made = type(kind.__name__, (kind,), {})
    copyreg.pickle(made, lambda subclass: (_subclass, (subclass.__bases__[1],)))
    return made
