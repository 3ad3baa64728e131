"""Layers that one op replaces, as long as they are what they were made as."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dpa.library.checks import require
from dpa.tracking.tracker import HOOKS_OF_ALL, Tracker

_OPTIONAL = frozenset({nn.Parameter, type(None)})


def is_exporting() -> bool:
    """Whether ``torch.export`` is at work, whose programs have the layers one by one."""
    # torch.compiler.is_exporting() says yes to torch.compile too.
    return torch.compiler._is_exporting_flag


def scriptable(module: nn.Module, part: str, changed: bool) -> nn.Module:
    """Return a module, or refuse ``torch.jit.script``, which would leave out what was changed."""
    whole, rule = f"{type(module).__name__}: {part}", "be as it was made where it is scripted"
    require(not changed, whole, rule, getattr(module, part))
    return module


def sequential(path: str, *kinds: type[nn.Module]) -> dict[str, tuple[type[nn.Module], ...]]:
    """Return the types of a Sequential of these classes, as :class:`PlainLayers` takes them."""
    return {path: (nn.Sequential,)} | {f"{path}.{i}": (kind,) for i, kind in enumerate(kinds)}


class PlainLayers:
    """The layers inside a module, whose parameters an op takes without calling them.

    Args:
        types: the classes that each layer may have, by its path inside the module.
        layers: paths of those whose weight and bias the op takes, in its order.
        optional: paths of those after them that may have none, and give None.

    """

    def __init__(
        self,
        types: Mapping[str, tuple[type, ...]],
        layers: Sequence[str],
        optional: Sequence[str] = (),
    ):
        self._types, self._required = types, 2 * len(layers)
        self._slots = [(path, n) for path in (*layers, *optional) for n in ("weight", "bias")]
        # Each layer stands after the one that holds it: that one's path, and its own name in it.
        parents = [path.rpartition(".")[0] for path in types]
        self._walk = [
            (path, *path.rpartition(".")[::2], kinds, parents.count(path))
            for path, kinds in types.items()
        ]
        self._found: WeakKeyDictionary[nn.Module, FoundLayers] = WeakKeyDictionary()

    def of(self, module: nn.Module) -> list[Tensor | None] | None:
        """Return the parameters, or None where a layer is replaced, changed, hooked, or sharded.

        None for what is exported, too.
        """
        if is_exporting():
            return None
        if torch.compiler.is_compiling():
            return self._traced(module)
        found = self._found.get(module)
        if found is None or not found.tracker.unchanged():
            found = FoundLayers(module, self._types, self._slots, self._required)
            self._found[module] = found
        return found.parameters() if found.alike else None

    def _traced(self, module: nn.Module) -> list[Tensor | None] | None:
        """The same in what compilers can trace, where checks cost nothing at run time.

        Nor much while they are traced: a compiler interprets each line for each layer of a network.
        """
        if _all_are_hooked():
            return None
        found: dict[str, Any] = {"": module}
        norm = None
        for path, parent, name, kinds, count in self._walk:
            layer = found[parent]._modules.get(name)
            if type(layer) not in kinds or _is_changed(layer) or len(layer._modules) != count:
                return None
            if isinstance(layer, nn.GroupNorm):
                norm = layer if norm is None else norm
                if layer.eps != norm.eps or layer.num_groups != norm.num_groups:
                    return None
            found[path] = layer
        parameters = [getattr(found[path], name, None) for path, name in self._slots]
        return _present(parameters, self._required)


def _present(found: list[Tensor | None], required: int) -> list[Tensor | None] | None:
    """Return parameters, the first of which are required, unless one is missing or sharded."""
    whole = all(type(p) is nn.Parameter for p in found[:required])
    return found if whole and all(type(p) in _OPTIONAL for p in found[required:]) else None


def is_changed(layer: nn.Module) -> bool:
    """Whether a layer has hooks, a forward of its own, or settings that change the length."""
    return _all_are_hooked() or _is_changed(layer)


def _all_are_hooked() -> bool:
    return any(len(those) > 0 for those in HOOKS_OF_ALL)


def _is_changed(layer: nn.Module) -> bool:
    # HOOKS, without a loop: see _traced().
    hooks = len(layer._forward_hooks) + len(layer._forward_pre_hooks)
    hooks += len(layer._backward_hooks) + len(layer._backward_pre_hooks)
    if hooks > 0 or "forward" in layer.__dict__:
        return True
    return isinstance(layer, nn.Conv1d) and not _keeps_length(layer)


def _keeps_length(conv: nn.Module) -> bool:
    """Whether a convolution is an ordinary one, with half its kernel of zeros at both ends."""
    return (
        conv.padding_mode == "zeros"
        and conv.padding == (conv.kernel_size[0] // 2,)
        and conv.stride == conv.dilation == (1,)
        and conv.groups == 1
    )


class FoundLayers:
    """One module's layers as they were found, and where their parameters lie.

    Attributes:
        tracker: of the layers.
        plain: whether each has a class that it may have, no forward of its own, and no others
            inside.
        alike: whether they are plain, and convolutions ordinary ones that keep the length, and
            norms of one ``eps`` and one number of groups.

    """

    def __init__(
        self,
        root: nn.Module,
        types: Mapping[str, tuple[type, ...]],
        slots: Sequence[tuple[str, str]],
        required: int,
    ):
        self.tracker = Tracker(root, types)
        layers = self.tracker.modules
        parents = [path.rpartition(".")[0] for path in types]
        self.plain = all(
            type(layer) in types[path]
            and "forward" not in vars(layer)
            and len(layer._modules) == parents.count(path)
            for path, layer in layers.items()
        )
        convs = [m for m in layers.values() if isinstance(m, (nn.Conv1d, nn.ConvTranspose1d))]
        norms = {(m.eps, m.num_groups) for m in layers.values() if isinstance(m, nn.GroupNorm)}
        self.alike = self.plain and len(norms) <= 1 and all(map(_keeps_length, convs))
        self._required = required
        if self.plain:
            self._slots = [(layers[path]._parameters, name) for path, name in slots]

    def parameters(self) -> list[Tensor | None] | None:
        """Return the parameters, or None where a layer is changed, hooked, or sharded."""
        if not self.plain or self.tracker.hooked():
            return None
        return _present([layer.get(name) for layer, name in self._slots], self._required)
