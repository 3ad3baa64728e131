"""Data-parallel training with an optimizer sharded over the processes."""

from dpa.training.sharded.optimizer import ShardedOptimizer

__all__ = ["ShardedOptimizer"]
