"""Data-parallel training whose optimizer is shared out among the processes."""

from .optimizer import ShardedOptimizer

__all__ = ["ShardedOptimizer"]
