"""Data-parallel training whose optimizer is shared out among the processes."""

from dpa.training.sharded.optimizer import ShardedOptimizer

__all__ = ["ShardedOptimizer"]
