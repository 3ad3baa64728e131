"""Residual networks of image encoders in training: their calls replay."""

from __future__ import annotations

from torch import nn

from dpa.nn.image_encoder import backbone_of
from dpa.training.graphed_calls import graph_calls, ungraph_calls


def graph_encoder(encoder: nn.Module) -> None:
    """Let the calls of an encoder's residual network replay while it trains."""
    backbone = backbone_of(encoder)
    if backbone is not None:
        graph_calls(backbone)


def ungraph_encoder(encoder: nn.Module) -> None:
    """Undo :func:`graph_encoder`."""
    backbone = backbone_of(encoder)
    if backbone is not None:
        ungraph_calls(backbone)
