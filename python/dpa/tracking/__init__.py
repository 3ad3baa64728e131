"""What a network, its weights and its settings were at the last check, and what has changed.

What packs, captures or replays asks here: :class:`Tracker` for the modules and their settings,
:class:`WeightTracker` for the weights, :class:`ModuleState` for what a capture rests on,
:class:`Snapshot` for schedulers and policies.
"""

from .module_state import ModuleState
from .tracker import OwnMode, Place, Snapshot, Tracker, find, is_dispatched, is_observed
from .weights import WeightTracker, stamp_of

__all__ = [
    "ModuleState",
    "OwnMode",
    "Place",
    "Snapshot",
    "Tracker",
    "WeightTracker",
    "find",
    "is_dispatched",
    "is_observed",
    "stamp_of",
]
