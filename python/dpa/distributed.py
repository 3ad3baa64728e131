"""Moved to :mod:`dpa.training.distributed`; this name goes in version 0.3."""

import warnings

from dpa.training.distributed import Ranks, ShardedOptimizer, ranks, sample_sharded

__all__ = ["Ranks", "ShardedOptimizer", "ranks", "sample_sharded"]

warnings.warn("dpa.distributed is dpa.training.distributed now", DeprecationWarning, stacklevel=2)
