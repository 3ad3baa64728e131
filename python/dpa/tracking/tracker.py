"""What modules and plain objects were at the last check, and whether that still holds."""

from __future__ import annotations

import functools
import itertools
import operator
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from dpa.tracking.reads import PLAIN, Reads, frozen
from dpa.tracking.replacing import REPLACED, class_of
from dpa.tracking.weights import WeightTracker, version_of

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
HOOKS_OF_ALL = [getattr(torch.nn.modules.module, f"_global{name}") for name in HOOKS]
# What every module has: its modes, and what it holds, which is compared by itself.
_OF_ALL = frozenset(vars(nn.Module()))
# What calls write of modules of a class: robomimic's keypoints keep their last ones.
_WRITTEN = {"SpatialSoftmax": frozenset({"kps"})}
# What is replaced on a root. The forward of a layer inside shows in the number of attributes.
_NO_SETTINGS = _OF_ALL | REPLACED


Place = str | Callable[[Any], Any]  # a path of attributes from an object, or what finds it


def find(owner: Any, place: Place | None) -> Any:
    """Return what is in a place of an object; None where there is nothing."""
    if place is None:
        return None
    if not isinstance(place, str):
        try:
            return place(owner)
        except (AttributeError, KeyError, TypeError):
            return None
    for name in place.split("."):
        owner = getattr(owner, name, None)
    return owner


def is_observed() -> bool:
    """Whether torch.func transforms, or torch.jit.trace records, what runs now."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.jit.is_tracing()


class OwnMode(TorchDispatchMode):
    """A dispatch mode of dpa's own: it changes no result."""


def is_dispatched() -> bool:
    """Whether somebody else's dispatch mode sees what runs now."""
    depth, mode_at = torch._C._len_torch_dispatch_stack(), torch._C._get_dispatch_stack_at
    return any(not isinstance(mode_at(i), OwnMode) for i in range(depth))


class Tracker:
    """The modules inside one, their settings and their hooks, as they were when this was made.

    A check reads dictionaries alone: microseconds for a block, tens for a whole network. Every
    attribute that a class or a user sets on a module is a setting of it, whatever its type, and so
    is what else a user's ``forward`` reads (:class:`dpa.tracking.reads.Reads`).

    Args:
        root: the module around all.
        paths: which modules inside are tracked; None is all of them and the root. The ``forward``
            of a root is not tracked: replacements are put there.
        slots: (module, name of a parameter in it): parameters that have to be there; whoever tracks
            them compares them otherwise.
        buffers: whether buffers that a user's ``forward`` reads count.
        methods: of the root, which read settings besides ``forward``.
        modes: whether training mode and evaluation are settings.

    Attributes:
        modules: the tracked modules by path; None where there is none.
        read_beside: what users' code reads besides the settings.
        settings_read: (number of the module, name, value) of the settings that it reads.

    """

    def __init__(
        self,
        root: nn.Module,
        paths: Iterable[str] | None = None,
        slots: Iterable[tuple[nn.Module, str]] = (),
        *,
        buffers: bool = False,
        methods: tuple[str, ...] = (),
        modes: bool = False,
    ):
        but = _NO_SETTINGS - {"training"} if modes else _NO_SETTINGS
        if paths is None:
            self.modules: dict[str, nn.Module | None] = dict(root.named_modules())
        else:
            self.modules = {path: _inside(root, path) for path in paths}
        found = [module for module in self.modules.values() if module is not None]
        self._types = list(map(type, found))
        self._classes = list(map(class_of, found))
        self._found = found
        self._own = [vars(module) for module in found]
        scripted = any(isinstance(module, torch.jit.ScriptModule) for module in found)
        self._mode = _mode if scripted else operator.attrgetter("training")
        # Only where it is tracked: what a weak dictionary keeps by its root must not keep the root.
        self._root = vars(root) if "" in self.modules else None
        self._root_names = self._names_of_root()
        self._inner = [own for own in self._own if own is not self._root]
        self._lengths = list(map(len, self._inner))
        self._settings = [setting for module in found for setting in _settings_of(module, but)]
        self._then = self._read_settings()
        children = list(map(_children, found))
        self._leaves = [now for now in children if not now]
        slots = [(module._parameters, name) for module, name in slots]
        self._slots = [held for held, _ in slots], [name for _, name in slots]
        self._containers = [now for now in children if now]
        self._children = list(map(dict, self._containers))
        # Where modules stand whose parent is not tracked itself.
        outer = [p for p in self.modules if p and p.rpartition(".")[0] not in self.modules]
        parents = {p: _inside(root, p.rpartition(".")[0]) for p in outer}
        self._places = [
            (_children(parent), path.rpartition(".")[2], self.modules[path])
            for path, parent in parents.items()
            if parent is not None
        ]
        self._dropouts = [m for m in found if isinstance(m, nn.modules.dropout._DropoutNd)]
        self._find_hooks()
        called = {id(root): ("forward", *methods)}
        apart = [held[name] for held, name in slots if held.get(name) is not None]
        options = {"tensors": buffers, "apart": apart}
        but |= {"training"}
        reads = [
            Reads(m, called.get(id(m), ("forward",)), but=but | _written(m), **options)
            for m in found
        ]
        self.read_beside = [read for read in reads if len(read)]
        self.settings_read = [
            (i, *item) for i, r in enumerate(reads) for item in r.settings().items()
        ]

    def unchanged(self) -> bool:
        """Whether the modules are the same objects, of the same classes, set up as they were."""
        if any(self._leaves) or self._containers != self._children:
            return False
        if any(held.get(name) is not module for held, name, module in self._places):
            return False
        if any(map(operator.is_, map(dict.get, *self._slots), itertools.repeat(None))):
            return False
        types = list(map(type, self._found))
        if types != self._types:
            if list(map(class_of, self._found)) != self._classes:
                return False
            self._types = types  # one has a method replaced
        if list(map(len, self._inner)) != self._lengths:
            return False
        try:
            same = self._read_settings() == self._then
        except (KeyError, RuntimeError, ValueError):  # one is gone, or compares element by element
            return False
        return same and self._names_of_root() == self._root_names and self.reads_hold()

    def reads_hold(self) -> bool:
        """Whether what users' code reads besides the settings is what it was."""
        return all(reads.holds() for reads in self.read_beside)

    def _read_settings(self) -> list[Any]:
        return [read(own) for read, own in self._settings]

    def _names_of_root(self) -> set[str]:
        return set() if self._root is None else self._root.keys() - REPLACED

    def hooked(self, inner: bool = False) -> bool:
        """Whether a module has hooks; with ``inner``, one besides the root; or all modules have."""
        if self._registered != RemovableHandle.next_id:
            self._find_hooks()
        return any(self._inner_hooks if inner else self._hooks) or any(HOOKS_OF_ALL)

    def _find_hooks(self) -> None:
        """Find the dictionaries again: who removes all hooks puts empty ones in their place."""
        self._registered = RemovableHandle.next_id
        self._hooks = [own[name] for own in self._own for name in HOOKS]
        self._inner_hooks = [own[name] for own in self._inner for name in HOOKS]

    def no_one_op(self) -> str | None:
        """Return why no one op can stand for the layers now, though they are as they were."""
        if any(layer.training and layer.p > 0 for layer in self._dropouts):
            return "it drops values at random in training"
        # Whoever watches the layers would see nothing of a fused run.
        return "its layers have hooks" if self.hooked() else None

    def modes(self) -> list[bool]:
        """Which modules are in training mode."""
        return list(map(self._mode, self._found))


def _mode(module: nn.Module) -> bool:
    return getattr(module, "training", False)


def _children(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the dict that has the modules inside one; a scripted module wraps it."""
    return getattr(module._modules, "_python_modules", module._modules)


def _written(module: nn.Module) -> frozenset[str]:
    return _WRITTEN.get(class_of(module).__name__, frozenset())


def _settings_of(
    module: nn.Module, but: frozenset[str]
) -> Iterator[tuple[Callable[[Any], Any], Any]]:
    """Yield what reads a module's settings, and what it reads them of."""
    own = vars(module)
    but |= _written(module)
    names = [name for name in own if name not in but]
    if names:
        yield operator.itemgetter(*names), own
    if isinstance(module, torch.jit.ScriptModule):  # its C++ module has its attributes
        held = module._c
        kind = torch._C.ConcreteModuleType.from_jit_type(held._type())
        weights = dict(module._parameters.items()) | dict(module._buffers.items())
        names = kind.get_attributes().keys() - weights.keys() - (_OF_ALL & but)
        yield functools.partial(_scripted_attributes, sorted(names)), held


def _scripted_attributes(names: list[str], held: Any) -> list[Any]:
    values = [held.getattr(name) for name in names]
    return [(v, version_of(v) if isinstance(v, Tensor) else None) for v in values]


def _inside(root: nn.Module, path: str) -> nn.Module | None:
    try:
        return root.get_submodule(path)
    except AttributeError:
        return None


class Snapshot:
    """What is set on plain objects: schedulers, configurations, policies.

    Tensors count by identity and version, dicts and lists by what they hold, other objects by
    identity, and by what a user's methods read of them (:class:`dpa.tracking.reads.Reads`).

    Args:
        objects: whose attributes count.
        but: names of attributes that do not.
        methods: of the first object.
        values: how values of plain floating tensors are compared besides, as a mode of
            :class:`dpa.tracking.weights.WeightTracker`; None compares none.
        reads: further options of :class:`Reads`.

    """

    def __init__(
        self,
        *objects: Any,
        but: frozenset[str] = frozenset(),
        methods: tuple[str, ...] = (),
        values: str | None = None,
        **reads: Any,
    ):
        self._objects, self._but = objects, but
        self._held: list[Any] = []  # what is compared by its id, which stays its own while it lives
        self._then = self._read(self._held)
        self._glance = _Glance()
        self._glance.add(objects)
        for one in objects:
            self._glance.add(vars(one), but)
        found = Reads(objects[0], methods, but=but, shown=True, **reads)
        self.read_beside = [found] if len(found) else []
        self._lock, self._values = threading.Lock(), [] if values is None else self._kept(values)

    def _kept(self, mode: str) -> list[WeightTracker]:
        """Remember the tensors' values, those of a device by one tracker."""
        homes: dict[torch.device, dict[str, Tensor]] = {}
        for one in self._held:
            plain = type(one) is Tensor and one.layout is torch.strided and not one.is_meta
            if plain and one.is_floating_point():
                home = homes.setdefault(one.device, {})
                home[str(len(home))] = one
        trackers = [WeightTracker([(home, name) for name in home], mode) for home in homes.values()]
        for tracker in trackers:
            tracker.remember()
        return trackers

    def _read(self, held: list[Any]) -> list[Any]:
        but = self._but
        return [
            (class_of(one), [(k, frozen(v, held)) for k, v in vars(one).items() if k not in but])
            for one in self._objects
        ]

    def holds(self) -> bool:
        """Whether all attributes are what they were."""
        if not self._glance.same() and self._read([]) != self._then:
            return False
        if not all(reads.holds() for reads in self.read_beside):
            return False
        if not self._values or (
            torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        ):
            return True
        with self._lock:
            for tracker in self._values:
                tracker.start()
            return not any(tracker.values_changed() for tracker in self._values)


class _Glance:
    """Whether containers hold the very objects that they held: then nothing has to be read.

    A check runs in ``map``, not in Python's own loops, since every call makes it.
    """

    def __init__(self) -> None:
        self._items: list[tuple[Any, int, list[Any], list[Any]]] = []  # with sizes, keys and values
        self._others: list[Any] = []  # in them, whose classes may change
        self._tensors: list[tuple[Tensor, Hashable]] = []

    def add(self, held: Any, but: frozenset[str] = frozenset()) -> None:
        """Remember a dict, list or tuple and what is inside of it."""
        keys = [k for k in held if k not in but] if isinstance(held, dict) else range(len(held))
        values = list(map(held.__getitem__, keys))
        self._items.append((held, len(held), list(keys), values))
        for value in values:
            if isinstance(value, (dict, list, tuple)):
                self.add(value)
            elif isinstance(value, Tensor):
                self._tensors.append((value, version_of(value)))
        self._others += [value for value in values if type(value) not in PLAIN]
        self._types = list(map(type, self._others))

    def same(self) -> bool:
        """Whether all are there, and no tensor has been written."""
        try:
            for held, size, keys, values in self._items:
                if len(held) != size or not all(
                    map(operator.is_, map(held.__getitem__, keys), values)
                ):
                    return False
        except (IndexError, KeyError):
            return False
        written = any(version_of(tensor) != version for tensor, version in self._tensors)
        return not written and list(map(type, self._others)) == self._types
