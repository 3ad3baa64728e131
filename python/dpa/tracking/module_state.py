"""What a captured run of a module rests on."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from torch import Tensor, nn

from dpa.tracking.tracker import Tracker
from dpa.tracking.weights import WeightTracker


class ModuleState:
    """What a captured run of a module rests on: its modules, settings, modes, hooks and places.

    ``methods`` of it run besides ``forward``. Where the parameters of ``apart`` lie others watch.
    """

    def __init__(
        self,
        root: nn.Module,
        methods: tuple[str, ...] = (),
        apart: Iterable[WeightTracker] = (),
    ):
        self._tracker = Tracker(root, methods=methods, modes=True)
        found = [module for module in self._tracker.modules.values() if module is not None]
        held = [tensors for m in found for tensors in (m._parameters, m._buffers)]
        watched = {slot for weights in apart for slot in weights.slots()}
        slots = [(t, n, v) for t in held for n, v in t.items() if (id(t), n) not in watched]
        self._absent = [(tensors, name) for tensors, name, value in slots if value is None]
        self._held = [tensors for tensors, _, value in slots if value is not None]
        self._names = [name for _, name, value in slots if value is not None]
        self._places = self._read_places()

    def _read_places(self) -> list[int] | None:
        """Return where parameters and buffers lie; None where one came or went."""
        if any(held[name] is not None for held, name in self._absent if name in held):
            return None
        try:
            return list(map(Tensor.data_ptr, map(operator.getitem, self._held, self._names)))
        except (KeyError, TypeError):
            return None

    def hooked(self) -> bool:
        """Whether a module has hooks, or all modules have."""
        return self._tracker.hooked()

    def holds(self) -> bool:
        """Whether all are as they were, and nothing hooks them."""
        return (
            self._tracker.unchanged()
            and not self._tracker.hooked()
            and self._read_places() == self._places
        )
