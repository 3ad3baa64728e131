"""Helpers of a training loop: the average of the weights, CUDA graphs of calls and of steps."""

from .ema import EMA
from .graphed_calls import graph_calls, ungraph_calls
from .graphed_step import GraphedStep, release_graphs

__all__ = ["EMA", "GraphedStep", "graph_calls", "release_graphs", "ungraph_calls"]
