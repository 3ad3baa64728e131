"""Modules that run on dpa's ops and load the weights of the projects they replace."""

from dpa.nn.blocks1d import ConditionalResidualBlock1D, Conv1dBlock
from dpa.nn.family import lerobot_parameters
from dpa.nn.lltm import LLTM
from dpa.nn.unet1d import ConditionalUnet1D

__all__ = [
    "LLTM",
    "ConditionalResidualBlock1D",
    "ConditionalUnet1D",
    "Conv1dBlock",
    "lerobot_parameters",
]
