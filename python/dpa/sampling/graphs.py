"""What is captured in CUDA graphs, once for each kind of call, and kept to be replayed."""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

# Allocated before a capture, and freed: more than a loop of the published networks takes.
_ROOM = 64 << 20
Inputs = dict[str, Tensor]
Made = TypeVar("Made")


def attempt(
    refused: dict[Hashable, str], key: Hashable, device: torch.device, capture: Callable[[], Made]
) -> Made | None:
    """Return what ``capture()`` captures, or None: then the work still runs, kernel by kernel.

    Where memory is short the next call tries again; what else fails is ``refused`` for good, and a
    warning says why.
    """
    try:
        # Without memory a capture would end in pieces; here the error is an ordinary one.
        torch.empty(_ROOM, dtype=torch.uint8, device=device)
        return capture()
    except torch.OutOfMemoryError:
        warnings.warn(
            "DiffusionSampler: no memory for a CUDA graph of this loop, which runs kernel by "
            "kernel: free some, the next call tries again",
            stacklevel=2,
        )
    except RuntimeError as error:
        refused[key] = str(error).partition("\n")[0]
        warnings.warn(
            "DiffusionSampler: this loop could not be captured and runs kernel by kernel: "
            f"{refused[key]}",
            RuntimeWarning,
            stacklevel=2,
        )
    return None


class GraphCache:
    """A bounded cache of captured work; the least recently used goes first.

    Calls from several streams or threads are safe: one waits for the other.

    Attributes:
        kept: what is held by its key, the latest used last.

    """

    def __init__(self, capacity: int = 8):
        self.capacity = capacity
        self.refused: dict[Hashable, str] = {}
        self.kept: OrderedDict[Hashable, Any] = OrderedDict()
        self.lock = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy, or what a pickle brings back, captures anew.
        return (type(self), (self.capacity,))

    def __len__(self) -> int:
        """Return how many are held."""
        return len(self.kept)

    def clear(self) -> None:
        """Drop all, and forget what could not be captured."""
        with self.lock:
            self.kept.clear()
            self.refused.clear()

    def find(self, key: Hashable) -> Any:
        """Return what is kept of a key, or None."""
        if key in self.kept:
            self.kept.move_to_end(key)
        return self.kept.get(key)

    def capture(self, key: Hashable, device: torch.device, capture: Callable[[], Any]) -> Any:
        """Keep and return what :func:`attempt` captures, which is not tried again once refused."""
        if key not in self.refused:
            captured = attempt(self.refused, key, device, capture)
            if captured is not None:
                self.kept[key] = captured
        while len(self.kept) > self.capacity:
            self.kept.popitem(last=False)
        return self.kept.get(key)
