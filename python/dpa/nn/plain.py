"""Layers that one op runs in their stead, as long as they are what they were made as."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

_KINDS = frozenset({nn.Parameter, type(None)})
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
HOOKS_OF_ALL = [getattr(torch.nn.modules.module, f"_global{name}") for name in HOOKS]
_has_its_own = operator.methodcaller("__contains__", "forward")
# Of the attributes of a convolution.
convolution_settings = operator.itemgetter(
    "padding_mode", "padding", "stride", "dilation", "groups", "output_padding"
)


class PlainLayers:
    """The layers inside a module, whose parameters an op takes without calling them.

    Asked at every call of the module, so a look is made of dictionary lookups alone: it costs
    microseconds, where walking through the module's attributes costs tens.

    Args:
        types: the class that each layer must have, by its path inside the module.
        parameters: paths of the parameters, in the op's order; a layer without one gives None.

    """

    def __init__(self, types: Mapping[str, tuple[type, ...]], parameters: Sequence[str]):
        self._types = types
        self._parameters = [path.rpartition(".")[::2] for path in parameters]
        parents = [path.rpartition(".")[0] for path in types]
        self._children = [parents.count(path) for path in types]
        self._found: WeakKeyDictionary[nn.Module, FoundLayers] = WeakKeyDictionary()

    def of(self, module: nn.Module) -> list[Tensor | None] | None:
        """Return the parameters, or None where a layer is replaced, changed, hooked, or sharded."""
        found = self._found.get(module)
        if found is None or not found.still_there():
            found = self._found[module] = FoundLayers(module, self._types, self._parameters)
        usual = found.keeps_length and found.has_one_kind_of_norm()
        return found.parameters() if usual else None

    def traced(self, module: nn.Module) -> list[Tensor | None] | None:
        """The same in what compilers can trace, where looking costs nothing at run time."""
        norms = []
        # Each layer stands after the one that holds it: what is looked for is there.
        for (path, kinds), count in zip(self._types.items(), self._children, strict=True):
            layer = module.get_submodule(path)
            if type(layer) not in kinds or is_changed(layer) or len(layer._modules) != count:
                return None
            if isinstance(layer, nn.GroupNorm):
                norms.append((layer.eps, layer.num_groups))
        if any(norm != norms[0] for norm in norms):
            return None
        found = [getattr(module.get_submodule(path), name, None) for path, name in self._parameters]
        return found if all(type(p) in _KINDS for p in found) else None


def is_changed(layer: nn.Module) -> bool:
    """Whether a layer has hooks, a forward of its own, or settings that change the length."""
    hooks = (
        layer._forward_hooks,
        layer._forward_pre_hooks,
        layer._backward_hooks,
        layer._backward_pre_hooks,
        *HOOKS_OF_ALL,
    )
    if any(len(those) > 0 for those in hooks) or "forward" in vars(layer):
        return True
    return isinstance(layer, nn.Conv1d) and not _keeps_length(layer)


def _keeps_length(conv: nn.Conv1d) -> bool:
    """Whether a convolution is an ordinary one, with half its kernel of zeros at both ends."""
    return (
        conv.padding_mode == "zeros"
        and conv.padding == (conv.kernel_size[0] // 2,)
        and conv.stride == conv.dilation == (1,)
        and conv.groups == 1
    )


def _inside(root: nn.Module, path: str) -> nn.Module | None:
    try:
        return root.get_submodule(path)
    except AttributeError:
        return None


class FoundLayers:
    """One module's layers and where their parameters lie, for looks by dictionary alone.

    Attributes:
        keeps_length: whether all convolutions are ordinary ones that keep the length.

    """

    keeps_length = False

    def __init__(self, root, types, parameters):
        modules = {path: _inside(root, path) for path in types}
        self._plain = all(type(modules[path]) in types[path] for path in types)
        self._modules = list(modules.values())
        self._classes = list(map(type, self._modules))
        if not self._plain:
            return
        self._hooks = [getattr(module, name) for module in self._modules for name in HOOKS]
        self._hooks += HOOKS_OF_ALL
        self._own = [vars(module) for module in self._modules]
        convs = [m for m in self._modules if isinstance(m, (nn.Conv1d, nn.ConvTranspose1d))]
        self._convs = [vars(conv) for conv in convs]
        self._settings = list(map(convolution_settings, self._convs))
        self.keeps_length = all(map(_keeps_length, convs))
        self._norms = [vars(m) for m in self._modules if isinstance(m, nn.GroupNorm)]
        parents = [path.rpartition(".")[::2] for path in types]
        holders = [(vars(modules[p])["_modules"], sum(q == p for q, _ in parents)) for p in types]
        self._holders = [(c, count) for c, count in holders if count > 0 or len(c) > 0]
        self._places = [(root.get_submodule(parent)._modules, name) for parent, name in parents]
        self._slots = [(modules[path]._parameters, name) for path, name in parameters]

    def still_there(self) -> bool:
        """Whether nothing has been replaced; what is not plain is looked for again."""
        if not self._plain:
            return False
        there = [children.get(name) for children, name in self._places]
        return there == self._modules and list(map(type, there)) == self._classes

    def parameters(self) -> list[Tensor | None] | None:
        """Return the parameters, or None where a layer is changed, hooked, or sharded."""
        if not self._plain or any(self._hooks) or any(map(_has_its_own, self._own)):
            return None
        if list(map(convolution_settings, self._convs)) != self._settings:
            return None
        for children, count in self._holders:
            if len(children) != count:
                return None
        found = [layer.get(name) for layer, name in self._slots]
        return found if _KINDS.issuperset(map(type, found)) else None

    def has_one_kind_of_norm(self) -> bool:
        """Whether all have the first one's eps and number of groups, for an op that has one."""
        for norm in getattr(self, "_norms", ()):
            first = self._norms[0]
            if norm["eps"] != first["eps"] or norm["num_groups"] != first["num_groups"]:
                return False
        return True
