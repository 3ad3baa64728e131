"""What a captured call of a module rests on."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Hashable, Iterator

import torch
from torch import Tensor, nn

from dpa.tracking import Tracker

_version, _trains = operator.attrgetter("_version"), operator.attrgetter("requires_grad")
_device, _kind = operator.attrgetter("device"), operator.attrgetter("dtype", "shape")


class Parts:
    """The modules, parameters and buffers that a capture has in it.

    Checked in every call, so a check is made of dictionary lookups and of loops without bytecode.

    Attributes:
        parameters: of the module, once each.

    """

    def __init__(self, module: nn.Module):
        self._tracker = Tracker(module)
        held = [(m._parameters, m._buffers) for m in module.modules()]
        slots = [(d, name, d[name]) for two in held for d in two for name in d]
        self._held, self._names, self._values = zip(*slots, strict=True) if slots else ((), (), ())
        self._parameter_slots = [(d, n) for d, _ in held for n in d if d[n] is not None]
        self.parameters = list(module.parameters())
        self._tensors = [*self.parameters, *module.buffers()]
        self._states: dict[Hashable, int] = {}

    def unchanged(self) -> bool:
        """Whether nothing has been replaced."""
        try:
            found = map(operator.getitem, self._held, self._names)
            same = all(map(operator.is_, found, self._values))
        except KeyError:
            return False
        return same and self._tracker.unchanged()

    def are_plain(self) -> bool:
        """Whether a graph can replace it: not sharded, no hooks on inner modules."""
        sharded = not set(map(type, self.parameters)) <= {nn.Parameter}
        return not sharded and not self._tracker.hooked(inner=True)

    def state(self, device: torch.device) -> int | None:
        """A number for where and how parameters and buffers lie, which train, and modes.

        None where they are not all on ``device``, which addresses seen before tell without asking,
        or have no addresses.
        """
        tensors = self._tensors
        try:
            places = tuple(map(Tensor.data_ptr, tensors)), tuple(map(Tensor.stride, tensors))
        except RuntimeError:  # sparse or nested
            return None
        state = (
            device,
            places,
            tuple(map(_kind, tensors)),
            tuple(map(_trains, self.parameters)),
            tuple(self._tracker.modes()),
        )
        number = self._states.get(state)
        if number is None and all(map(device.__eq__, map(_device, tensors))):
            number = self._states[state] = len(self._states)
        return number

    def versions(self) -> list[int]:
        """How often each parameter has been written."""
        return list(map(_version, self.parameters))

    @contextlib.contextmanager
    def replaced(self, make: Callable[[nn.Parameter], Tensor]) -> Iterator[list[Tensor]]:
        """Lend the module what ``make`` makes of its parameters."""
        new = {id(p): make(p) for p in self.parameters}
        own = [(d, name, d[name]) for d, name in self._parameter_slots]
        try:
            for d, name, parameter in own:
                d[name] = new[id(parameter)]
            yield list(new.values())
        finally:
            for d, name, parameter in own:
                d[name] = parameter
