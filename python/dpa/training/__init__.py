"""Helpers of a training loop: optimizers, averaged weights, CUDA graphs of calls and of steps."""

from .adamw import Adam, AdamW
from .ema import EMA
from .graphed_calls import graph_calls, ungraph_calls
from .graphed_step import GraphedStep, release_graphs

__all__ = [
    "EMA",
    "Adam",
    "AdamW",
    "GraphedStep",
    "graph_calls",
    "release_graphs",
    "ungraph_calls",
]
