"""What modules and plain objects were when last looked at, and whether that still holds."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
HOOKS_OF_ALL = [getattr(torch.nn.modules.module, f"_global{name}") for name in HOOKS]
# Attributes that do not decide what a module computes, and those that dpa sets on a root itself.
_MODES = frozenset({"training"})
_REPLACED = frozenset({"forward", "conditional_sample"})


def is_observed() -> bool:
    """Whether torch.func transforms, or torch.jit.trace records, what runs now."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.jit.is_tracing()


class Tracker:
    """The modules inside one, their settings and their hooks, as they were when this was made.

    A check reads dictionaries alone: microseconds for a block, tens for a whole network. Every
    attribute of a module is a setting of it, whatever its type; ``training`` is not.

    Args:
        root: the module around all.
        paths: which modules inside are tracked; None is all of them and the root. The ``forward``
            of a root is not tracked: replacements are put there.

    Attributes:
        modules: the tracked modules by path; None where there is none.

    """

    def __init__(self, root: nn.Module, paths: Iterable[str] | None = None):
        if paths is None:
            self.modules: dict[str, nn.Module | None] = dict(root.named_modules())
        else:
            self.modules = {path: _inside(root, path) for path in paths}
        found = [module for module in self.modules.values() if module is not None]
        self._types = list(map(type, found))
        self._found = found
        self._own = [vars(module) for module in found]
        self._then = [dict(own) for own in self._own]
        self._values = [tuple(own.values()) for own in self._own]
        children = [module._modules for module in found]
        self._leaves = [now for now in children if not now]
        self._containers = [(now, dict(now)) for now in children if now]
        # Where modules stand whose parent is not tracked itself.
        outer = [p for p in self.modules if p and p.rpartition(".")[0] not in self.modules]
        parents = {p: _inside(root, p.rpartition(".")[0]) for p in outer}
        self._places = [
            (parent._modules, path.rpartition(".")[2], self.modules[path])
            for path, parent in parents.items()
            if parent is not None
        ]
        # Only where it is tracked: what a weak dictionary keeps by its root must not keep the root.
        self._root = vars(root) if "" in self.modules else None
        self._hooks = [own[name] for own in self._own for name in HOOKS]
        self._inner_hooks = [
            own[name] for own in self._own if own is not self._root for name in HOOKS
        ]

    def unchanged(self) -> bool:
        """Whether the modules are the same objects, of the same classes, set up as they were."""
        if any(self._leaves) or any(now != then for now, then in self._containers):
            return False
        if any(held.get(name) is not module for held, name, module in self._places):
            return False
        if list(map(type, self._found)) != self._types:
            return False
        values = [tuple(own.values()) for own in self._own]
        try:
            if values == self._values:
                return True
        except (RuntimeError, ValueError):  # values that compare element by element are others
            pass
        if not all(map(self._set_up_alike, self._own, self._then)):
            return False
        self._values = values  # modes alone have changed, or the order of the attributes
        return True

    def _set_up_alike(self, now: dict[str, Any], then: dict[str, Any]) -> bool:
        ignored = _MODES | _REPLACED if now is self._root else _MODES
        if now.keys() - ignored != then.keys() - ignored:
            return False
        return all(_alike(now[name], then[name]) for name in now.keys() - ignored)

    def hooked(self, inner: bool = False) -> bool:
        """Whether a module has hooks; with ``inner``, one besides the root; or all modules have."""
        return any(self._inner_hooks if inner else self._hooks) or any(HOOKS_OF_ALL)

    def modes(self) -> list[bool]:
        """Which modules are in training mode."""
        return [own["training"] for own in self._own]


def _inside(root: nn.Module, path: str) -> nn.Module | None:
    try:
        return root.get_submodule(path)
    except AttributeError:
        return None


def _alike(now: Any, then: Any) -> bool:
    if now is then:
        return True
    try:
        return type(now) is type(then) and bool(now == then)
    except (RuntimeError, ValueError):
        return False


class Snapshot:
    """What is set on plain objects: schedulers, configurations, policies.

    Tensors count by identity and version, dicts and lists by what they hold, other objects by
    identity.

    Args:
        objects: whose attributes count.
        but: names of attributes that do not.

    """

    def __init__(self, *objects: Any, but: frozenset[str] = frozenset()):
        self._objects, self._but = objects, but
        self._then = self._read()

    def _read(self) -> list[Any]:
        return [
            (type(one), [(k, _frozen(v)) for k, v in vars(one).items() if k not in self._but])
            for one in self._objects
        ]

    def holds(self) -> bool:
        """Whether all attributes are what they were."""
        return self._read() == self._then


_PLAIN = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device)


def _frozen(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return _Same(value), version_of(value)
    if isinstance(value, dict):
        return kind, [(_frozen(key), _frozen(inner)) for key, inner in value.items()]
    if isinstance(value, (list, tuple)):
        return kind, [_frozen(inner) for inner in value]
    return _Same(value)


class _Same:
    """Equal for the same object, which is kept: its id stays its own."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]


def version_of(tensor: Tensor) -> Hashable:
    """What a write in place changes.

    Tensors made in inference mode count no versions: on the CPU their values are read, on a GPU
    nobody can read them without waiting.
    """
    if not tensor.is_inference():
        return tensor._version
    return tuple(tensor.flatten().tolist()) if tensor.device.type == "cpu" else None
